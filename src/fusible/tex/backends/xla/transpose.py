"""Transposes of FP8 bytes, of packed FP4 codes and of their scales, on lazy tensors."""

from __future__ import annotations

from fusible import lazy
from fusible.lazy import Tensor
from fusible.tex.backends.xla.blocks import padded
from fusible.tex.backends.xla.fp8 import transpose_bytes
from fusible.tex.backends.xla.kernels import LazyKernels
from fusible.tex.backends.xla.number_formats import pack_nibbles, unpack_nibbles
from fusible.tex.backends.xla.operands import flat
from fusible.tex.calls.transpose import TILE
from fusible.tex.formulas.transpose import TransposeFormulas

__all__ = ["TransposeKernels"]


class TransposeKernels(LazyKernels, TransposeFormulas):
    def _bytes_transposed(self, data: Tensor) -> Tensor:
        return transpose_bytes(data)

    def _codes_transposed(self, data: Tensor) -> Tensor:
        return pack_nibbles(lazy.transpose(unpack_nibbles(flat(data)), 0, 1))

    def _first_swapped(self, x: Tensor) -> Tensor:
        return lazy.transpose(x, 0, 1)

    def _transpose_scales(self, scale: Tensor, out: Tensor, down: int, across: int) -> None:
        tiles = lazy.transpose(scale[: TILE * down : TILE, :across], 0, 1)
        filled = lazy.reshape(lazy.broadcast_to(tiles[:, None], (across, TILE, down)), (across * TILE, down))
        out.assign_(padded(filled[: out.shape[0]], out.shape))
