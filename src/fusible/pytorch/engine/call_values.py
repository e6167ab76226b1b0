"""What a call of a pipeline has beside ``x`` and parameters, as its passes take it."""

from __future__ import annotations

from typing import Any

import torch

from fusible.compute_pipeline import Plan
from fusible.nvte import DType, Tensor
from fusible.pytorch.engine.batch import Batch, read_batch

__all__ = ["draw_seed", "given_values", "of_mask", "of_tokens"]


def draw_seed(device: torch.device) -> torch.Tensor:
    """int64 ``[1]``, drawn from torch's default generator."""
    return torch.randint(2**62, (1,)).to(device)


def given_values(plan: Plan, x: torch.Tensor, batch: Batch | None, seed: torch.Tensor | None) -> dict[str, Any]:
    """The values of the whole call that the plan's ops take. ``seed``: None where it is yet to be drawn."""
    given: dict[str, Any] = {}
    if "sequences" in plan.given:
        given["sequences"] = (batch or read_batch(x.reshape(-1, x.shape[-1]), None)).sequences()
    if "seed" in plan.given:
        given["seed"] = Tensor(draw_seed(x.device) if seed is None else seed, DType.Int64)
    return given


def of_tokens(value: torch.Tensor, apart: bool, batch: Batch, shape: torch.Size) -> torch.Tensor:
    """A side value of a batch that came in ``shape``: where it has a row for each row of it, those of the tokens. One that stands ``apart`` is as it
    came."""
    return value if apart or value.shape[:-1] != shape[:-1] else batch.tokens(value)


def of_mask(mask: torch.Tensor) -> torch.Tensor:
    """What a mask adds to scores: of bools, True for what is seen, 0 and -inf in fp32."""
    return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, -torch.inf) if mask.dtype is torch.bool else mask
