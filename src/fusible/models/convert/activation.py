"""Activations: modules that compute one of ``tex.activations`` on each number by itself."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fusible import ops, tex
from fusible.models.convert.as_found import Options, has_options, options_of
from fusible.models.convert.pipelines import ConvertedModule
from fusible.models.convert.swapping import Swap
from fusible.models.convert.trying import computes, takes_one_tensor, tried
from fusible.pytorch.engine.torch_autocast import is_in_force_on, without_torch_autocast
from fusible.quantized import Recipe
from fusible.tex.activations import ACTIVATIONS, ELEMENTWISE, GATES

__all__ = ["FORMULAS", "GATED", "TITLES", "activation_swap", "find_activation", "is_like_activation", "is_one_kernel"]

_NAMES = re.compile(r"gelu|silu|swish|relu|activation|^act", re.IGNORECASE)


def _formula(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    function = getattr(tex, name)
    return lambda x: function(x, None)


FORMULAS = {row.name: _formula(row.name) for row in ELEMENTWISE}
"""The activations as functions of a tensor, by name."""
TITLES = {row.name: row.title for row in ACTIVATIONS if not row.options}
GATED = {row.of: row.name for row in GATES if row.of}
"""By the name of an activation, that of the gate which multiplies by it."""


class ConvertedActivation(ConvertedModule):
    """An activation as one kernel, whose result is rounded once. Where an option has been set since, its former class computes it."""

    _found: Options
    """Its options when it was converted."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.ndim or x.dtype not in _DTYPES or not has_options(self, self._found):
            return self.original.forward(self, x)
        if is_in_force_on(x):  # by which torch's activations stay in the precision of their input, too
            with without_torch_autocast(x.device.type):
                return self._run(x)
        return self._run(x)


_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})


def is_like_activation(module: nn.Module) -> bool:
    """Whether a module looks like an activation: one without parameters, by its class's name."""
    inside = [child for child in module.modules() if child._parameters or child._buffers]
    return not inside and _NAMES.search(type(module).__name__) is not None and takes_one_tensor(module)


def find_activation(module: nn.Module) -> str:
    """The name of the activation that a module computes; empty where it is none of ours."""
    x = torch.linspace(-7.0, 7.0, 113, dtype=torch.float32, device="cpu").view(1, 113)
    y, in_training = tried(module, x), tried(module, x, training=True)
    return next((name for name, formula in FORMULAS.items() if computes(y, formula(x)) and computes(in_training, formula(x))), "")


class _Counting(TorchDispatchMode):
    """While open, counts the kernels that are called."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def is_one_kernel(module: nn.Module) -> bool:
    """Whether torch computes an activation in one pass over memory, which another would not make faster."""
    x = torch.ones(1, 8, dtype=torch.float32, device="cpu")
    with _Counting() as counting:
        tried(module, x)
    return counting.count == 1


def activation_swap(module: nn.Module, name: str, recipe: Recipe | None) -> Swap:
    """The swap of a module that computes the activation of this name."""
    op = getattr(ops, TITLES[name])()
    attributes = ConvertedActivation.attributes(module, [(op, module, ())], recipe)
    return Swap(module, ConvertedActivation, {**attributes, "_found": options_of(module)})
