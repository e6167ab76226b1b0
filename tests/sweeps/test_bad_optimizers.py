"""Optimizers refuse what they cannot step, in one sentence that names it, and leave parameters, gradients, state and groups as they were."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from scores import Scores, score
from torch import nn
from wrong_values import Strange, changed, others, state

import fusible
from fusible.errors import FusibleError

Made = Callable[[Any], torch.optim.Optimizer]
MAKERS: dict[str, Made] = {
    "FusedAdam": lambda params: fusible.FusedAdam(params, lr=0.1),
    "FusedAdam, masters": lambda params: fusible.FusedAdam(params, lr=0.1, master_weights=True),
    "FusedAdam, 8 bits": lambda params: fusible.FusedAdam(
        params, lr=0.1, master_weights=True, master_weight_dtype=torch.float16, exp_avg_dtype=torch.uint8, exp_avg_sq_dtype=torch.float16
    ),
    "FusedSGD": lambda params: fusible.FusedSGD(params, lr=0.1, momentum=0.9),
    "FusedSGD, masters": lambda params: fusible.FusedSGD(params, lr=0.1, momentum=0.9, master_weights=True),
}
every_maker = pytest.mark.parametrize("name", MAKERS)


def parameter(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    made = nn.Parameter(torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape).to(dtype))
    made.grad = torch.full(shape, 0.5, dtype=dtype)
    return made


TWICE = parameter(2)
PARAMS: dict[str, Any] = {
    "None": None, "no parameters": [], "a text": "ab", "a number": 3, "an object": Strange(), "a list with None": [None], "a list with a number": [3],
    "a list with a text": ["a"], "a tensor": torch.ones(2), "no leaf": [parameter(2) * 2], "one twice": [TWICE, TWICE],
    "one in two groups": [{"params": [TWICE]}, {"params": [TWICE]}], "a group without any": [{"lr": 1.0}], "a group of None": [{"params": None}],
    "a rate that is a text": [{"params": [parameter(2)], "lr": "x"}], "a rate of None": [{"params": [parameter(2)], "lr": None}],
    "a negative rate": [{"params": [parameter(2)], "lr": -1.0}], "a decay that is a list": [{"params": [parameter(2)], "weight_decay": [1.0]}],
    "a dictionary of parameters": {"a": parameter(2)}, "a name with a number": [("a", 3)], "a group among parameters": [parameter(2), {"params": []}],
}  # fmt: skip


@every_maker
def test_bad_parameters_are_refused_when_an_optimizer_is_made(name: str) -> None:
    scores = Scores()
    for what, params in PARAMS.items():
        try:
            MAKERS[name](params)
        except Exception as error:
            scores.add(what, score(error, {"params", name.partition(",")[0]}), error)
        else:
            scores.add(what, "accepted without a reason")
    assert not scores.unclear, "\n".join(scores.unclear)


@every_maker
def test_a_bad_group_is_refused_and_not_added(name: str) -> None:
    optimizer = MAKERS[name]([parameter(3)])
    for what, params in PARAMS.items():
        groups = params if isinstance(params, list) and params and isinstance(params[0], dict) else [{"params": params}]
        for group in groups[-1:]:
            before = len(optimizer.param_groups)
            if what in ("one in two groups", "a dictionary of parameters", "no parameters", "a tensor"):
                continue  # alone it is none, or it is one as torch reads it
            with pytest.raises(FusibleError, match="Fused"):
                optimizer.add_param_group(group)
            assert len(optimizer.param_groups) == before, what


def _stepped(name: str) -> torch.optim.Optimizer:
    optimizer = MAKERS[name]([parameter(4, 3), parameter(5)])
    optimizer.step()
    return optimizer


def _spoilt(name: str) -> Iterator[tuple[str, str, Callable[[torch.optim.Optimizer], Any]]]:
    """Where a wrong value is put into an optimizer that has stepped, what it is, and what puts it there."""
    whole = _stepped(name)
    group, (first, _) = whole.param_groups[0], whole.param_groups[0]["params"]
    for option, good in group.items():
        if option != "params":
            for what, bad in others(good):
                yield option, what, lambda o, option=option, bad=bad: o.param_groups[0].__setitem__(option, bad)
    for slot, good in whole.state[first].items():
        for what, bad in others(good):
            yield slot, what, lambda o, slot=slot, bad=bad: o.state[o.param_groups[0]["params"][0]].__setitem__(slot, bad)
        yield slot, "missing", lambda o, slot=slot: o.state[o.param_groups[0]["params"][0]].__delitem__(slot)
    for what, bad in others(first.detach()):
        if isinstance(bad, torch.Tensor):
            yield "parameter", what, lambda o, bad=bad: setattr(o.param_groups[0]["params"][0], "data", bad)
    for what, bad in others([first]):
        yield "params", what, lambda o, bad=bad: o.param_groups[0].__setitem__("params", bad)
    for what, bad in others({}):
        yield "state", what, lambda o, bad=bad: o.state.__setitem__(o.param_groups[0]["params"][0], bad)


SAME_NUMBERS = {"strided", "one rank more", "flat"}
"""As many in the same order."""
ACCEPTED = {
    "lr": {"99", "a tensor [1]"}, "weight_decay": {"99"}, "eps": {"99"}, "momentum": {"99"}, "dampening": {"99", "-1"},
    "bias_correction": {"3"}, "nesterov": {"3"}, "step": {"99"},
    "params": {"empty list", *(f"first {what}" for what, _ in others(torch.ones(4, 3, dtype=torch.bfloat16)))},
    "parameter": {*SAME_NUMBERS, "of float32", "of float64"}, "exp_avg": SAME_NUMBERS, "exp_avg_sq": SAME_NUMBERS,
    "momentum_buffer": {*SAME_NUMBERS, "missing"}, "master_param": {"strided", "missing"}, "state": {"None"},
}  # fmt: skip
"""Wrong values that are none: a parameter without a gradient is left alone, no state is a new one, and a master is of a parameter of any floats."""
TORCHS = {"maximize", "foreach", "differentiable", "capturable", "fused", "param_names", "decoupled_weight_decay"}
"""Options that only torch reads."""


@every_maker
def test_a_spoilt_optimizer_refuses_to_step(name: str) -> None:
    scores = Scores()
    for place, what, spoil in _spoilt(name):
        optimizer = _stepped(name)
        label = f"{name}: {place} {what}"
        try:
            spoil(optimizer)
        except Exception:
            continue  # torch refuses it
        everything = [optimizer.param_groups, *optimizer.state.values(), [p.grad for g in optimizer.param_groups for p in _listed(g)]]
        before = list(state(everything))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer.step()
        except Exception as error:
            scores.add(label, score(error, {place, name.partition(",")[0]}, changed=changed(before, list(state(everything)))), error)
        else:
            scores.add(label, "accepted" if what in ACCEPTED.get(place, ()) or place in TORCHS else "accepted without a reason")
    print(name, dict(scores.counts))
    assert not scores.unclear, "\n".join(scores.unclear)
    assert scores.counts["clear"] > 60


def _listed(group: dict[str, Any]) -> list[Any]:
    params = group["params"]
    return [p for p in params if isinstance(p, torch.Tensor)] if isinstance(params, list) else []
