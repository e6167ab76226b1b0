"""All that a model and its optimizer consist of is the same, bit for bit, after every way and for every recipe, whatever recipe holds the weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optimizer_ways
import pytest
import torch
from state_ways import EVERY, HELD, IN_PLACE, NOT_QUANTIZED, WAYS, make, train
from torch import Tensor, nn

import fusible
from fusible.quantized import QuantizedTensor
from fusible.quantized.saving import to_plain

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")
KINDS = {name: ["linear", *([f"held-{name}"] if name in HELD else [])] for name in EVERY}


def parts(value: Any) -> Iterator[Any]:
    """What a state consists of, in the order of its names: plain tensors, and what else tells a quantized one."""
    if isinstance(value, QuantizedTensor):
        tensors, header = to_plain(value)
        yield header
        yield from tensors.values()
    elif isinstance(value, dict):
        for key in sorted(value.keys() - {"differentiable"}, key=str):  # an option that torch gives to every group that is loaded
            yield from parts(value[key])
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from parts(each)
    else:
        yield value


def consists_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[Any]:
    # By their order: a module around the model puts its own name before its parameters'.
    return [part for state in (list(model.state_dict().values()), optimizer.state_dict() if optimizer else ()) for part in parts(state)]


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) and x.dtype is y.dtype if isinstance(x, Tensor) else x == y for x, y in zip(a, b, strict=True))


def adam(model: nn.Module) -> fusible.FusedAdam:
    return fusible.FusedAdam(model.parameters(), lr=0.01, weight_decay=0.1)


@pytest.mark.parametrize("recipe", EVERY)
@pytest.mark.parametrize("way", optimizer_ways.WAYS)
def test_a_model_and_its_optimizer_are_the_same_after_every_way(way: str, recipe: str, tmp_path: Path) -> None:
    for kind in KINDS[recipe]:
        model, straight, fresh = make(kind), make(kind), make(kind, 2)
        old, new = (model, adam(model)), (fresh, adam(fresh))
        train(model, EVERY[recipe], 0, 2, old[1])
        train(straight, EVERY[recipe], 0, 3, adam(straight))
        (tmp_path / kind).mkdir()
        before = consists_of(*old)
        assert len(before) > 4 and not same(before, consists_of(*new))
        new = optimizer_ways.WAYS[way](old, new, tmp_path / kind) or new
        assert same(consists_of(*new), before), kind
        train(new[0], EVERY[recipe], 2, 3, new[1])
        assert same(consists_of(new[0]), consists_of(straight)), kind


@pytest.mark.parametrize("way", WAYS)
def test_a_model_is_the_same_after_every_way(way: str, tmp_path: Path) -> None:
    for recipe, kinds in KINDS.items():
        for kind in kinds:
            model = make(kind)
            train(model, EVERY[recipe], 0, 2)
            states = any("scaling_state" in name for name in model.state_dict())
            if (way in IN_PLACE and states) or (way in NOT_QUANTIZED and kind != "linear"):
                continue  # refused, which is tested elsewhere
            before = [part.clone() if isinstance(part, Tensor) else part for part in consists_of(model)]
            (tmp_path / kind / recipe).mkdir(parents=True)
            assert same(consists_of(WAYS[way](model, make(kind, 2), tmp_path / kind / recipe)), before), (kind, recipe)


@pytest.mark.parametrize("used", EVERY)
@pytest.mark.parametrize("held", HELD)
def test_weights_held_by_one_recipe_train_under_another(held: str, used: str) -> None:
    """Each product reads the weight's own values, or their copy in the format that it needs; what is written is quantized as the weight is held; and
    a state dict goes on as if nothing had been saved."""
    model, straight, fresh = make(f"held-{held}"), make(f"held-{held}"), make(f"held-{held}", 2)
    kinds = [type(parameter) for parameter in model.parameters()]
    optimizers = [adam(each) for each in (model, straight)]
    train(model, EVERY[used], 0, 2, optimizers[0])
    losses = train(straight, EVERY[used], 0, 3, optimizers[1])
    fresh.load_state_dict(model.state_dict())
    fresh_optimizer = adam(fresh)
    fresh_optimizer.load_state_dict(optimizers[0].state_dict())
    assert train(fresh, EVERY[used], 2, 3, fresh_optimizer) == losses[2:]
    assert same(consists_of(fresh, fresh_optimizer), consists_of(straight, optimizers[1]))
    assert [type(parameter) for parameter in fresh.parameters()] == kinds
    assert all(torch.isfinite(torch.tensor(losses)))
