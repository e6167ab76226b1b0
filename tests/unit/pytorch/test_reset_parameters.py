"""``reset_parameters`` draws what the constructor draws; on the meta device nothing is drawn."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fusible
from fusible.distributed import materialize
from fusible.errors import ArgumentError
from fusible.pytorch.modules.base import BaseModule


def halves(x: torch.Tensor) -> torch.Tensor:
    return nn.init.constant_(x, 0.5)


MODULES: dict[str, Callable[..., BaseModule]] = {
    "linear": lambda **o: fusible.Linear(8, 16, **o),
    "linear of its own": lambda **o: fusible.Linear(8, 16, weight_init_method=halves, bias_init_method=halves, **o),
    "linear without bias": lambda **o: fusible.Linear(8, 16, bias=False, **o),
    "layer norm": lambda **o: fusible.LayerNorm(8, **o),
    "rms norm around 0": lambda **o: fusible.RMSNorm(8, zero_centered_gamma=True, **o),
    "norm of heads": lambda **o: fusible.QKNorm(2, 8, **o),
    "experts": lambda **o: fusible.MixtureOfExperts(8, 16, 3, **o),
}


def parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name", MODULES)
def test_what_is_drawn_anew_is_what_was_drawn_first(name: str) -> None:
    torch.manual_seed(3)
    module = MODULES[name]()
    first = parameters(module)
    for drawn in (module, copy.deepcopy(module), MODULES[name](device="meta").to_empty(device="cpu")):
        with torch.no_grad():
            for p in drawn.parameters():
                p.fill_(7.0)
        torch.manual_seed(3)
        drawn.reset_parameters()
        assert same(parameters(drawn), first) and all(p.requires_grad for p in drawn.parameters())
    assert set(module.init_methods) == set(first)


def test_what_was_unpickled_begins_alike_where_its_function_can_be_pickled() -> None:
    with pytest.raises(ArgumentError, match="expected one that was made here, got one that was unpickled without its function; make the module anew"):
        pickle.loads(pickle.dumps(fusible.Linear(8, 8, weight_init_method=lambda x: x))).reset_parameters()
    for name, made in MODULES.items():
        torch.manual_seed(3)
        module = pickle.loads(pickle.dumps(made()))
        first = parameters(module)
        torch.manual_seed(3)
        module.reset_parameters()
        assert same(parameters(module), first), name


def test_a_model_of_one_process_is_materialized_too_and_tied_parameters_stay_so() -> None:
    """Though torch's ``to_empty`` gives each module a parameter of its own."""
    for tied in (False, True):
        with torch.device("meta"):
            model = nn.Sequential(nn.Embedding(16, 8), fusible.Linear(8, 16))
        if tied:
            model[1].weight = model[0].weight
        torch.manual_seed(3)
        materialize(model)
        torch.manual_seed(3)
        wanted = nn.Sequential(nn.Embedding(16, 8), fusible.Linear(8, 16))
        if tied:
            wanted[0].weight = wanted[1].weight  # which was drawn last
            assert model[1].weight is model[0].weight
        assert same(parameters(model), parameters(wanted))
