"""The words in which signatures of the interface say what an argument may be; ``fusible.tex.calls.examination`` reads them.

To a type checker each is ``Any``: real tensors, lazy ones and quantized ones of several packages have no class in common.
"""

from __future__ import annotations

from typing import Any, TypeAlias

__all__ = ["DTypeLike", "Device", "Generator", "GroupedTensor", "QuantizedTensor", "Quantizer", "Shape", "Tensor"]

Tensor: TypeAlias = Any
"""A tensor, real, lazy or quantized."""

QuantizedTensor: TypeAlias = Any
"""A quantized tensor of any format, or its bare storage (``fusible.tex.protocol.format_of``)."""

GroupedTensor: TypeAlias = Any
"""Several tensors in one buffer (``fusible.tex.calls.grouped``)."""

Quantizer: TypeAlias = Any
"""What says how to quantize, by its attributes (``fusible.tex.protocol``)."""

DTypeLike: TypeAlias = Any
"""A ``torch.dtype``, another framework's own, a ``tex.DType`` (NVIDIA's or ours) or its integer value."""

Shape: TypeAlias = Any
"""A sequence of integers that are at least 0."""

Generator: TypeAlias = Any
"""A ``torch.Generator``; of lazy tensors, the state of one: an int64 tensor ``[2]``."""

Device: TypeAlias = Any
"""A ``torch.device``, or its name or index."""
