"""Finds ``down(act(up(x)))`` among the layers of a block that calls them one by one, by trying the block's forward on small layers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fusible import ops
from fusible.models.convert.activation import FORMULAS, TITLES
from fusible.models.convert.linear import BoundParts, linear_ops
from fusible.models.convert.relay import Relay, RelayedActivation, RelayingBlock
from fusible.models.convert.swapping import Swap
from fusible.models.convert.trying import Stub, computes, draw
from fusible.quantized import Recipe

__all__ = ["Chain", "find_chain", "relay_swaps"]

_WIDTH, _INNER = 5, 7
_RESULTS = (2, 1, 3)
"""How many values attention may give beside the MLP: the first one is its output."""


@dataclass(frozen=True)
class Chain:
    """The names within a block of the first layer, of the activation and of the last layer. ``in_training``: whether nothing is between them in
    training, either. ``bare``: whether no function is, not even a dropout that drops nothing."""

    up: str
    activation: str
    down: str
    in_training: bool = False
    bare: bool = False

    def relay(self, block: nn.Module) -> Relay:
        return Relay(block, (self.up, self.activation, self.down), self.in_training, self.bare)


def find_chain(block: nn.Module, linears: Mapping[str, nn.Linear], activation: str, formula: str) -> Chain | None:
    """The chain of a block: of the ``linears`` and the ``activation`` inside it, by their names, of which the latter computes ``formula``. None where
    there is none, or where it cannot be told."""
    for up, down in permutations(linears, 2):
        chain = Chain(up, activation, down)
        if _fit(linears[up], linears[down]) and _hands_on(block, chain, formula, training=False):
            in_training = _hands_on(block, chain, formula, training=True)
            with _Traced():
                return replace(chain, in_training=in_training, bare=_hands_on(block, chain, formula, training=False))
    return None


class _Traced(TorchFunctionMode):
    """Has a dropout give a tensor of its own, as in a graph, also where it drops nothing and would give the very tensor that it was called on."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        return y.clone() if func is nn.functional.dropout else y


def _fit(up: nn.Linear, down: nn.Linear) -> bool:
    """Of two widths that differ, so that the output of the one is never taken for that of the other."""
    return up.out_features == down.in_features and up.in_features == down.out_features and up.in_features != up.out_features


def _hands_on(block: nn.Module, chain: Chain, formula: str, training: bool) -> bool:
    """Whether the block gives the same where its first layer computes the whole chain, and the others hand on what it gave."""
    return any(_gives_the_same(block, chain, formula, results, training) for results in _RESULTS)


def _gives_the_same(block: nn.Module, chain: Chain, formula: str, results: int, training: bool) -> bool:
    first, second = draw(_INNER, _WIDTH, seed=1), draw(_WIDTH, _INNER, seed=2)
    steps = {chain.up: _Step(lambda x: x @ first.T), chain.activation: _Step(FORMULAS[formula]), chain.down: _Step(lambda x: x @ second.T)}
    wanted = _tried(block, steps, results, training)
    if wanted is None or any(len(step.seen) != 1 for step in steps.values()):
        return False
    whole = _Step(lambda x: FORMULAS[formula](x @ first.T) @ second.T)
    relayed = {chain.up: whole, chain.activation: _Step(lambda x: x), chain.down: _Step(lambda x: x)}
    found = _tried(block, relayed, results, training)
    return computes(found, wanted) and all(relayed[name].seen == [id(whole.result)] for name in (chain.activation, chain.down))


class _Step(nn.Module):
    """A layer of the trial. ``seen``: the identities of what it was called on; ``result``: what it gave."""

    def __init__(self, formula: Any) -> None:
        super().__init__()
        self.formula, self.seen, self.result = formula, list[int](), torch.empty(0, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(id(x))
        self.result = self.formula(x)
        return self.result


def _tried(block: nn.Module, steps: Mapping[str, nn.Module], results: int, training: bool) -> torch.Tensor | None:
    """What the block's class gives with the ``steps`` inside, and stubs beside them; None where it raises."""
    copy = _copied(block, "", steps, results, training)
    x, (_, *others) = draw(1, 4, _WIDTH), inspect.signature(type(block).forward).parameters.values()
    required = [None for one in others[1:] if one.kind is one.POSITIONAL_OR_KEYWORD and one.default is one.empty]
    try:
        with torch.no_grad(), torch.device("cpu"), torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            y = type(block).forward(copy, x, *required)
    except Exception:
        return None
    return next((value for value in (y if isinstance(y, tuple | list) else (y,)) if isinstance(value, torch.Tensor)), None)


def _copied(module: nn.Module, prefix: str, steps: Mapping[str, nn.Module], results: int, training: bool) -> nn.Module:
    """A copy without parameters and hooks."""
    copy = object.__new__(type(module))
    nn.Module.__init__(copy)
    vars(copy).update({name: value for name, value in vars(module).items() if name not in vars(copy)})
    vars(copy)["training"] = training
    vars(copy)["_modules"] = dict(_inside(module, prefix, steps, results, training))
    return copy


def _inside(module: nn.Module, prefix: str, steps: Mapping[str, nn.Module], results: int, training: bool) -> Iterator[tuple[str, nn.Module]]:
    for own, child in module._modules.items():
        name = f"{prefix}{own}"
        if name in steps:
            yield own, steps[name]
        elif child is not None and any(step.startswith(f"{name}.") for step in steps):
            yield own, _copied(child, f"{name}.", steps, results, training)
        elif isinstance(child, nn.Dropout):
            yield own, nn.Dropout(child.p).train(training)
        elif child is not None:
            yield own, Stub(results if any(isinstance(inner, nn.Linear) for inner in child.modules()) else 1)


def relay_swaps(relay: Relay, activation: str, recipe: Recipe | None) -> tuple[Swap, Swap]:
    """The swaps of the activation between two layers, which computes the one of this name, and of the block around them."""
    up, act, down = relay.members
    parts: list[BoundParts] = [*linear_ops(up), (getattr(ops, TITLES[activation])(), act, ()), *linear_ops(down)]
    attributes = {**RelayedActivation.attributes(act, parts, recipe), "_relay": relay}
    return Swap(act, RelayedActivation, attributes), Swap(relay.block, RelayingBlock, {"_relay": relay})
