"""Primitives beyond NVIDIA's interface, on lazy tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fusible import lazy
from fusible.lazy import Tensor
from fusible.tex.backends.xla.arrays import fp32
from fusible.tex.backends.xla.dtypes import to_lazy
from fusible.tex.backends.xla.groups import pad_groups, unpad_groups
from fusible.tex.backends.xla.kernels import LazyKernels
from fusible.tex.backends.xla.random import words
from fusible.tex.calls.seeds import drop_threshold
from fusible.tex.formulas.prim import PrimFormulas
from fusible.tex.interface.arguments import DTypeLike

__all__ = ["PrimKernels"]


class PrimKernels(LazyKernels, PrimFormulas):
    def prim_add(self, a: Tensor, b: Tensor, dtype: DTypeLike | None = None) -> Any:
        target = a.dtype if dtype is None else to_lazy(dtype)
        if a.dtype is b.dtype is target and target.is_integer:
            return a + b
        return lazy.cast(fp32(a) + fp32(b), target)

    def prim_empty(self, shape: Sequence[int], dtype: DTypeLike, like: Tensor) -> Any:
        return lazy.zeros(tuple(shape), to_lazy(dtype))

    def prim_pad_groups(self, x: Tensor, sizes: Tensor, multiple: int) -> tuple[Any, Any]:
        return pad_groups(x, sizes, multiple)

    def prim_unpad_groups(self, x: Tensor, sizes: Tensor, multiple: int, rows: int) -> Any:
        return unpad_groups(x, sizes, multiple, rows)

    def _angle_table(self, positions: int, width: int, base: float, like: Tensor, factors: Sequence[float]) -> Tensor:
        """Computed here and stored: a program reads the angles as a constant."""
        frequencies = np.power(np.float64(base), np.arange(0, width, 2, dtype=np.float64) / -width)
        if factors:
            frequencies *= np.array(factors, np.float64)
        angles = np.outer(np.arange(positions, dtype=np.float64), frequencies).astype(np.float32)
        return Tensor(np.concatenate([angles, angles], -1).reshape(positions, 1, 1, width))

    def _drawn_mask(self, x: Tensor, probability: float, seed: Tensor, offset: int) -> Tensor:
        counter = lazy.iota((x.size,), 0, lazy.uint64) + (offset << 40)
        return lazy.reshape(lazy.cast(words(seed, counter) >= drop_threshold(probability), lazy.uint8), x.shape)
