"""How tensors lie in memory."""

from __future__ import annotations

import math
from typing import Any

import torch

from fusible import cpp_extensions as native

__all__ = ["HOST", "PLAIN_CLASSES", "as_read", "layouts", "pattern"]

HOST = torch.device("cpu")
"""Where results are made, whatever torch's default device is."""

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


def pattern(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An element, spread over the shape: of it ``torch.empty_like`` makes a contiguous tensor in two thirds of what a shape and a dtype cost. Large
    ones leave more holes in glibc's heap than those that ``torch.empty`` makes."""
    return torch.empty(shape if math.prod(shape) <= 1 else (), dtype=dtype, device=HOST).expand(shape)
