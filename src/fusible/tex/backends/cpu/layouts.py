"""How tensors lie in memory."""

from __future__ import annotations

from typing import Any

import torch

from fusible import cpp_extensions as native

__all__ = ["PLAIN_CLASSES", "as_read", "layouts"]

PLAIN_CLASSES = frozenset({torch.Tensor, torch.nn.Parameter})
"""The classes of tensors that have their elements in memory of their own."""


def as_read(*operands: Any) -> bool:
    """Whether kernels read each where it lies: a contiguous tensor in host memory."""
    return all(type(x) in PLAIN_CLASSES and x.is_cpu and x.is_contiguous() for x in operands)


def layouts(tensors: list[Any]) -> bytes | None:
    """The dtypes, shapes and strides of torch tensors in host memory, as bytes to compare, at a tenth of what asking each by name costs. None where
    one is anything else, as a subclass is, or where there are no native kernels.
    """
    found: Any = native.layouts(tensors) if native.available else None
    return found
