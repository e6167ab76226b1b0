"""MXFP4 on torch tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fusible.tex.backends.torch_backend.blocks import block_amax, scale_blocks_
from fusible.tex.backends.torch_backend.number_formats import (
    decode_e2m1_pairs,
    decode_e8m0,
    encode_e2m1,
    factor_of_e8m0,
    pack_nibbles,
)
from fusible.tex.formats import BlockCodec, Copy
from mxfp4.number_format import MXFP4

__all__ = ["CODEC"]

_BLOCK = (1, MXFP4.length)


def _encode(x: Tensor, quantizer: Any, rowwise: bool, columnwise: bool) -> tuple[dict[str, Tensor], Iterator[Copy]]:
    sources = {way: x if way == "rowwise" else x.t() for way, asked in (("rowwise", rowwise), ("columnwise", columnwise)) if asked}
    return {}, ((way, *_cast(lines.to(torch.float32, copy=True).contiguous())) for way, lines in sources.items())


def _cast(lines: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, two to a byte, and the scales' bytes; 0xFF, which is NaN, of a block with an element that is not finite."""
    exponent = block_amax(lines, _BLOCK).view(torch.int32) >> 23  # of a number that is not negative: floor(log2) + 127
    code = torch.where(exponent == 0xFF, exponent, (exponent - 2).clamp_min(0)).to(torch.uint8)
    return pack_nibbles(encode_e2m1(scale_blocks_(lines, factor_of_e8m0(code), _BLOCK))), code


def _values(x: Any, way: str, scales: Tensor, shape: tuple[int, int], undo: bool) -> tuple[Tensor, None]:
    lines = shape if way == "rowwise" else (shape[1], shape[0])
    values = decode_e2m1_pairs(getattr(x, f"_{way}_data").reshape(lines[0], lines[1] // 2))
    values = scale_blocks_(values, decode_e8m0(scales), _BLOCK)
    return values if way == "rowwise" else values.t(), None


CODEC = BlockCodec(_encode, _values)
