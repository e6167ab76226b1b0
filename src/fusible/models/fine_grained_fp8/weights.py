"""Weights as transformers' FP8 modules hold them, one byte an element and scales beside, as quantized tensors over the very same memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from fusible.errors import NotServedError, expected
from fusible.models.checkpoints.layouts import MXFloat8, TensorFloat8, TileFloat8
from fusible.models.checkpoints.layouts.layout import as_fp32, is_byte_scale, padded
from fusible.quantized import Float8BlockQuantizer, Float8BlockwiseQTensor, QuantizedTensor
from fusible.tex import DType
from fusible.tex.formats import FLOAT8_BLOCKS, MXFP8

__all__ = ["BlockSize", "quantized_weight", "why_no_weight"]

BlockSize = Sequence[int] | None
"""``weight_block_size`` of a configuration: the rows and the columns of a block; None where a weight has one scale."""

_SCALE = "_scale_inv"
_TENSOR, _TILES, _MXFP8 = TensorFloat8(_SCALE), TileFloat8(_SCALE), MXFloat8(_SCALE)
_LENGTH, _SHORT = FLOAT8_BLOCKS.length, MXFP8.length


def quantized_weight(weight: torch.Tensor, scale: torch.Tensor, block_size: BlockSize, dtype: torch.dtype) -> QuantizedTensor:
    """The quantized tensor of the nominal ``dtype`` over the bytes of ``weight [rows, columns]``, E4M3.

    ``scale``: one number; or ``[ceil(rows / m), ceil(columns / n)]`` for blocks of ``m x n``, in fp32, or as E8M0 or its bytes. Blocks of 128x128 are
    the tiles of a ``Float8BlockwiseQTensor``, those of 1x32 an ``MXFP8Tensor``. Where the columns of a block are another multiple of 128, or all that
    there are, they become blocks of 1x128 that repeat a scale, which takes 3% of the weight. Raises ``NotServedError`` where no tensor has these
    values.
    """
    why = why_no_weight(weight, scale, block_size)
    if why:
        of, do = f"an FP8 weight {list(weight.shape)}", "load the model with FineGrainedFP8Config(dequantize=True)"
        raise NotServedError(expected("E4M3 in blocks whose columns are multiples of 128, or 32 of E8M0", of=of, got=why, do=do))
    parts = {"": weight.detach(), _SCALE: scale.detach()}
    if scale.numel() == 1:
        return _TENSOR.decode(parts, dtype, "")
    (m, n), blocks = _block(weight, scale, block_size), scale.shape[1]
    rows, columns = weight.shape
    if _spans(n, columns):
        if (m == _LENGTH or rows <= min(m, _LENGTH)) and (n == _LENGTH or columns <= _LENGTH):
            return _TILES.decode(parts, dtype, "")
        scales = as_fp32(parts[_SCALE]).repeat_interleave(max(n // _LENGTH, 1) if blocks > 1 else -(-columns // _LENGTH), 1)
        return _in_rows(parts[""], scales[:, : -(-columns // _LENGTH)].repeat_interleave(m, 0)[:rows], dtype)
    return _MXFP8.decode(parts if m == 1 else {**parts, _SCALE: parts[_SCALE].repeat_interleave(m, 0)[:rows]}, dtype, "")


def why_no_weight(weight: torch.Tensor, scale: torch.Tensor, block_size: BlockSize) -> str:
    """Why no quantized tensor has the values of a weight ``[rows, columns]`` with its scales; empty where one has. No value is looked at."""
    if weight.dtype is not torch.float8_e4m3fn:
        return str(weight.dtype).removeprefix("torch.")
    if scale.numel() == 1:
        return ""
    block = _block(weight, scale, block_size)
    if block is None:
        return f"scales {list(scale.shape)}"
    if _spans(block[1], weight.shape[1]):
        return ""
    if block[1] != _SHORT or not is_byte_scale(scale.dtype):
        return f"blocks of {block[0]}x{block[1]} with scales of {str(scale.dtype).removeprefix('torch.')}"
    return f"{weight.shape[0]} rows, which are no multiple of {_SHORT}" if weight.shape[0] % _SHORT else ""


def _spans(n: int, columns: int) -> bool:
    """Whether blocks of ``n`` columns are made of blocks of 128, the last of which may be a part."""
    return n % _LENGTH == 0 or n >= columns


def _block(weight: torch.Tensor, scale: torch.Tensor, block_size: BlockSize) -> Any:
    """The rows and columns of a block: those of the configuration where the scales are as many as it says; else, as transformers' dequantization has
    it, as many as give each block the same. A gate and a projection of fewer rows than a block have each a scale of their own, e.g."""
    if weight.ndim != 2 or scale.ndim != 2:
        return None
    (rows, columns), (lines, blocks) = weight.shape, scale.shape
    if block_size is not None:
        m, n = block_size
        if (lines, blocks) == (-(-rows // m), -(-columns // n)):
            return m, n
    return (rows // lines, columns // blocks) if lines and blocks and not rows % lines and not columns % blocks else None


@cache
def _quantizer() -> Any:
    return Float8BlockQuantizer(DType.kFloat8E4M3, columnwise=False, force_pow_2_scales=False, block_scaling_dim=1)


def _in_rows(weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> QuantizedTensor:
    """The tensor of blocks of 1x128, from ``scales [rows, ceil(columns / 128)]``."""
    shape = tuple(weight.shape)
    rowwise: dict[str, Any] = {"rowwise_data": weight.view(torch.uint8), "rowwise_scale_inv": padded(scales.T, FLOAT8_BLOCKS, shape)}
    absent: dict[str, Any] = {"columnwise_data": None, "columnwise_scale_inv": None}
    options: dict[str, Any] = {"fp8_dtype": DType.kFloat8E4M3, "is_2D_scaled": False, "quantizer": _quantizer()}
    return Float8BlockwiseQTensor(shape, dtype, **rowwise, **absent, **options)
