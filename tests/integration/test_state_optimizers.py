"""Optimizer state: every way of torch's carries it to the bit, with the model that it belongs to."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizer_ways import WAYS, Pair
from state_ways import RECIPES, ROWS, WIDTH, make

from fusible import FusedAdam, FusedSGD, autocast

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda parameters: FusedAdam(parameters, lr=0.01, weight_decay=0.1, adam_w_mode=False),
    "adam with master weights": lambda parameters: FusedAdam(parameters, lr=0.01, master_weights=True),
    "adam in bf16": lambda parameters: FusedAdam(parameters, lr=0.01, exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.bfloat16),
    "adam in 8 and 16 bits": lambda parameters: FusedAdam(
        parameters, lr=0.01, exp_avg_dtype=torch.uint8, exp_avg_sq_dtype=torch.float16, master_weights=True, master_weight_dtype=torch.float16
    ),
    "adam with remainders": lambda parameters: FusedAdam(
        parameters, lr=0.01, exp_avg_dtype=torch.uint8, exp_avg_sq_dtype=torch.uint8, master_weights=True, store_param_remainders=True
    ),
    "momentum": lambda parameters: FusedSGD(parameters, lr=0.05, momentum=0.9, dampening=0.3),
}


def pair(kind: str, optimizer: str, dtype: torch.dtype, seed: int = 1) -> Pair:
    model = make(kind, seed).to(dtype)
    return model, OPTIMIZERS[optimizer](model.parameters())


def train(of: Pair, first: int, last: int) -> list[float]:
    model, optimizer = of
    losses = []
    for step in range(first, last):
        torch.manual_seed(100 + step)
        x = torch.randn(ROWS, WIDTH, dtype=next(model.parameters()).dtype, requires_grad=True)
        with autocast(recipe=RECIPES["delayed"]):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["nested", "held-mxfp8"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("way", WAYS)
def test_a_way_carries_the_optimizer(way: str, optimizer: str, kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    old, straight = pair(kind, optimizer, dtype), pair(kind, optimizer, dtype)
    train(old, 0, 3)
    train(straight, 0, 3)
    new = pair(kind, optimizer, dtype, seed=2)
    new = WAYS[way](old, new, tmp_path) or new
    assert train(new, 3, 6) == train(straight, 3, 6)


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if not any(word in name for word in ("8 and 16 bits", "remainders"))])
def test_a_copy_computes_as_it_was_compiled_to(optimizer: str) -> None:
    _, made = pair("linear", optimizer, torch.float32)
    made.compile("xla")  # type: ignore[attr-defined]
    assert copy.deepcopy(made)._executor.name == "xla"  # type: ignore[attr-defined]
