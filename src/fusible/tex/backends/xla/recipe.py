"""Amax, and the update of delayed scales, on lazy tensors."""

from __future__ import annotations

from typing import Any

from fusible import lazy
from fusible.lazy import Tensor
from fusible.tex.backends.xla.fp8 import bits, positive_and_finite, tensor_amax
from fusible.tex.backends.xla.operands import plain
from fusible.tex.calls.checks import check_scale_update
from fusible.tex.interface.declare import by_name
from fusible.tex.interface.recipe import Recipe
from fusible.tex.protocol import FLT_MAX, FP8_MAX, check_amax_buffer, fp8_format

__all__ = ["RecipeKernels"]


class RecipeKernels(Recipe):
    def compute_amax(self, input: Any, amax: Any) -> None:
        check_amax_buffer(amax, "amax of compute_amax", lazy.float32)
        amax.assign_(lazy.reshape(tensor_amax(plain(input)), amax.shape))

    @by_name
    def fused_amax_and_scale_update_after_reduction(self, call: Any) -> None:
        check_scale_update(call.amax_reduction_buffer, call.amax_histories, call.scales, call.amax_compute_algo)
        largest = FP8_MAX[fp8_format(call.fp8_dtype)] * 2.0**-call.margin
        reduced = lazy.split(lazy.reshape(call.amax_reduction_buffer, (-1,)), [scale.size for scale in call.scales], 0)
        for buffer, history, scale in zip(reduced, call.amax_histories, call.scales, strict=True):
            _update(buffer, history, scale, largest, call.amax_compute_algo == "max")


def _update(buffer: Tensor, history: Tensor, scale: Tensor, largest: float, of_window: bool) -> None:
    """On the bits of the amaxes, so that a subnormal one is seen."""
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
