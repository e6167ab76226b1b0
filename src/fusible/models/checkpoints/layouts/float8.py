"""FP8 with one scale: for the tensor, or for each output channel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch

from fusible.models.checkpoints.layouts.layout import ELEMENTS, SCALES, Parts, WeightLayout, as_fp32, padded, rows_of, used
from fusible.quantized import Float8BlockQuantizer, Float8BlockwiseQTensor, Float8CurrentScalingQuantizer, Float8Tensor
from fusible.tex import DType
from fusible.tex.formats import FLOAT8, FLOAT8_BLOCKS, Format
from fusible.tex.protocol import to_torch

__all__ = ["ChannelFloat8", "TensorFloat8", "with_a_scale_for_each_row"]


@cache
def _quantizer(element: DType) -> Any:
    return Float8CurrentScalingQuantizer(element, columnwise=False)


@cache
def _channel_quantizer(element: DType) -> Any:
    return Float8BlockQuantizer(element, columnwise=False, force_pow_2_scales=False, block_scaling_dim=1)


@dataclass(frozen=True)
class TensorFloat8(WeightLayout):
    """Elements in FP8, and one number by which all are multiplied, ``[]``, ``[1]`` or ``[1, 1]``: a ``Float8Tensor``."""

    scale: str
    format: ClassVar[Format] = FLOAT8

    @property
    def suffixes(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "", self.scale

    def shape(self, parts: Parts) -> tuple[int, ...] | None:
        weight, scale = parts[""], parts[self.scale]
        fits = weight.dtype in ELEMENTS and scale.dtype in SCALES and scale.numel == 1
        return weight.shape if fits else None

    def decode(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype, note: str) -> Any:
        weight, element = parts[""], ELEMENTS[parts[""].dtype]
        fields: dict[str, Any] = {"data": weight.view(torch.uint8), "fp8_scale_inv": as_fp32(parts[self.scale]).reshape(1)}
        return Float8Tensor(tuple(weight.shape), dtype, **fields, fp8_dtype=element, quantizer=_quantizer(element))

    def encode(self, tensor: Any) -> dict[str, torch.Tensor]:
        return {"": tensor._data.view(to_torch(tensor._fp8_dtype)), self.scale: tensor._scale_inv.reshape(1)}


@dataclass(frozen=True)
class ChannelFloat8(WeightLayout):
    """Elements in FP8, and a number for each row of the weight, ``[rows, 1]`` or ``[rows]``.

    It is held as FP8 in blocks of 1x128 whose scales are the same all along a row: the same bytes and values, in a format that products take. That
    repeats a scale for each 128 elements, which takes 3% of the weight.
    """

    scale: str
    format: ClassVar[Format] = FLOAT8_BLOCKS

    @property
    def suffixes(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "", self.scale

    def shape(self, parts: Parts) -> tuple[int, ...] | None:
        weight, scale = parts[""], parts[self.scale]
        shapes = ((*weight.shape[:-1], 1), weight.shape[:-1])
        fits = weight.dtype in ELEMENTS and scale.dtype in SCALES and len(weight.shape) > 1 and scale.shape in shapes
        return weight.shape if fits else None

    def decode(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype, note: str) -> Any:
        weight = parts[""]
        return _in_rows(weight.view(torch.uint8), as_fp32(parts[self.scale]), ELEMENTS[weight.dtype], dtype)

    def holds(self, tensor: Any) -> bool:
        if not super().holds(tensor) or tensor._is_2D_scaled:
            return False
        scales = used(tensor)
        return torch.equal(scales, scales[:1].expand_as(scales))

    def encode(self, tensor: Any) -> dict[str, torch.Tensor]:
        shape = tuple(tensor.shape)
        return {"": tensor._rowwise_data.view(to_torch(tensor._fp8_dtype)), self.scale: used(tensor)[0].reshape(*shape[:-1], 1)}


def with_a_scale_for_each_row(tensor: Any) -> Any:
    """A ``Float8Tensor``, whose scale is one, as FP8 in blocks of 1x128: the same bytes and values."""
    return _in_rows(tensor._data, tensor._scale_inv.expand(rows_of(tuple(tensor.shape))), tensor._fp8_dtype, tensor.dtype)


def _in_rows(data: torch.Tensor, scales: torch.Tensor, element: DType, dtype: torch.dtype) -> Any:
    """Bytes ``[rows, columns]`` as FP8 in blocks of 1x128 whose scales are the same all along a row."""
    shape = tuple(data.shape)
    lines, _ = FLOAT8_BLOCKS.used_scales(shape, False, False)
    repeated = scales.reshape(1, rows_of(shape)).repeat(lines, 1)
    copies: dict[str, Any] = {"rowwise_data": data, "rowwise_scale_inv": padded(repeated, FLOAT8_BLOCKS, shape)}
    absent: dict[str, Any] = {"columnwise_data": None, "columnwise_scale_inv": None}
    options: dict[str, Any] = {"fp8_dtype": element, "is_2D_scaled": False, "quantizer": _channel_quantizer(element)}
    return Float8BlockwiseQTensor(shape, dtype, **copies, **absent, **options)
