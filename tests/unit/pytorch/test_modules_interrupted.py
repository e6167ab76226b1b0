"""Interrupts at any bytecode of what changes a module leave it as it was, or as it is to be."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from interrupting import check_interrupts, traced

import fusible
from fusible import autocast, nvte
from fusible.pytorch import KVCache, quantize_parameters

# An interrupt that hits a weak reference's callback is reported by the interpreter, and lost.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

RECIPE = fusible.DelayedScaling(amax_history_len=4)
Made = tuple[Callable[[], Any], Callable[[], Any]]


def _model(seed: int = 0) -> fusible.Sequential:
    torch.manual_seed(seed)
    return fusible.Sequential(
        fusible.LayerNorm(32), fusible.Linear(32, 32), torch.nn.Tanh(), fusible.Residual(fusible.Linear(32, 32)), fusible.Linear(32, 32)
    )


def _x(seed: int = 0) -> torch.Tensor:
    return torch.randn(32, 32, generator=torch.Generator().manual_seed(seed))


def _trained(steps: int = 2, seed: int = 0) -> fusible.Sequential:
    model = _model(seed)
    with autocast(recipe=RECIPE):
        for step in range(steps):
            model(_x(step)).sum().backward()
    return model


def _state(model: fusible.Sequential) -> Callable[[], Any]:
    return lambda: copy.deepcopy(dict(model.state_dict()))


def _forward() -> Made:
    """What a forward commits: the scaling state of its pipeline."""
    model = fusible.Sequential(fusible.LayerNorm(32), fusible.Linear(32, 32), fusible.GELU(), fusible.Linear(32, 32))
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)

    def call() -> None:
        with autocast(recipe=RECIPE):
            model(_x(2))

    for step in range(2):
        with autocast(recipe=RECIPE):
            model(_x(step)).sum().backward()
    return call, _state(model)


def _backward() -> Made:
    model = fusible.Sequential(fusible.LayerNorm(32), fusible.Linear(32, 32), fusible.GELU(), fusible.Linear(32, 32))
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    with autocast(recipe=RECIPE):
        y = model(_x())
    dy = _x(5)
    return lambda: y.backward(dy), _state(model)


def _load() -> Made:
    model, saved = _trained(), _trained(3, seed=1).state_dict()
    return lambda: model.load_state_dict(saved), _state(model)


def _quantize() -> Made:
    model = _trained()

    def state() -> Any:
        with torch.no_grad():
            held = [type(parameter).__name__ for parameter in model.parameters()]
            bound = [type(arg.data).__name__ for module in model.modules() if isinstance(module, fusible.pytorch.BaseModule)
                     for b in module.local_ops() for arg in b.op.args]  # fmt: skip
            return [held, bound, model(_x())]

    return lambda: quantize_parameters(model), state


def _cache() -> Made:
    torch.manual_seed(0)
    model = fusible.Sequential(fusible.Linear(32, 96), fusible.MultiHeadedSelfAttention(32, heads=2), fusible.Linear(32, 32)).eval()
    cache = KVCache(2, 16, page_size=4, dtype=torch.float32)
    with torch.no_grad():
        model(_x()[:6], torch.tensor([4, 2], dtype=torch.int32), cache=cache)
    cache.advance([4, 2])

    def call() -> None:
        with torch.no_grad():
            model(_x(1)[:6], torch.tensor([1, 5], dtype=torch.int32), cache=cache)

    def state() -> Any:
        return [cache.lengths, sorted(cache._free), [list(pages) for pages in cache._pages_of]]

    return call, state


def _truncate() -> Made:
    call, state = _cache()
    call()
    cache: Any = state.__closure__[0].cell_contents  # type: ignore[index]
    cache.advance([1, 5])
    return lambda: cache.truncate(1, 1), state


CASES: dict[str, tuple[Callable[[], Made], int]] = {
    "forward": (_forward, 12),
    "backward": (_backward, 6),
    "load": (_load, 16),
    "quantize": (_quantize, 8),
    "cache": (_cache, 8),
    "truncate": (_truncate, 8),
}


@pytest.fixture(autouse=True)
def _no_pass_is_left_running() -> Iterator[None]:
    """What an interrupted pass would leave is what the next one finds, and every one after it."""
    outside = nvte.current_pass()
    yield
    assert nvte.current_pass() is outside


@pytest.mark.parametrize("name", CASES)
def test_an_interrupted_change_has_happened_or_not(name: str) -> None:
    make, count = CASES[name]
    check_interrupts(make, count)


def test_a_pass_is_over_wherever_it_is_interrupted() -> None:
    outside, state = nvte.current_pass(), nvte.Pass("forward", {"0.x": torch.ones(1)})
    length, _ = traced(lambda: state.run(nvte.pass_))
    for at in range(1, length + 1):
        _, interrupted = traced(lambda: state.run(nvte.pass_), at)
        assert interrupted and nvte.current_pass() is outside


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_many_interrupted_changes_have_happened_or_not(name: str) -> None:
    make, _ = CASES[name]
    check_interrupts(make, 60, phase=3)


def test_an_interrupt_leaves_no_error_behind() -> None:
    """Else a later test's would show it as what was being handled when it was raised."""

    def handles() -> None:
        try:
            next(iter(()))
        except StopIteration:
            pass

    count, _ = traced(handles)
    for at in range(1, count + 1):
        traced(handles, at)
        with pytest.raises(KeyError) as raised:
            raise KeyError
        assert raised.value.__context__ is None
