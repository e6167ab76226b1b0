"""Primitives beyond NVIDIA's interface, on lazy tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fusible import lazy
from fusible.errors import ShapeError, expected
from fusible.lazy import Tensor
from fusible.tex.backends.xla.dtypes import to_lazy
from fusible.tex.backends.xla.groups import pad_groups, unpad_groups
from fusible.tex.backends.xla.operands import fp32, row_sum
from fusible.tex.backends.xla.random import drop_threshold, words
from fusible.tex.calls.checks import check_probability
from fusible.tex.interface.prim import Prim

__all__ = ["PrimKernels"]


class PrimKernels(Prim):
    def prim_add(self, a: Any, b: Any, dtype: Any = None) -> Any:
        target = a.dtype if dtype is None else to_lazy(dtype)
        if a.dtype is b.dtype is target and target.is_integer:
            return a + b
        return lazy.cast(fp32(a) + fp32(b), target)

    def prim_scale(self, x: Any, factor: float, dtype: Any = None) -> Any:
        return lazy.cast(fp32(x) * factor, x.dtype if dtype is None else to_lazy(dtype))

    def prim_cast(self, x: Any, dtype: Any) -> Any:
        return lazy.cast(x, to_lazy(dtype))

    def prim_copy(self, x: Any) -> Any:
        return Tensor.from_trace_tensor(x.trace_tensor)

    def prim_transpose(self, x: Any) -> Any:
        if x.ndim != 2:
            raise ShapeError(expected("2 dimensions", of="the matrix of prim.transpose", got=list(x.shape), do="reshape it"))
        return lazy.transpose(x, -2, -1)

    def prim_permute(self, x: Any, dims: Sequence[int]) -> Any:
        return lazy.permute(x, dims)

    def prim_row_sum(self, x: Any, dtype: Any = None) -> Any:
        return lazy.cast(row_sum(x), x.dtype if dtype is None else to_lazy(dtype))

    def prim_reshape(self, x: Any, shape: Sequence[int]) -> Any:
        return lazy.reshape(x, tuple(shape))

    def prim_empty(self, shape: Sequence[int], dtype: Any, like: Any) -> Any:
        return lazy.zeros(tuple(shape), to_lazy(dtype))

    def prim_full(self, shape: Sequence[int], value: float, dtype: Any, like: Any) -> Any:
        return lazy.full(tuple(shape), value, to_lazy(dtype))

    def prim_concatenate(self, tensors: Sequence[Any], dim: int) -> Any:
        return lazy.concatenate(list(tensors), dim)

    def prim_split(self, x: Any, sizes: Sequence[int], dim: int) -> list[Any]:
        return list(lazy.split(x, list(sizes), dim))

    def prim_pad_groups(self, x: Any, sizes: Any, multiple: int) -> tuple[Any, Any]:
        return pad_groups(x, sizes, multiple)

    def prim_unpad_groups(self, x: Any, sizes: Any, multiple: int, rows: int) -> Any:
        return unpad_groups(x, sizes, multiple, rows)

    def prim_rope_angles(self, positions: int, width: int, base: float, like: Any) -> Any:
        """Computed here, in float64, and stored: a program reads the angles as a constant."""
        if width % 2:
            raise ShapeError(expected("an even width", of="prim.rope_angles", got=width, do="pass the rotated width of a head"))
        frequencies = np.power(np.float64(base), np.arange(0, width, 2, dtype=np.float64) / -width)
        angles = np.outer(np.arange(positions, dtype=np.float64), frequencies).astype(np.float32)
        return Tensor(np.concatenate([angles, angles], -1).reshape(positions, 1, 1, width))

    def prim_dropout(self, x: Any, probability: float, seed: Any, offset: int) -> tuple[Any, Any]:
        check_probability(probability, "prim.dropout")
        counter = lazy.iota((x.size,), 0, lazy.uint64) + (offset << 40)
        mask = lazy.reshape(lazy.cast(words(seed, counter) >= drop_threshold(probability), lazy.uint8), x.shape)
        return _scaled(x, mask, probability), mask

    def prim_dropout_backward(self, dy: Any, mask: Any, probability: float) -> Any:
        check_probability(probability, "prim.dropout_backward")
        return _scaled(dy, mask, probability)


def _scaled(x: Tensor, mask: Tensor, probability: float) -> Tensor:
    return lazy.cast(fp32(x) * fp32(mask) * (1 / (1 - probability)), x.dtype)
