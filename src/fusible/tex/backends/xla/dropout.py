"""Dropout with a bit mask. The mask is drawn from torch's generator when the call is recorded: the very one that the torch backend would draw."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fusible import lazy
from fusible.errors import NotServedError, ShapeError, expected
from fusible.lazy import Tensor
from fusible.tex.backends.xla.operands import fp32, plain, write
from fusible.tex.calls.checks import check_probability
from fusible.tex.interface.dropout import Dropout

__all__ = ["DropoutKernels"]


class DropoutKernels(Dropout):
    def dropout_fwd(self, input: Any, dropout_probability: float, out: Any = None) -> list[Any]:
        check_probability(dropout_probability, "dropout_fwd")
        x = plain(input)
        if x.size % 16:
            raise ShapeError(expected("a multiple of 16 elements", of="the input of dropout_fwd", got=x.size, do="pad the input"))
        if lazy.Trace([x]).tracers:
            got = "an argument of a function being compiled, whose every run would drop the same elements"
            do = "use tex.prim.dropout, which takes its seed as a tensor"
            raise NotServedError(expected("a tensor with a value", of="dropout_fwd on lazy tensors", got=got, do=do))
        random = torch.empty(x.size, dtype=torch.uint8).random_(0, 256).numpy()
        mask = lazy.Tensor(np.packbits(random >= int(256 * dropout_probability), bitorder="little"))
        return [write(_kept(x, mask, dropout_probability), x.dtype, out), mask]

    def dropout_bwd(self, grad_output: Any, mask: Any, dropout_probability: float, grad_input: Any = None) -> Any:
        check_probability(dropout_probability, "dropout_bwd")
        g = plain(grad_output)
        if mask.size * 8 != g.size or mask.dtype is not lazy.uint8:
            got = f"{mask.dtype} {list(mask.shape)}"
            raise ShapeError(expected(f"uint8 [{g.size // 8}]", of="mask of dropout_bwd", got=got, do="pass the mask of dropout_fwd"))
        return write(_kept(g, mask, dropout_probability), g.dtype, grad_input)


def _kept(x: Tensor, mask: Tensor, probability: float) -> Tensor:
    """``x / (1 - probability)`` in fp32 where the mask has a 1, else 0."""
    bits = lazy.shift_right_logical(lazy.reshape(mask, (-1, 1)), lazy.iota((1, 8), 1, lazy.uint8)) & 1
    keep = lazy.reshape(bits == 1, x.shape)
    return lazy.where(keep, fp32(x) * (1 / (1 - probability)), 0.0)
