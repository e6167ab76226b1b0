"""Forwards that ``te.checkpoint`` makes again in backward: all is as without it, whatever is called in between."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusible
from fusible.compat import te_modules as te
from fusible.compat.te_quantization import autocast
from fusible.pytorch import ops

WIDTH = 32
DELAYED = fusible.DelayedScaling(amax_history_len=4)
Run = Callable[[nn.Module, Tensor], Tensor]


class Grouped(te.GroupedLinear):
    """With groups of its own, and so a module of one argument."""

    def forward(self, inp: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(inp.flatten(0, -2), [24, 8]).view(inp.shape)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: te.Linear(WIDTH, WIDTH),
    "LayerNormLinear": lambda: te.LayerNormLinear(WIDTH, WIDTH, parameters_split=("first", "second")),
    "LayerNormMLP": lambda: te.LayerNormMLP(WIDTH, 2 * WIDTH),
    "GroupedLinear": lambda: Grouped(2, WIDTH, WIDTH),
    "TransformerLayer": lambda: te.TransformerLayer(WIDTH, 2 * WIDTH, 4, hidden_dropout=0.25, attention_dropout=0.25),
    "operations": lambda: ops.Sequential(ops.LayerNorm(WIDTH), ops.Linear(WIDTH, WIDTH), ops.GELU(), ops.Linear(WIDTH, WIDTH)),
    "several": lambda: nn.Sequential(te.LayerNormMLP(WIDTH, WIDTH), nn.Tanh(), te.Linear(WIDTH, WIDTH)),
}
ORDERS = {
    "one after another": "f0 b0 f1 b1 f2 b2",
    "one forward, one backward": "f0 f1 b0 f2 b1 b2",
    "all forwards first": "f0 f1 f2 b0 b1 b2",
    "the last one first": "f0 f1 f2 b2 b1 b0",
    "a look in between": "f0 i f1 i b0 b1",
}


def nested(module: nn.Module, x: Tensor) -> Tensor:
    return te.checkpoint(lambda x: te.checkpoint(module, x, use_reentrant=False), x)


CHECKPOINTED: dict[str, Run] = {
    "reentrant": lambda module, x: te.checkpoint(module, x),
    "not reentrant": lambda module, x: te.checkpoint(module, x, use_reentrant=False),
    "nested": nested,
}


def results(module: nn.Module, run: Run, order: str) -> list[Tensor]:
    """All outputs, gradients and states of three steps, each with three micro-batches of growing magnitudes."""
    generator, found = torch.Generator().manual_seed(1), []
    for step in range(3):
        xs = [torch.randn(8, 4, WIDTH, generator=generator).mul_(4.0**i * (step + 1)).requires_grad_() for i in range(3)]
        ys: dict[str, Tensor] = {}
        torch.manual_seed(step)
        for what, *number in order.split():
            index = "".join(number)
            with autocast(recipe=DELAYED):
                if what == "f":
                    ys[index] = run(module, xs[int(index)])
                elif what == "i":
                    with torch.no_grad():
                        module(xs[0])
            if what == "b":
                ys[index].square().mean().backward()
        found += [*ys.values(), *(x.grad for x in xs if x.grad is not None), *(p.grad for p in module.parameters() if p.grad is not None)]
        found += [value.clone() for value in module.state_dict().values() if isinstance(value, Tensor)]
        module.zero_grad()
    return found


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("way", CHECKPOINTED)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", MODULES)
def test_what_is_repeated_takes_the_scales_of_its_first_time(name: str, order: str, way: str) -> None:
    """Later forwards close iterations of delayed scaling. Neither gradients nor what later steps are scaled by may tell that."""
    torch.manual_seed(0)
    module = MODULES[name]()
    assert same(results(copy.deepcopy(module), lambda module, x: module(x), ORDERS[order]), results(module, CHECKPOINTED[way], ORDERS[order]))


@pytest.mark.parametrize("order", ORDERS)
def test_weights_that_are_held_in_8_bits(order: str) -> None:
    torch.manual_seed(0)
    with fusible.quantized_model_init(recipe=DELAYED):
        module = te.LayerNormMLP(WIDTH, WIDTH)
    twin = copy.deepcopy(module)
    assert same(results(twin, lambda module, x: module(x), ORDERS[order]), results(module, CHECKPOINTED["reentrant"], ORDERS[order]))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("first", [None, fusible.Float8CurrentScaling(), DELAYED], ids=["outside", "current", "delayed"])
@pytest.mark.parametrize("second", [None, fusible.Float8CurrentScaling(), fusible.MXFP8BlockScaling()], ids=["outside", "current", "mxfp8"])
def test_what_is_repeated_follows_the_recipe_of_its_first_time(first: Any, second: Any, reentrant: bool) -> None:
    """The same module is called under another recipe, or under none, before the backward."""

    def called(module: nn.Module, run: Run, recipe: Any, x: Tensor) -> Tensor:
        if recipe is None:
            return run(module, x)
        with autocast(recipe=recipe):
            return run(module, x)

    torch.manual_seed(0)
    modules, x = [te.Linear(WIDTH, WIDTH)], torch.randn(32, WIDTH)
    modules.append(copy.deepcopy(modules[0]))
    gradients = []
    for module, run in zip(modules, (lambda m, x: m(x), lambda m, x: te.checkpoint(m, x, use_reentrant=reentrant)), strict=True):
        leaf = x.clone().requires_grad_()
        y = called(module, run, first, leaf)
        called(module, lambda m, x: m(x), second, x)
        y.square().sum().backward()
        gradients.append([leaf.grad, module.weight.grad])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_backward_may_come_twice() -> None:
    """Each repeats the forward from its beginning."""
    torch.manual_seed(0)
    module, x = te.LayerNormMLP(WIDTH, WIDTH), torch.randn(32, WIDTH, requires_grad=True)
    with autocast(recipe=DELAYED):
        y = te.checkpoint(module, x).square().sum()
        module(8 * x.detach())
    once, again = (torch.autograd.grad(y, [x, module.fc1_weight], retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
