"""A module that was trained, or loaded, by itself keeps its scales in the container that it is put into."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

import fusible
from fusible.compat import te_modules
from fusible.pytorch import ops

RECIPE = fusible.DelayedScaling(amax_history_len=4)
WIDTH = 32

MODULES: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: fusible.Linear(WIDTH, WIDTH),
    "ops.Linear": lambda: ops.Linear(WIDTH, WIDTH),
    "te.Linear": lambda: te_modules.Linear(WIDTH, WIDTH, params_dtype=torch.float32, device="cpu"),
    "te.LayerNormLinear": lambda: te_modules.LayerNormLinear(WIDTH, WIDTH, params_dtype=torch.float32, device="cpu"),
}
CONTAINERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "Sequential": fusible.Sequential,
    "nested": lambda module: fusible.Sequential(fusible.Sequential(module)),
    "among others": lambda module: fusible.Sequential(fusible.GELU(), module),
    "ops.Sequential": ops.Sequential,
}


def _loaded(trained: nn.Module, make: Callable[[], nn.Module], contain: Callable[[nn.Module], nn.Module]) -> nn.Module:
    inside = make()
    container = contain(inside)
    prefix = next(name for name, module in container.named_modules() if module is inside)
    container.load_state_dict({f"{prefix}.{name}": value for name, value in trained.state_dict().items()})
    return container


WAYS: dict[str, Callable[..., nn.Module]] = {
    "built around": lambda trained, make, contain: contain(trained),
    "a copy": lambda trained, make, contain: contain(copy.deepcopy(trained)),
    "the container copied": lambda trained, make, contain: copy.deepcopy(contain(trained)),
    "pickled": lambda trained, make, contain: pickle.loads(pickle.dumps(contain(trained))),
    "loaded": _loaded,
}


def _small(step: int) -> torch.Tensor:
    return 0.01 * torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("module", MODULES)
def test_scales_come_along(module: str, container: str, way: str) -> None:
    """Inputs are so small that a scale that begins anew, as 1, gives other results."""
    torch.manual_seed(0)
    trained = MODULES[module]()
    for step in range(3):
        with fusible.autocast(recipe=RECIPE):
            trained(_small(step)).sum().backward()
    around = WAYS[way](trained, MODULES[module], CONTAINERS[container])
    x = _small(7)
    fresh = CONTAINERS[container](MODULES[module]())
    fresh.load_state_dict(dict(zip(dict(fresh.named_parameters()), trained.parameters(), strict=True)), strict=False)
    with torch.no_grad(), fusible.autocast(recipe=RECIPE):
        wanted = trained(fusible.GELU()(x) if container == "among others" else x)
        assert torch.equal(around(x), wanted)
        if "LayerNorm" not in module:  # whose result is of size 1, whatever came in
            assert not torch.equal(fresh(x), wanted)
