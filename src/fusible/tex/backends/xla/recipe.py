"""The update of delayed scales, on lazy tensors."""

from __future__ import annotations

from collections.abc import Iterable

from fusible import lazy
from fusible.lazy import Tensor
from fusible.tex.backends.xla.fp8 import bits, positive_and_finite
from fusible.tex.backends.xla.kernels import LazyKernels
from fusible.tex.formulas.recipe import RecipeFormulas
from fusible.tex.protocol import FLT_MAX

__all__ = ["RecipeKernels"]


class RecipeKernels(LazyKernels, RecipeFormulas):
    def _update_scales(self, updates: Iterable[tuple[Tensor, Tensor, Tensor]], largest: float, of_window: bool) -> None:
        """On the bits of the amaxes, so that a subnormal one is seen."""
        for buffer, history, scale in updates:
            past, now = bits(history), bits(buffer)
            last = lazy.where(now != 0, now, past[0])
            seen = last != 0
            newest = last[None]
            moved = lazy.concatenate([lazy.zeros(newest.shape, lazy.uint32), past[2:], newest], 0)[: history.shape[0]]
            amax = last
            if of_window:
                amax = lazy.where(seen, lazy.max(lazy.concatenate([past[1:], newest], 0), 0), 0)
            amax = lazy.bitcast(amax, lazy.float32)
            new = lazy.reshape(lazy.minimum(largest / amax, FLT_MAX), scale.shape)
            history.assign_(lazy.bitcast(lazy.where(seen, moved, past), lazy.float32))
            scale.assign_(lazy.where(lazy.reshape(positive_and_finite(amax), scale.shape), new, scale))
