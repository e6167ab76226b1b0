"""FP8 in blocks: 128x128 with scales of fp32 or E8M0 (DeepSeek-AI 2024, arXiv:2412.19437), and MXFP8, 32 elements of a row with a scale of E8M0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch

from fusible.models.checkpoints.layouts.layout import (
    ELEMENTS,
    SCALES,
    Parts,
    WeightLayout,
    as_fp32,
    is_byte_scale,
    narrowed,
    padded,
    rows_of,
    used,
    whole_rows,
)
from fusible.quantized import Float8BlockQuantizer, Float8BlockwiseQTensor, MXFP8Quantizer, MXFP8Tensor
from fusible.tex import DType
from fusible.tex.formats import FLOAT8_BLOCKS, MXFP8, Format
from fusible.tex.protocol import to_torch

__all__ = ["MXFloat8", "TileFloat8"]

_ABSENT: dict[str, Any] = {"columnwise_data": None, "columnwise_scale_inv": None}


@cache
def _tiles(element: DType, powers: bool) -> Any:
    return Float8BlockQuantizer(element, columnwise=False, force_pow_2_scales=powers, block_scaling_dim=2)


@cache
def _mxfp8(element: DType) -> Any:
    return MXFP8Quantizer(element, columnwise=False)


@dataclass(frozen=True)
class TileFloat8(WeightLayout):
    """Elements in FP8, ``[..., rows, columns]``, and one scale for each 128x128 of them, ``[..., ceil(rows / 128), ceil(columns / 128)]``.

    Scales of E8M0 become fp32, which has their values. Of a weight with more than two dimensions, as that of several experts, rows must come in whole
    blocks: Fusible's tiles do not end where a matrix does. ``scale_dtype``: in which new scales are stored.
    """

    scale: str
    scale_dtype: torch.dtype = torch.float32
    format: ClassVar[Format] = FLOAT8_BLOCKS

    @property
    def suffixes(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "", self.scale

    def shape(self, parts: Parts) -> tuple[int, ...] | None:
        weight, scale = parts[""], parts[self.scale]
        scales = scale.dtype in SCALES or is_byte_scale(scale.dtype)
        if weight.dtype not in ELEMENTS or not scales or len(weight.shape) < 2 or scale.shape != _grid(weight.shape):
            return None
        return weight.shape if len(weight.shape) == 2 or weight.shape[-2] % 128 == 0 else None

    def decode(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype, note: str) -> Any:
        weight, scale, element = parts[""], parts[self.scale], ELEMENTS[parts[""].dtype]
        shape = tuple(weight.shape)
        scales = padded(as_fp32(scale).reshape(-1, scale.shape[-1]), FLOAT8_BLOCKS, shape, tiled=True)
        options: dict[str, Any] = {"fp8_dtype": element, "is_2D_scaled": True, "quantizer": _tiles(element, is_byte_scale(scale.dtype))}
        copies: dict[str, Any] = {"rowwise_data": weight.view(torch.uint8), "rowwise_scale_inv": scales}
        return Float8BlockwiseQTensor(shape, dtype, **copies, **_ABSENT, **options)

    def holds(self, tensor: Any) -> bool:
        return super().holds(tensor) and tensor._is_2D_scaled

    def encode(self, tensor: Any) -> dict[str, torch.Tensor]:
        scales = narrowed(used(tensor), self.scale_dtype, "scales of blocks").reshape(_grid(tuple(tensor.shape)))
        return {"": tensor._rowwise_data.view(to_torch(tensor._fp8_dtype)), self.scale: scales}


def _grid(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))


@dataclass(frozen=True)
class MXFloat8(WeightLayout):
    """Elements in FP8, ``[..., columns]``, and the exponent of one power of two for each 32 along a row, ``[..., columns / 32]``, as E8M0 or its
    bytes (OCP Microscaling Formats specification 1.0, 2023)."""

    scale: str
    scale_dtype: torch.dtype = torch.uint8
    format: ClassVar[Format] = MXFP8

    @property
    def suffixes(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "", self.scale

    def shape(self, parts: Parts) -> tuple[int, ...] | None:
        weight, scale = parts[""], parts[self.scale]
        if weight.dtype not in ELEMENTS or not is_byte_scale(scale.dtype) or len(weight.shape) < 2:
            return None
        *leading, columns = weight.shape
        fits = columns % 32 == 0 and scale.shape == (*leading, columns // 32)
        return whole_rows(weight.shape, MXFP8) if fits else None

    def decode(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype, note: str) -> Any:
        weight, element = parts[""], ELEMENTS[parts[""].dtype]
        shape = tuple(weight.shape)
        scales = padded(parts[self.scale].view(torch.uint8).reshape(rows_of(shape), -1), MXFP8, shape)
        options: dict[str, Any] = {"fp8_dtype": element, "with_gemm_swizzled_scales": False, "quantizer": _mxfp8(element)}
        return MXFP8Tensor(shape, dtype, rowwise_data=weight.view(torch.uint8), rowwise_scale_inv=scales, **_ABSENT, **options)

    def holds(self, tensor: Any) -> bool:
        return super().holds(tensor) and not tensor._with_gemm_swizzled_scales

    def encode(self, tensor: Any) -> dict[str, torch.Tensor]:
        shape = tuple(tensor.shape)
        scales = used(tensor).reshape(*shape[:-1], shape[-1] // 32).view(self.scale_dtype)
        return {"": tensor._rowwise_data.view(to_torch(tensor._fp8_dtype)), self.scale: scales}
