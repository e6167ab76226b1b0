"""Transposes of FP8 bytes, of packed FP4 codes and of their scales, in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from fusible.tex.backends.torch_backend.kernels import TorchKernels
from fusible.tex.backends.torch_backend.number_formats import pack_nibbles, unpack_nibbles
from fusible.tex.calls.transpose import TILE
from fusible.tex.formulas.transpose import TransposeFormulas
from fusible.tex.protocol import outer

__all__ = ["TransposeKernels"]


class TransposeKernels(TorchKernels, TransposeFormulas):
    def _bytes_transposed(self, data: Tensor) -> Tensor:
        return data.movedim(-1, 0)

    def _codes_transposed(self, data: Tensor) -> Tensor:
        codes = unpack_nibbles(data.view(torch.uint8).reshape(outer(data.shape), data.shape[-1]))
        return pack_nibbles(codes.t().contiguous())

    def _first_swapped(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1)

    def _transpose_scales(self, scale: Tensor, out: Tensor, down: int, across: int) -> None:
        tiles = scale[: TILE * down : TILE, :across].t()
        filled = min(TILE * across, out.shape[0])
        out[:filled, :down].copy_(tiles.repeat_interleave(TILE, 0)[:filled])
        out[filled:].zero_()
        out[:, down:].zero_()
