"""``frozen_weights``: weights are read at the first call and at the end of a block, and a change is never missed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fusible
from fusible.errors import ValuesError
from fusible.pytorch.engine import frozen, weights
from fusible.tex.backends.cpu import fingerprints

RECIPES = [fusible.DelayedScaling(), fusible.Float8CurrentScaling(), fusible.MXFP8BlockScaling()]
MESSAGE = r"^frozen_weights: expected weights that stay as they are, got 1 that changed, of shape \[32, 32\] the first; compute anew"


def made() -> Any:
    torch.manual_seed(0)
    return fusible.Sequential(fusible.Linear(32, 64), fusible.GELU(), fusible.Linear(64, 32), fusible.Linear(32, 32))


def call(model: Any, recipe: fusible.Recipe = RECIPES[1]) -> torch.Tensor:
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), fusible.autocast(recipe=recipe):
        return model(x)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of how many weights fingerprints are taken, each time."""
    found: list[int] = []

    def counted(tensors: Any) -> Any:
        found.append(len(tensors))
        return fingerprints(tensors)

    for module in (frozen, weights):
        monkeypatch.setattr(module, "fingerprints", counted)
    return found


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_weights_are_read_at_the_first_call_and_at_the_end(recipe: fusible.Recipe, taken: list[int]) -> None:
    model = made()
    wanted = call(model, recipe)
    taken.clear()
    with fusible.frozen_weights():
        assert all(torch.equal(call(model, recipe), wanted) for _ in range(4))
    assert taken == [3, 3]
    taken.clear()
    call(model, recipe)
    assert taken == [3]


def test_a_new_model_is_vouched_for_from_its_first_call_on(taken: list[int]) -> None:
    model = made()
    with fusible.frozen_weights():
        for _ in range(3):
            call(model)
    assert taken == [3, 3]


def test_a_block_without_calls_reads_nothing(taken: list[int]) -> None:
    with fusible.frozen_weights():
        pass
    assert taken == []


UNSEEN: dict[str, Callable[[nn.Parameter], Any]] = {
    "data": lambda p: p.data.mul_(2),
    "numpy": lambda p: p.detach().numpy().__setitem__((3, 3), 9.0),
    "foreach": lambda p: torch._foreach_mul_([p.data], 2.0),  # pyright: ignore[reportPrivateImportUsage]
}


@pytest.mark.parametrize("name", UNSEEN)
def test_a_change_that_nothing_counts_is_told_at_the_end(name: str) -> None:
    model = made()
    with pytest.raises(ValuesError, match=MESSAGE), fusible.frozen_weights():
        former = call(model)
        UNSEEN[name](model[3].weight)
        assert torch.equal(call(model), former)
    assert not torch.equal(call(model), former)


def test_an_error_inside_gets_it_as_a_note() -> None:
    model = made()
    with pytest.raises(KeyError) as caught, fusible.frozen_weights():
        call(model)
        model[3].weight.data.zero_()
        raise KeyError("of theirs")
    (note,) = caught.value.__notes__
    assert note.startswith("frozen_weights: expected weights that stay as they are")


def replaced(model: Any) -> None:
    model[3].weight = nn.Parameter(torch.randn(32, 32))


def of_other_data(model: Any) -> None:
    model[3].weight.data = torch.randn(32, 32)


@pytest.mark.parametrize("change", [replaced, of_other_data])
def test_another_weight_in_the_place_of_one_is_taken_at_once(change: Callable[[Any], None]) -> None:
    model = made()
    with fusible.frozen_weights():
        former = call(model)
        for _ in range(3):  # memory that is let go is given to the next one, but not that of a weight that a copy is of
            change(model)
        found = call(model)
    assert not torch.equal(found, former) and torch.equal(found, call(model))


def test_a_change_that_torch_counts_is_taken_at_once_and_told_at_the_end() -> None:
    model = made()
    with pytest.raises(ValuesError, match=MESSAGE), fusible.frozen_weights():
        former = call(model)
        with torch.no_grad():
            model[3].weight.mul_(2)
        found = call(model)
    assert not torch.equal(found, former) and torch.equal(found, call(model))


def test_what_changed_before_the_block_is_seen() -> None:
    model = made()
    for _ in range(3):
        call(model)
    model[3].weight.data.mul_(2)
    wanted = call(made_alike(model))
    with fusible.frozen_weights():
        assert torch.equal(call(model), wanted)


def made_alike(model: Any) -> Any:
    other = made()
    other.load_state_dict(model.state_dict())
    return other


def test_blocks_may_lie_in_one_another(taken: list[int]) -> None:
    model = made()
    with fusible.frozen_weights():
        call(model)
        with fusible.frozen_weights():
            call(model)
        call(model)
    assert taken == [3, 3, 3, 3]


def test_another_thread_goes_its_usual_way(taken: list[int]) -> None:
    model = made()
    for _ in range(2):
        call(model)
    with fusible.frozen_weights():
        call(model)
        taken.clear()
        threads = [threading.Thread(target=call, args=(model,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert taken == [3, 3]


def test_training_of_what_is_around_frozen_weights_keeps_no_former_copies() -> None:
    model, recipe = made(), fusible.DelayedScaling()
    with fusible.frozen_weights():
        for _ in range(5):
            x = torch.randn(4, 32, requires_grad=True)
            with fusible.autocast(recipe=recipe):
                model(x).sum().backward()
        current = frozen.current_frozen_weights()
        assert current is not None and len(current._copies) == len(current._weights) == 3


def test_a_converted_model_that_generates_reads_its_weights_twice(taken: list[int]) -> None:
    model = fusible.convert(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)), RECIPES[1], keep_high_precision=())
    x = torch.randn(1, 32)
    with torch.inference_mode(), fusible.frozen_weights():
        wanted = model(x)
        assert all(torch.equal(model(x), wanted) for _ in range(8))
    assert sum(taken) == 4
