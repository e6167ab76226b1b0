"""How tensors lie, at a tenth of what asking each by name costs."""

from __future__ import annotations

from typing import Any

from fusible import cpp_extensions as native

__all__ = ["layouts"]


def layouts(tensors: list[Any]) -> bytes | None:
    """The dtypes, shapes and strides of torch tensors in host memory, as bytes to compare. None where one is anything else, as a subclass is, or
    where there are no native kernels."""
    return native.layouts(tensors) if native.available else None
