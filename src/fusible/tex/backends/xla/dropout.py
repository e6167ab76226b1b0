"""Dropout with a bit mask: its backward. A forward draws bytes from torch's generator while it runs, which no recorded program can."""

from __future__ import annotations

from typing import Any

from fusible import lazy
from fusible.errors import ShapeError, expected
from fusible.tex.backends.xla.operands import fp32, plain, write
from fusible.tex.checks import check_probability
from fusible.tex.interface.declare import requires
from fusible.tex.interface.dropout import Dropout

__all__ = ["DropoutKernels"]


class DropoutKernels(Dropout):
    @requires(lambda request: "a recorded program cannot draw from torch's generator; prim.dropout takes its seed as a tensor")
    def dropout_fwd(self, input: Any, dropout_probability: float, out: Any = None) -> list[Any]:
        raise AssertionError("refused by supports")

    def dropout_bwd(self, grad_output: Any, mask: Any, dropout_probability: float, grad_input: Any = None) -> Any:
        check_probability(dropout_probability, "dropout_bwd")
        g = plain(grad_output)
        if mask.size * 8 != g.size or mask.dtype is not lazy.uint8:
            got = f"{mask.dtype} {list(mask.shape)}"
            raise ShapeError(expected(f"uint8 [{g.size // 8}]", of="mask of dropout_bwd", got=got, do="pass the mask of dropout_fwd"))
        bits = lazy.shift_right_logical(lazy.reshape(mask, (-1, 1)), lazy.iota((1, 8), 1, lazy.uint8)) & 1
        keep = lazy.reshape(lazy.equal(bits, 1), g.shape)
        return write(lazy.where(keep, fp32(g) * (1 / (1 - dropout_probability)), 0.0), g.dtype, grad_input)
