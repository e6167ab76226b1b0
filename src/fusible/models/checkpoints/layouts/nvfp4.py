"""NVFP4: E2M1 in blocks of 16 along a row, with a scale of E4M3 each and one of fp32 for the tensor (NVIDIA 2025, arXiv:2509.25149)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch

from fusible.models.checkpoints.layouts.layout import Parts, WeightLayout, padded, rows_of, used, whole_rows
from fusible.quantized import NVFP4Quantizer, NVFP4Tensor
from fusible.tex import DType
from fusible.tex.formats import NVFP4, Format

__all__ = ["PackedNVFloat4"]

_LARGEST = 6.0 * 448.0
"""Of an element times that of a block's scale: what the amax of a tensor is mapped to."""


@cache
def _quantizer() -> Any:
    return NVFP4Quantizer(columnwise=False)


@dataclass(frozen=True)
class PackedNVFloat4(WeightLayout):
    """Two elements to a byte, ``[..., columns / 2]``, the even one low; a scale for each 16, ``[..., columns / 16]``; and one for the tensor, fp32.

    That is ``amax / 2688``, or, where ``inverse``, ``2688 / amax``. Fusible's tensors hold the amax. From the scale of the tensor follows the amax
    that it was computed from, where that was a number of bf16, or any that gives exactly this scale. Where none does, as where a converter took the
    reciprocal of another's scale, it is the nearest: values differ by less than 2^-22 of themselves.
    """

    elements: str
    scale: str
    tensor_scale: str
    inverse: bool = False
    format: ClassVar[Format] = NVFP4

    @property
    def suffixes(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.elements, self.scale, self.tensor_scale

    def shape(self, parts: Parts) -> tuple[int, ...] | None:
        packed, scale, whole = (parts[suffix] for suffix in self.suffixes)
        if (packed.dtype, scale.dtype, whole.dtype) != (torch.uint8, torch.float8_e4m3fn, torch.float32) or len(packed.shape) < 2:
            return None
        shape = (*packed.shape[:-1], 2 * packed.shape[-1])
        fits = whole.numel == 1 and shape[-1] % 16 == 0 and scale.shape == (*shape[:-1], shape[-1] // 16)
        return whole_rows(shape, NVFP4) if fits else None

    def decode(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype, note: str) -> Any:
        packed, scale, whole = (parts[suffix] for suffix in self.suffixes)
        shape = (*packed.shape[:-1], 2 * packed.shape[-1])
        copies: dict[str, Any] = {
            "rowwise_data": packed,
            "rowwise_scale_inv": padded(scale.view(torch.uint8).reshape(rows_of(shape), -1), NVFP4, shape),
            "amax_rowwise": self._amax(whole.reshape(1)),
        }
        absent: dict[str, Any] = {"columnwise_data": None, "columnwise_scale_inv": None, "amax_columnwise": None}
        options: dict[str, Any] = {"fp4_dtype": DType.kFloat4E2M1, "with_gemm_swizzled_scales": False, "quantizer": _quantizer()}
        return NVFP4Tensor(shape, dtype, **copies, **absent, **options)

    def holds(self, tensor: Any) -> bool:
        """One amax, and no choice between 4 and 6 by another bound of the scales, which would need another factor."""
        plain = super().holds(tensor) and not tensor._with_gemm_swizzled_scales and tensor._nvfp4_e4m3_max == 448
        return plain and tensor._amax_rowwise.numel() == 1

    def encode(self, tensor: Any) -> dict[str, torch.Tensor]:
        shape = tuple(tensor.shape)
        scales = used(tensor).view(torch.float8_e4m3fn).reshape(*shape[:-1], shape[-1] // 16)
        return {self.elements: tensor._rowwise_data, self.scale: scales, self.tensor_scale: self._whole(tensor._amax_rowwise)}

    def _whole(self, amax: torch.Tensor) -> torch.Tensor:
        """The tensor's scale of an amax: one division, correctly rounded."""
        largest = torch.full_like(amax, _LARGEST)
        return largest / amax if self.inverse else amax / largest

    def _amax(self, whole: torch.Tensor) -> torch.Tensor:
        candidates = list(self._candidates(whole))
        exact = (amax for amax in candidates if torch.equal(self._whole(amax), whole))
        return next(exact, candidates[0])

    def _candidates(self, whole: torch.Tensor) -> Iterator[torch.Tensor]:
        """The nearest amax first; then the one of bf16 near it, which most weights have, and the neighbours of the nearest."""
        largest = torch.full_like(whole, _LARGEST)
        nearest = largest / whole if self.inverse else whole * largest
        rounded = nearest.to(torch.bfloat16).to(torch.float32)
        if torch.equal(self._whole(rounded), whole):
            nearest = rounded
        yield nearest
        for direction in (torch.inf, 0.0):
            yield torch.nextafter(nearest, torch.full_like(nearest, direction))
