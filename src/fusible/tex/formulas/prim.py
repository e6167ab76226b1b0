"""Primitives beyond NVIDIA's interface."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fusible.errors import ArgumentError, ShapeError, check_number, expected
from fusible.tex.calls.checks import check_probability
from fusible.tex.formulas.arrays import Array, ArrayKernels
from fusible.tex.interface.prim import Prim
from fusible.tex.protocol import check_shape

__all__ = ["PrimFormulas"]


class PrimFormulas(ArrayKernels, Prim):
    """A backend has the sum, which is one kernel where it can be, what is of no specified value, groups, and what is drawn."""

    def _angle_table(self, positions: int, width: int, base: float, like: Array, factors: Sequence[float]) -> Any:
        """``[positions, 1, 1, width]``: position times ``base^(-2 i / width)`` for ``i < width / 2``, by its factor, twice, computed in float64."""
        raise NotImplementedError

    def _drawn_mask(self, x: Array, probability: float, seed: Array, offset: int) -> Any:
        """uint8 of the shape of ``x``: 0 where an element is dropped, else 1."""
        raise NotImplementedError

    def prim_scale(self, x: Array, factor: float, dtype: Any = None) -> Any:
        xp = self._arrays
        return xp.cast(xp.wide(x) * factor, x.dtype if dtype is None else xp.dtype(dtype))

    def prim_cast(self, x: Array, dtype: Any) -> Any:
        return self._arrays.cast(x, self._arrays.dtype(dtype))

    def prim_copy(self, x: Array) -> Any:
        return self._arrays.copy(x)

    def prim_attention_merge(self, o: Array, lse: Array, o_step: Array, lse_step: Array) -> tuple[Any, Any]:
        xp = self._arrays
        largest = xp.maximum(lse, lse_step)
        base = xp.filled(xp.filled(largest, largest == -math.inf, 0.0), largest == math.inf, 0.0)
        first, second = xp.exp(lse - base), xp.exp(lse_step - base)
        total = first + second
        some = xp.filled(total, total == 0.0, 1.0)
        shares = [xp.permute(part / some, (0, 2, 1, 3)) for part in (first, second)]
        merged = xp.wide(o) * shares[0] + xp.wide(o_step) * shares[1]
        return xp.cast(merged, o.dtype), base + xp.log(total)

    def prim_transpose(self, x: Array) -> Any:
        if x.ndim != 2:
            raise ShapeError(expected("2 dimensions", of="the matrix of prim.transpose", got=list(x.shape), do="reshape it"))
        return self._arrays.transpose(x)

    def prim_permute(self, x: Array, dims: Sequence[int]) -> Any:
        rank = x.ndim
        if sorted(dim % rank if -rank <= dim < rank else dim for dim in dims) != list(range(rank)):
            raise ArgumentError(expected(f"each of {rank} dimensions once", of="dims of prim.permute", got=list(dims), do="name them all"))
        return self._arrays.contiguous(self._arrays.permute(x, dims))

    def prim_row_sum(self, x: Array, dtype: Any = None) -> Any:
        return self._arrays.cast(self._row_sum(x), x.dtype if dtype is None else self._arrays.dtype(dtype))

    def prim_reshape(self, x: Array, shape: Sequence[int]) -> Any:
        return self._arrays.reshape(x, shape)

    def prim_full(self, shape: Sequence[int], value: float, dtype: Any, like: Array) -> Any:
        return self._arrays.full(shape, value, self._arrays.dtype(dtype), like)

    def prim_concatenate(self, tensors: Sequence[Any], dim: int) -> Any:
        return self._arrays.concatenate(tensors, dim)

    def prim_split(self, x: Array, sizes: Sequence[int], dim: int) -> list[Any]:
        return list(self._arrays.split(x, sizes, dim))

    def prim_rope_angles(self, positions: int, width: int, base: float, like: Array, factors: Sequence[float] = ()) -> Any:
        if width % 2:
            raise ShapeError(expected("an even width", of="prim.rope_angles", got=width, do="pass the rotated width of a head"))
        if factors and len(factors) != width // 2:
            do = "give one of each frequency, or none"
            raise ShapeError(expected(f"{width // 2} factors", of="prim.rope_angles", got=len(factors), do=do))
        for factor in factors:
            check_number(factor, "factors of prim.rope_angles", least=0)
        return self._angle_table(positions, width, base, like, factors)

    def prim_dropout(self, x: Array, probability: float, seed: Array, offset: int) -> tuple[Any, Any]:
        check_probability(probability, "prim.dropout")
        mask = self._drawn_mask(x, probability, seed, offset)
        return self._masked(x, mask, probability), mask

    def prim_dropout_backward(self, dy: Array, mask: Array, probability: float) -> Any:
        check_probability(probability, "prim.dropout_backward")
        check_shape(mask, dy.shape, "mask of dropout_backward")
        return self._masked(dy, mask, probability)

    def _masked(self, x: Array, mask: Array, probability: float) -> Any:
        xp = self._arrays
        return xp.cast(xp.times(xp.masked(xp.wide(x), mask), 1 / (1 - probability)), x.dtype)
