"""Optimizer state: every way of torch's carries it to the bit, with the model that it belongs to."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from state_ways import RECIPES, ROWS, WIDTH, make
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from fusible import FusedAdam, FusedSGD, autocast
from fusible.pytorch.checkpoint import LoadPlanner

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")
Pair = tuple[nn.Module, torch.optim.Optimizer]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda parameters: FusedAdam(parameters, lr=0.01, weight_decay=0.1, adam_w_mode=False),
    "adam with master weights": lambda parameters: FusedAdam(parameters, lr=0.01, master_weights=True),
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


def _state_dict(old: Pair, new: Pair, path: Path) -> None:
    for mine, theirs in zip(old, new, strict=True):
        theirs.load_state_dict(mine.state_dict())


def _file(old: Pair, new: Pair, path: Path) -> None:
    torch.save([part.state_dict() for part in old], path / "both.pt")
    for part, state in zip(new, torch.load(path / "both.pt", weights_only=True), strict=True):
        part.load_state_dict(state)


def _by_names(**options: bool) -> Callable[[Pair, Pair, Path], None]:
    def way(old: Pair, new: Pair, path: Path) -> None:
        chosen = StateDictOptions(**options)
        model, optimizer = get_state_dict(*old, options=chosen)
        set_state_dict(*new, model_state_dict=model, optim_state_dict=optimizer, options=chosen)

    return way


def _dcp(old: Pair, new: Pair, path: Path) -> None:
    dcp.save(dict(zip("ab", get_state_dict(*old), strict=True)), checkpoint_id=path / "dcp", no_dist=True)
    state = dict(zip("ab", get_state_dict(*new), strict=True))
    dcp.load(state, checkpoint_id=path / "dcp", no_dist=True, planner=LoadPlanner())
    set_state_dict(*new, model_state_dict=state["a"], optim_state_dict=state["b"])


def _deepcopy(old: Pair, new: Pair, path: Path) -> Pair:
    return copy.deepcopy(old)


def _pickle(old: Pair, new: Pair, path: Path) -> Pair:
    file = io.BytesIO()
    torch.save(old, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


WAYS: dict[str, Callable[[Pair, Pair, Path], Any]] = {
    "state_dict": _state_dict,
    "torch.save": _file,
    "get_state_dict": _by_names(),
    "flat": _by_names(flatten_optimizer_state_dict=True),
    "full": _by_names(full_state_dict=True, cpu_offload=True),
    "dcp": _dcp,
    "deepcopy": _deepcopy,
    "pickle": _pickle,
}


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


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_copy_computes_as_it_was_compiled_to(optimizer: str) -> None:
    _, made = pair("linear", optimizer, torch.float32)
    made.compile("xla")  # type: ignore[attr-defined]
    assert copy.deepcopy(made)._executor.name == "xla"  # type: ignore[attr-defined]
