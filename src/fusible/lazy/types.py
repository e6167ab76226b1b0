"""Types for the annotations of functions of lazy tensors."""

from collections.abc import Sequence

from fusible.lazy.frontend import DimensionSize, Tensor

__all__ = ["IntLike", "ShapeLike", "TensorLike"]

TensorLike = Tensor | int | float | bool
"""A lazy tensor, or a Python number that adopts the dtype of the other operand."""

IntLike = int | DimensionSize
"""An int, or the size of a dynamic dimension."""

ShapeLike = Sequence[IntLike]
"""The sizes of a tensor."""
