"""The update of delayed scales."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fusible.tex.backends.torch_backend.kernels import TorchKernels
from fusible.tex.calls.inference_tensors import writing
from fusible.tex.formulas.recipe import RecipeFormulas
from fusible.tex.protocol import FLT_MAX

__all__ = ["RecipeKernels"]


class RecipeKernels(TorchKernels, RecipeFormulas):
    def _update_scales(self, updates: Iterable[tuple[Tensor, Tensor, Tensor]], largest: float, of_window: bool) -> None:
        of = torch.tensor(largest, dtype=torch.float32, device="cpu")
        for buffer, history, scale in updates:
            last = torch.where(buffer != 0, buffer, history[0])
            seen = last != 0
            amax = torch.where(seen, torch.cat((history[1:], last[None])).amax(0), 0.0) if of_window else last
            moved = torch.cat((torch.zeros_like(history[:1]), history[2:], last[None]))[: history.shape[0]]
            new = torch.div(of, amax).clamp_max_(FLT_MAX)
            usable = (amax > 0).logical_and_(amax <= FLT_MAX)
            with writing(history, scale):
                history.copy_(torch.where(seen, moved, history))
                scale.copy_(torch.where(usable.view(scale.shape), new.view(scale.shape), scale))
