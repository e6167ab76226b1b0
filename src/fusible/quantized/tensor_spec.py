"""``TensorSpec``: what a tensor is, quantized or not, without its data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusible.errors import ArgumentError, expected
from fusible.quantized.quantizer import Quantizer

__all__ = ["TensorSpec", "to_tensor_spec"]


@dataclass
class TensorSpec:
    """Shape, nominal dtype and, of a quantized tensor, a quantizer: a copy of the one that is given, so that ``update_usage`` changes it here alone.

    The *inner* tensors of a quantized one are its bytes and scales, in the order of its ``__tensor_flatten__``; of another, itself. ``device``
    defaults to the CPU.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    quantizer: Any = None
    requires_grad: bool = False
    device: torch.device | None = None

    def __post_init__(self) -> None:
        if self.quantizer is not None:
            self.quantizer = self.quantizer.copy()

    @property
    def is_quantized(self) -> bool:
        return self.quantizer is not None

    def update_usage(self, *, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Say which copies a tensor has; None leaves one as it is. Raises ``ArgumentError`` of a tensor that is not quantized."""
        self._quantizer("update_usage").set_usage(rowwise=rowwise_usage, columnwise=columnwise_usage)

    def inner_names(self) -> tuple[str, ...]:
        """The attributes that are inner tensors; ``("data",)`` where it is not quantized."""
        return ("data",) if self.quantizer is None else tuple(self.quantizer.inner_tensor_specs(self.shape))

    def create_metadata(self) -> dict[str, Any]:
        """What ``__tensor_unflatten__`` needs beside the inner tensors."""
        if self.quantizer is None:
            return {"is_tensor": True, "is_quantized": False, "dtype": self.dtype, "requires_grad": self.requires_grad}
        return self.quantizer.create_metadata(self.shape, dtype=self.dtype, requires_grad=self.requires_grad)

    def create_inner_tensors(self) -> list[torch.Tensor]:
        """New inner tensors of unspecified values."""
        if self.quantizer is None:
            return [torch.empty(self.shape, dtype=self.dtype, device=self.device)]
        return list(self.quantizer.alloc_tensors(self.shape, device=self.device).values())

    def assemble(self, inner_tensors: Sequence[torch.Tensor]) -> Any:
        """The tensor, or bare storage, that consists of these inner tensors. Raises ``ArgumentError`` for another number of them."""
        names = self.inner_names()
        if len(inner_tensors) != len(names):
            of, got = "TensorSpec.assemble", f"{len(inner_tensors)} tensors"
            raise ArgumentError(expected(f"one tensor each for {', '.join(names)}", of=of, got=got, do="give those of create_inner_tensors"))
        if self.quantizer is None:
            return inner_tensors[0]
        metadata, strides = self.create_metadata(), torch.empty(self.shape, device="meta").stride()
        return metadata["cls"].__tensor_unflatten__(dict(zip(names, inner_tensors, strict=True)), metadata, self.shape, strides)

    def create_tensor(self) -> Any:
        """A new tensor of unspecified values."""
        made = self.assemble(self.create_inner_tensors())
        return made.requires_grad_(self.requires_grad) if self.quantizer is None else made

    def _quantizer(self, method: str) -> Quantizer:
        if self.quantizer is None:
            raise ArgumentError(expected("a quantized tensor's", of=f"TensorSpec.{method}", got="a plain one's", do="ask is_quantized first"))
        return self.quantizer


def to_tensor_spec(tensor: Any) -> TensorSpec:
    """The spec of a tensor, quantized or not, or of a bare storage."""
    quantizer = getattr(tensor, "_quantizer", None)
    return TensorSpec(tuple(tensor.shape), tensor.dtype, quantizer, bool(getattr(tensor, "requires_grad", False)), tensor.device)
