"""Amax, and the update of delayed scales."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusible.tex.backends.torch_backend.fp8 import tensor_amax
from fusible.tex.backends.torch_backend.operands import plain
from fusible.tex.calls.checks import check_scale_update
from fusible.tex.calls.inference_tensors import writing
from fusible.tex.interface.declare import by_name
from fusible.tex.interface.recipe import Recipe
from fusible.tex.protocol import FLT_MAX, FP8_MAX, check_amax_buffer, fp8_format

__all__ = ["RecipeKernels"]


class RecipeKernels(Recipe):
    def compute_amax(self, input: Any, amax: Any) -> None:
        check_amax_buffer(amax, "amax of compute_amax")
        with writing(amax):
            amax.copy_(tensor_amax(plain(input)).view(amax.shape))

    @by_name
    def fused_amax_and_scale_update_after_reduction(self, call: Any) -> None:
        check_scale_update(call.amax_reduction_buffer, call.amax_histories, call.scales, call.amax_compute_algo)
        largest = torch.tensor(FP8_MAX[fp8_format(call.fp8_dtype)] * 2.0**-call.margin, dtype=torch.float32)
        reduced = call.amax_reduction_buffer.split([scale.numel() for scale in call.scales])
        for buffer, history, scale in zip(reduced, call.amax_histories, call.scales, strict=True):
            _update(buffer, history, scale, largest, call.amax_compute_algo == "max")


def _update(buffer: Tensor, history: Tensor, scale: Tensor, largest: Tensor, of_window: bool) -> None:
    last = torch.where(buffer != 0, buffer, history[0])
    seen = last != 0
    amax = torch.where(seen, torch.cat((history[1:], last[None])).amax(0), 0.0) if of_window else last
    moved = torch.cat((torch.zeros_like(history[:1]), history[2:], last[None]))[: history.shape[0]]
    new = torch.div(largest, amax).clamp_max_(FLT_MAX)
    usable = (amax > 0).logical_and_(amax <= FLT_MAX)
    with writing(history, scale):
        history.copy_(torch.where(seen, moved, history))
        scale.copy_(torch.where(usable.view(scale.shape), new.view(scale.shape), scale))
