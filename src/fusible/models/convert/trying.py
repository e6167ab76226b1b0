"""A layer of a class that nobody knows is recognised by what it computes: a copy of it is tried on a few numbers, and compared with formulas.

So no table of class names grows old, and a layer whose formula is another one (``1 + weight``, another place of the epsilon) is never taken for one
of ours. The copy has the attributes of the layer and parameters of its own, on the CPU in fp32; the layer itself and its hooks are not touched.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["Stub", "computes", "draw", "takes_one_tensor", "tried"]


def tried(
    module: nn.Module,
    x: torch.Tensor,
    parameters: Mapping[str, torch.Tensor | None] = {},
    modules: Mapping[str, nn.Module] | None = None,
    more: Sequence[torch.Tensor] = (),
    *,
    training: bool = False,
) -> torch.Tensor | None:
    """What the module's class computes for ``x``, and the arguments ``more``, with its attributes, and these parameters and ``modules`` inside; None
    where it raises, or gives no tensor. ``training``: in training mode, for the module itself."""
    copy = object.__new__(type(module))
    inside = module._modules if modules is None else {**module._modules, **modules}
    vars(copy).update({**vars(module), "_parameters": dict(parameters), "_modules": dict(inside), "training": training})
    try:
        with torch.no_grad(), torch.device("cpu"), torch.random.fork_rng(devices=()):
            y = type(module).forward(copy, x, *more)
    except Exception:
        return None
    return y if isinstance(y, torch.Tensor) else None


def computes(y: torch.Tensor | None, formula: torch.Tensor) -> bool:
    """Whether ``y`` is what a formula gives in fp32, but for rounding: that of sums goes with their terms, and so with the largest result, and is
    another on each machine."""
    if y is None or y.dtype is not formula.dtype or y.shape != formula.shape:
        return False
    largest = formula.abs().max().item() if formula.numel() else 0.0
    if not math.isfinite(largest):
        return False
    with torch.device("cpu"):  # in the place of another one that the caller may have set: what is compared is made on the way
        return torch.allclose(y, formula, rtol=1e-5, atol=1e-6 * max(1.0, largest))


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers, the same at each call."""
    return torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float32, device="cpu")


def takes_one_tensor(module: nn.Module) -> bool:
    """Whether ``forward`` takes one argument."""
    try:
        parameters = inspect.signature(type(module).forward).parameters.values()
    except (TypeError, ValueError):
        return False
    return len(parameters) == 2 and all(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


class Stub(nn.Module):
    """In the place of what does not matter: hands on its first tensor, as the first of so many results."""

    def __init__(self, results: int = 1) -> None:
        super().__init__()
        self.results = results

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        return x if self.results == 1 else (x, *[None] * (self.results - 1))
