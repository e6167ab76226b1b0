"""MXFP4 on lazy tensors, whose programs are compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fusible import lazy
from fusible.lazy import Tensor
from fusible.tex.backends.xla.blocks import block_amax, scale_blocks
from fusible.tex.backends.xla.fp8 import bits
from fusible.tex.backends.xla.number_formats import decode_e2m1, encode_e2m1, pack_nibbles, times_power_of_two, unpack_nibbles
from fusible.tex.formats import BlockCodec, Copy
from mxfp4.number_format import MXFP4

__all__ = ["CODEC"]

_BLOCK = (1, MXFP4.length)


def _encode(x: Tensor, quantizer: Any, rowwise: bool, columnwise: bool) -> tuple[dict[str, Tensor], Iterator[Copy]]:
    sources = {way: x if way == "rowwise" else lazy.transpose(x, 0, 1) for way, asked in (("rowwise", rowwise), ("columnwise", columnwise)) if asked}
    return {}, ((way, *_cast(lazy.cast(lines, lazy.float32))) for way, lines in sources.items())


def _cast(lines: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, two to a byte, and the scales' bytes; 0xFF, which is NaN, of a block with an element that is not finite."""
    exponent = lazy.cast(lazy.shift_right_logical(bits(block_amax(lines, _BLOCK)), 23), lazy.int32)
    code = lazy.cast(lazy.where(exponent == 0xFF, exponent, lazy.maximum(exponent - 2, 0)), lazy.uint8)
    return pack_nibbles(encode_e2m1(scale_blocks(lines, code, _BLOCK, _divided))), code


def _values(x: Any, way: str, scales: Tensor, shape: tuple[int, int], undo: bool) -> tuple[Tensor, None]:
    lines = shape if way == "rowwise" else (shape[1], shape[0])
    codes = unpack_nibbles(lazy.reshape(getattr(x, f"_{way}_data"), (lines[0], lines[1] // 2)))
    values = scale_blocks(decode_e2m1(codes), scales, _BLOCK, _multiplied)
    return values if way == "rowwise" else lazy.transpose(values, 0, 1), None


def _multiplied(x: Tensor, code: Tensor) -> Tensor:
    return lazy.where(code == 0xFF, float("nan"), times_power_of_two(x, lazy.cast(code, lazy.int32) - 127))


def _divided(x: Tensor, code: Tensor) -> Tensor:
    return lazy.where(code == 0xFF, float("nan"), times_power_of_two(x, 127 - lazy.cast(code, lazy.int32)))


CODEC = BlockCodec(_encode, _values)
