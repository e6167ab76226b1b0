"""The words in which signatures of the interface say what an argument may be; ``fusible.tex.examination`` reads them.

To a type checker each is ``Any``: real tensors, lazy ones and quantized ones of several packages have no class in common.
"""

from __future__ import annotations

from typing import Any, TypeAlias

__all__ = ["Device", "DTypeLike", "FloatDType", "FP8Format", "GroupedTensor", "QuantizedTensor", "Quantizer", "Shape", "Size", "Tensor"]

Tensor: TypeAlias = Any
"""A tensor, real, lazy or quantized."""

QuantizedTensor: TypeAlias = Any
"""A quantized tensor of any format, or its bare storage (``fusible.tex.protocol.format_of``)."""

GroupedTensor: TypeAlias = Any
"""Several tensors in one buffer (``fusible.tex.grouped_call``)."""

Quantizer: TypeAlias = Any
"""What says how to quantize, by its attributes (``fusible.tex.protocol``)."""

DTypeLike: TypeAlias = Any
"""A ``torch.dtype``, another framework's own, a ``tex.DType`` (NVIDIA's or ours) or its integer value."""

FloatDType: TypeAlias = Any
"""A ``DTypeLike`` that stands for fp32, bf16 or fp16."""

FP8Format: TypeAlias = Any
"""``kFloat8E4M3`` or ``kFloat8E5M2``: the enumeration's member, its integer value, or the ``torch.dtype``."""

Shape: TypeAlias = Any
"""A sequence of integers that are at least 0."""

Size: TypeAlias = int
"""An integer that is at least 0."""

Device: TypeAlias = Any
"""A ``torch.device``, or its name or index."""
