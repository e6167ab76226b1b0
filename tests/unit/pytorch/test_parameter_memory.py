"""What a module no longer has as its parameter is freed: ops know its shape and type alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fusible
from fusible.pytorch import ops

WIDTH = 64


MODULES: dict[str, Callable[[], nn.Module]] = {
    "products": lambda: fusible.Sequential(fusible.LayerNorm(WIDTH), fusible.Linear(WIDTH, WIDTH), fusible.RMSNorm(WIDTH)),
    "one product": lambda: fusible.Linear(WIDTH, WIDTH),
    "products in 8 bits": lambda: fusible.quantize_parameters(fusible.Sequential(fusible.LayerNorm(WIDTH), fusible.Linear(WIDTH, WIDTH))),
    "attention": lambda: fusible.Sequential(fusible.Linear(WIDTH, 3 * WIDTH), fusible.MultiHeadedSelfAttention(WIDTH, 2)),
    "experts": lambda: fusible.MixtureOfExperts(WIDTH, WIDTH, 4, 2),
    "operations": lambda: ops.Sequential(ops.LayerNorm(WIDTH), ops.Linear(WIDTH, WIDTH), ops.GELU(), ops.BasicLinear(WIDTH, WIDTH), ops.Bias(WIDTH)),
    "a group of products": lambda: ops.GroupedLinear(2, WIDTH, WIDTH),
}
WAYS: dict[str, Callable[[Any], Any]] = {
    "loaded in its place": lambda model: model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True),
    "assigned": lambda model: [
        setattr(module, name, nn.Parameter(p.detach().clone()))
        for module in model.modules()
        for name, p in list(module._parameters.items())
        if p is not None
    ],
}


@pytest.mark.parametrize("recipe", [None, fusible.MXFP8BlockScaling()], ids=["bf16", "mxfp8"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODULES)
def test_a_parameter_that_was_replaced_is_freed(name: str, way: str, recipe: fusible.Recipe | None) -> None:
    model = MODULES[name]()

    def call() -> None:
        x = torch.ones(64, WIDTH, requires_grad=True)
        extra = (torch.tensor([32, 32]),) if name == "a group of products" else ()
        with fusible.autocast(enabled=recipe is not None, recipe=recipe):
            model(x, *extra).sum().backward()

    call()
    model.zero_grad()
    former = [weakref.ref(p) for p in model.parameters()]
    WAYS[way](model)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.01)
    call()
    gc.collect()
    assert [ref() is None for ref in former] == [True] * len(former)
