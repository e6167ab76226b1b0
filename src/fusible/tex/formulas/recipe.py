"""Amax, and the update of delayed scales."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fusible.tex.calls.checks import check_scale_update
from fusible.tex.formulas.arrays import Array, ArrayKernels
from fusible.tex.interface.arguments import Tensor
from fusible.tex.interface.declare import CallArguments, by_name
from fusible.tex.interface.recipe import Recipe
from fusible.tex.protocol import FP8_MAX, check_amax_buffer, fp8_format

__all__ = ["RecipeFormulas"]


class RecipeFormulas(ArrayKernels, Recipe):
    def _update_scales(self, updates: Iterable[tuple[Any, Any, Any]], largest: float, of_window: bool) -> None:
        """Of each ``(buffer, history, scale)``: move the history on by the amaxes of the buffer, and let the scale follow, from the largest of the
        window or the latest."""
        raise NotImplementedError

    def compute_amax(self, input: Tensor, amax: Array) -> None:
        xp = self._arrays
        check_amax_buffer(amax, "amax of compute_amax", xp.float32)
        xp.put(amax, xp.reshape(xp.fp8.tensor_amax(self._plain(input)), amax.shape))

    @by_name
    def fused_amax_and_scale_update_after_reduction(self, call: CallArguments) -> None:
        xp = self._arrays
        sizes = check_scale_update(call.amax_reduction_buffer, call.amax_histories, call.scales, call.amax_compute_algo)
        largest = FP8_MAX[fp8_format(call.fp8_dtype)] * 2.0**-call.margin
        reduced = xp.split(xp.reshape(call.amax_reduction_buffer, (-1,)), sizes, 0)
        self._update_scales(zip(reduced, call.amax_histories, call.scales, strict=True), largest, call.amax_compute_algo == "max")
