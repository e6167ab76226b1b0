"""Dropout with a bit mask."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fusible.errors import ShapeError, expected
from fusible.tex.calls.checks import check_probability
from fusible.tex.enums import DType
from fusible.tex.formulas.arrays import Array, ArrayKernels
from fusible.tex.interface.arguments import Tensor
from fusible.tex.interface.dropout import Dropout

__all__ = ["DropoutFormulas"]


class DropoutFormulas(ArrayKernels, Dropout):
    """A backend draws the mask and reads it: one bit an element, the first one lowest."""

    def _draw_bits(self, x: Array, least: int) -> tuple[Any, Any]:
        """Which elements of ``x`` are kept, their random bytes being at least ``least``, and the bit mask of these."""
        raise NotImplementedError

    def _kept_by(self, mask: Array, shape: Sequence[int]) -> Any:
        """Which elements a bit mask keeps."""
        raise NotImplementedError

    def dropout_fwd(self, input: Tensor, dropout_probability: float, out: Array | None = None) -> list[Any]:
        check_probability(dropout_probability, "dropout_fwd")
        x = self._plain(input)
        size = math.prod(x.shape)
        if size % 16:
            raise ShapeError(expected("a multiple of 16 elements", of="the input of dropout_fwd", got=size, do="pad the input"))
        keep, mask = self._draw_bits(x, int(256 * dropout_probability))
        return [self._write(self._dropped_out(x, keep, dropout_probability), x.dtype, out), mask]

    def dropout_bwd(self, grad_output: Tensor, mask: Array, dropout_probability: float, grad_input: Tensor | None = None) -> Any:
        check_probability(dropout_probability, "dropout_bwd")
        g = self._plain(grad_output)
        size = math.prod(g.shape)
        if math.prod(mask.shape) * 8 != size or mask.dtype is not self._arrays.dtype(DType.kByte):
            got = f"{mask.dtype} {list(mask.shape)}"
            raise ShapeError(expected(f"uint8 [{size // 8}]", of="mask of dropout_bwd", got=got, do="pass the mask of dropout_fwd"))
        return self._write(self._dropped_out(g, self._kept_by(mask, g.shape), dropout_probability), g.dtype, grad_input)

    def _dropped_out(self, x: Array, keep: Array, probability: float) -> Any:
        """``x / (1 - probability)``, wide, where kept, else 0."""
        return self._arrays.where(keep, self._arrays.wide(x) * (1 / (1 - probability)), 0.0)
