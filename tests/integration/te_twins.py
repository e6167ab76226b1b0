"""NVIDIA's modules and ours of the same names, made alike: what tests of one against the other share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from te_client import EPSILON, recipe_for, relative_error

from fusible import quantized
from fusible.compat import te_modules, te_quantization

__all__ = ["OURS", "RECIPES", "Twin", "compare", "twins"]

RECIPES = ("bf16", "delayed", "current", "block", "mxfp8", "nvfp4")
OURS = {
    "delayed": quantized.DelayedScaling,
    "current": quantized.Float8CurrentScaling,
    "block": quantized.Float8BlockScaling,
    "mxfp8": quantized.MXFP8BlockScaling,
    "nvfp4": quantized.NVFP4BlockScaling,
}


@dataclass(frozen=True)
class Twin:
    """A module by its name and arguments, how it is called on ``x`` of ``shape``, and the products on the longest way through it."""

    name: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    products: int = 1
    shape: tuple[int, ...] = (2, 32, 128)
    call: Callable[..., Any] = lambda module, x: module(x)


def twins(te: Any, twin: Twin) -> tuple[torch.nn.Module, torch.nn.Module]:
    """NVIDIA's module and ours with its weights, which have gone there and back by state dicts of equal names."""
    options = {"params_dtype": torch.bfloat16, **twin.options}
    theirs, ours = (getattr(package, twin.name)(*twin.arguments, **options) for package in (te, te_modules))
    with torch.no_grad():
        for parameter in theirs.parameters():  # gammas and biases too
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    state = theirs.state_dict()
    assert list(state) == list(ours.state_dict())
    ours.load_state_dict(state)
    theirs.load_state_dict({name: torch.zeros_like(value) for name, value in ours.state_dict().items()})
    theirs.load_state_dict(ours.state_dict())
    for name, value in state.items():
        assert torch.equal(theirs.state_dict()[name], value) and torch.equal(ours.state_dict()[name], value), name
    return theirs, ours


def _results(module: torch.nn.Module, twin: Twin, x: torch.Tensor, context: Any) -> Iterator[tuple[str, torch.Tensor]]:
    module.zero_grad()
    x = x.clone().requires_grad_()
    with context:
        outputs = twin.call(module, x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    outputs = {f"output {place}": y for place, y in enumerate(outputs) if y is not None}
    generator = torch.Generator().manual_seed(3)
    sum((y.float() * torch.randn(y.shape, generator=generator)).sum() for y in outputs.values()).backward()  # type: ignore[union-attr]
    assert x.grad is not None
    yield from ((name, y.detach()) for name, y in outputs.items())
    yield "input's gradient", x.grad
    yield from ((name, parameter.grad) for name, parameter in module.named_parameters() if parameter.grad is not None)


def compare(te: Any, twin: Twin, recipe_name: str, passes: int = 2, seed: int = 0) -> None:
    """Outputs and gradients of both, of the last of some passes on rows drawn by ``seed``: delayed scaling knows the amaxes of the ones before.

    Each product has two operands, each off by at most eps of its norm, and the errors of successive products are independent; the way back takes
    what the way there gave. The same kernels round both alike, but for a tensor that one module rounds to bf16 before it is quantized.
    """
    theirs, ours = twins(te, twin)
    recipe = recipe_for(te, recipe_name)
    own = OURS[recipe_name]() if recipe is not None else None
    for step in range(passes):
        torch.manual_seed(seed + step)
        x = torch.randn(twin.shape).to(twin.options.get("params_dtype", torch.bfloat16))
        wanted = dict(_results(theirs, twin, x, te.autocast(enabled=recipe is not None, recipe=recipe)))
        found = dict(_results(ours, twin, x, te_quantization.autocast(enabled=recipe is not None, recipe=own)))
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        bound = EPSILON[recipe_name] * math.sqrt((2 if name.startswith("output") else 4) * max(twin.products, 1))
        assert found[name].dtype == value.dtype and found[name].shape == value.shape, name
        others = name.replace("key_bias", "value_bias").replace("k_norm.bias", "q_norm.bias")
        if others != name and others in wanted:
            # It adds the same to all scores of a query, unless keys are normalized or rotated after it: its gradient is 0, but for rounding.
            size = max(value.norm(), wanted[others].norm())
            assert (found[name] - value).norm() <= bound * size, name
        elif value.count_nonzero():
            assert relative_error(found[name], value) <= bound, name
        else:
            assert not found[name].count_nonzero(), name
