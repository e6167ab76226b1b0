"""MXFP4: E2M1 in blocks of 32 along a row with a power of two each, two elements to a byte, the even one low."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch

from fusible.models.checkpoints.layouts.layout import Parts, WeightLayout, rows_of, used
from fusible.models.checkpoints.mxfp4 import MXFP4_WEIGHTS, MXFP4WeightQuantizer, MXFP4WeightTensor
from fusible.tex import DType
from fusible.tex.formats import Format

__all__ = ["PackedMXFloat4"]


@cache
def _quantizer() -> Any:
    return MXFP4WeightQuantizer()


@dataclass(frozen=True)
class PackedMXFloat4(WeightLayout):
    """Bytes ``[..., columns / 2]``, or where ``grouped`` ``[..., columns / 32, 16]``, and bytes ``s`` of the scales ``2^(s - 127)``,
    ``[..., columns / 32]``."""

    elements: str
    scale: str
    grouped: bool = False
    format: ClassVar[Format] = MXFP4_WEIGHTS

    @property
    def suffixes(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.elements, self.scale

    def shape(self, parts: Parts) -> tuple[int, ...] | None:
        packed, scale = parts[self.elements], parts[self.scale]
        if (packed.dtype, scale.dtype) != (torch.uint8, torch.uint8) or len(scale.shape) < 2:
            return None
        return (*scale.shape[:-1], 32 * scale.shape[-1]) if packed.shape == self._packed(scale.shape) else None

    def decode(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype, note: str) -> Any:
        packed, scale = parts[self.elements], parts[self.scale]
        shape = (*scale.shape[:-1], 32 * scale.shape[-1])
        copies: dict[str, Any] = {"rowwise_data": packed.view(*shape[:-1], shape[-1] // 2), "rowwise_scale_inv": scale.view(rows_of(shape), -1)}
        absent: dict[str, Any] = {"columnwise_data": None, "columnwise_scale_inv": None}
        return MXFP4WeightTensor(shape, dtype, **copies, **absent, fp4_dtype=DType.kFloat4E2M1, quantizer=_quantizer())

    def encode(self, tensor: Any) -> dict[str, torch.Tensor]:
        scales = used(tensor).view(*tensor.shape[:-1], tensor.shape[-1] // 32)
        return {self.elements: tensor._rowwise_data.view(self._packed(tuple(scales.shape))), self.scale: scales}

    def _packed(self, scales: tuple[int, ...]) -> tuple[int, ...]:
        return (*scales, 16) if self.grouped else (*scales[:-1], 16 * scales[-1])
