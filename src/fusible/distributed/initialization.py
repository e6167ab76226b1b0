"""Giving a model that was made on the meta device its first values, of which each process holds its share alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fusible.distributed.whole import shard_tensors, whole_shapes
from fusible.errors import NotServedError, expected

__all__ = ["materialize"]


@torch.no_grad()
def materialize(model: nn.Module, device: torch.device | str = "cpu") -> None:
    """Give the parameters of a model that was made on the meta device, and laid out, memory on ``device`` and their first values.

    They are what ``reset_parameters`` of each of ``model.modules()`` draws in one process, in turn. Every process draws the same from torch's
    generator, which is in the same state in all, and keeps what it holds of it: beside its own share none has more at a time than the whole
    parameters of one module. One that several modules hold stays one. Raises ``NotServedError``, before anything is changed, where a module has
    parameters and no ``reset_parameters``, or where buffers are on the meta device, of which nothing says what they begin with.
    """
    holders = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]
    for module in holders:
        if not hasattr(module, "reset_parameters"):
            got, do = f"a {type(module).__name__} without", "load its parameters after model.to_empty(device=...) instead"
            raise NotServedError(expected("modules with reset_parameters", of="a model to materialize", got=got, do=do))
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            do = "make it on a device that has memory"
            raise NotServedError(expected("buffers with values", of="a model to materialize", got=f"{name} on the meta device", do=do))
    first: dict[int, tuple[nn.Module, str]] = {}
    tied = [(module, name, first.setdefault(id(p), (module, name))) for module in holders for name, p in module._parameters.items() if p is not None]
    model.to_empty(device=device)  # gives each module a parameter of its own
    for module, name, (holder, of) in tied:
        module._parameters[name] = holder._parameters[of]
    for module in holders:
        for name, value in _drawn(module, device).items():
            module._parameters[name].copy_(value)  # type: ignore[union-attr]


def _drawn(module: nn.Module, device: torch.device | str) -> dict[str, torch.Tensor]:
    """What the module's own ``reset_parameters`` gives, of what this process holds."""
    parameters: dict[str, Any] = module._parameters
    whole = {name: nn.Parameter(torch.empty(shape, dtype=dtype, device=device)) for name, (shape, dtype) in whole_shapes(module).items()}
    vars(module)["_parameters"] = whole
    try:
        module.reset_parameters()  # type: ignore[operator]
    finally:
        vars(module)["_parameters"] = parameters
    return shard_tensors(module, {name: value.detach() for name, value in whole.items()})
