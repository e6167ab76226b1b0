"""Optimizer kernels over lists of lazy tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from fusible import lazy
from fusible.lazy import Tensor
from fusible.tex.backends.xla.arrays import fp32
from fusible.tex.backends.xla.block_fp8 import BLOCK_FP8
from fusible.tex.backends.xla.kernels import LazyKernels
from fusible.tex.formulas.optimizer import OptimizerFormulas

__all__ = ["OptimizerKernels"]


class OptimizerKernels(LazyKernels, OptimizerFormulas):
    _blocks, _alike = BLOCK_FP8, staticmethod(lambda x: x.shape)
    _floats = lazy.float32, lazy.bfloat16, lazy.float16
    _bytes = lazy.uint8, lazy.float8, lazy.float8e5m2
    _exponents = (lazy.uint8,)

    def _norms(self, tensors: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
        wide = map(fp32, tensors)
        squares = lazy.concatenate([lazy.reshape(lazy.sum(x * x), (1,)) for x in wide], 0)
        return lazy.reshape(lazy.sqrt(lazy.sum(squares)), (1,)), lazy.sqrt(squares)

    def _less_power(self, beta: float, steps: Tensor) -> Tensor:
        return fp32(1.0 - lazy.exp(lazy.cast(steps, lazy.float64) * math.log(beta)))

    def _write_together(self, old: Sequence[Tensor], new: Sequence[Tensor], skip: Tensor | None = None) -> None:
        for into, value in zip(old, new, strict=True):
            rounded = lazy.cast(value, into.dtype)
            into.assign_(lazy.reshape(rounded if skip is None else lazy.where(skip, into, rounded), into.shape))
