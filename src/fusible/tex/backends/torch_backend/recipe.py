"""Amax, and the update of delayed scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusible.errors import ArgumentError, ShapeError, expected
from fusible.tex.backends.torch_backend.fp8 import tensor_amax
from fusible.tex.backends.torch_backend.operands import plain
from fusible.tex.interface.recipe import Recipe
from fusible.tex.protocol import FLT_MAX, FP8_MAX, check_amax_buffer, fp8_format

__all__ = ["RecipeKernels"]


class RecipeKernels(Recipe):
    def compute_amax(self, input: Any, amax: Any) -> None:
        check_amax_buffer(amax, "amax of compute_amax")
        amax.copy_(tensor_amax(plain(input)).view(amax.shape))

    def fused_amax_and_scale_update_after_reduction(
        self,
        amax_reduction_buffer: Any,
        amax_histories: Sequence[Any],
        scales: Sequence[Any],
        amax_compute_algo: str,
        fp8_dtype: Any,
        margin: float,
    ) -> None:
        _check(amax_reduction_buffer, amax_histories, scales, amax_compute_algo)
        largest = torch.tensor(FP8_MAX[fp8_format(fp8_dtype)] * 2.0**-margin, dtype=torch.float32)
        reduced = amax_reduction_buffer.split([scale.numel() for scale in scales])
        for buffer, history, scale in zip(reduced, amax_histories, scales, strict=True):
            _update(buffer, history, scale, largest, amax_compute_algo == "max")


def _check(buffer: Tensor, histories: Sequence[Tensor], scales: Sequence[Tensor], algorithm: str) -> None:
    if algorithm not in ("max", "most_recent"):
        raise ArgumentError(expected("'max' or 'most_recent'", of="amax_compute_algo", got=repr(algorithm), do="pass one of the two"))
    if len(histories) != len(scales):
        counts = f"{len(histories)} and {len(scales)}"
        raise ShapeError(expected("as many amax histories as scales", of="a scale update", got=counts, do="pass one history per scale tensor"))
    for history, scale in zip(histories, scales, strict=True):
        if history.dim() != 2 or history.shape[1] != scale.numel():
            shapes = f"{list(history.shape)} and {list(scale.shape)}"
            raise ShapeError(expected("[H, n] and [n]", of="an amax history and its scales", got=shapes, do="give each scale a column"))
    total = sum(scale.numel() for scale in scales)
    if buffer.numel() != total:
        raise ShapeError(expected(f"{total} amaxes", of="amax_reduction_buffer", got=buffer.numel(), do="concatenate one amax per scale"))


def _update(buffer: Tensor, history: Tensor, scale: Tensor, largest: Tensor, of_window: bool) -> None:
    last = torch.where(buffer != 0, buffer, history[0])
    seen = last != 0
    moved = torch.cat((torch.zeros_like(history[:1]), history[2:], last[None]))[: history.shape[0]]
    amax = last
    if of_window:
        window = torch.cat((history[1:], last[None]))
        amax = torch.where(seen, window.amax(0), 0.0)
    new = torch.div(largest, amax).clamp_max_(FLT_MAX)
    usable = (amax > 0).logical_and_(amax <= FLT_MAX)
    history.copy_(torch.where(seen, moved, history))
    scale.copy_(torch.where(usable.view(scale.shape), new.view(scale.shape), scale))
