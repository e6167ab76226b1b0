"""From the shares of all processes to whole tensors, by the names that the model has in one process; and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import distribute_tensor

from fusible.pytorch.engine.scaling import with_largest_amaxes
from fusible.pytorch.modules.base import BaseModule
from fusible.pytorch.modules.stateful import SCALING_STATES

__all__ = ["gather_tensors", "shard_tensors"]


def gather_tensors(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole tensors by the names of the model in one process, of ``tensors`` by the names of its parameters as it is laid out: the parameters
    themselves, gradients, moments of an optimizer, or a state dict. What is no ``DTensor`` is taken as it is; of numbers, the first part's; of
    scaling states the amaxes that have not entered a scale yet are the largest of all processes'. Every process of the model calls it, for they
    exchange what they have; each gets all."""
    left = {name: _whole(tensor) for name, tensor in with_states_of_all(model, tensors).items()}
    for whole, parts in divisions(model).items():
        if parts[0] in left:
            values = [left.pop(part) for part in parts]
            left[whole] = torch.cat(values) if values[0].ndim else values[0]
    return left


def shard_tensors(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of ``gather_tensors``, for a model that may be laid out otherwise: by the names of its parameters what this process has of
    ``tensors``, laid out as they are. Tensors of no parameter, and numbers of one, are taken as they are. Nothing is sent."""
    own, left = dict(model.named_parameters(remove_duplicate=False)), dict(tensors)
    for whole, parts in divisions(model).items():
        if whole in left:
            value, sizes = left.pop(whole), [own[part].shape[0] for part in parts]
            left.update(zip(parts, value.split(sizes) if value.ndim else [value.clone() for _ in parts], strict=True))
    return {name: _like(own.get(name), tensor) for name, tensor in left.items()}


def with_states_of_all(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``tensors``, with the scaling states among them as of all processes: of the amaxes that have not entered a scale yet, the largest."""
    found = dict(tensors)
    for prefix, module in model.named_modules():
        if isinstance(module, BaseModule) and module.amax_group is not None:
            begin = f"{prefix}.{SCALING_STATES}." if prefix else f"{SCALING_STATES}."
            found.update({name: with_largest_amaxes(found[name], module.amax_group) for name in found if name.startswith(begin)})
    return found


def whole_shapes(module: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """The shapes and dtypes of a module's own parameters, by the names that they have in one process."""
    shares = module.shares if isinstance(module, BaseModule) else {}
    whole_of = {part: whole for whole, share in shares.items() for part in share.names}
    found: dict[str, tuple[torch.Size, torch.dtype]] = {}
    for name, parameter in module._parameters.items():
        if parameter is not None:
            whole, shape = whole_of.get(name, name), parameter.shape
            if whole in found:  # parts lie one after another
                shape = torch.Size((found[whole][0][0] + shape[0], *shape[1:]))
            found[whole] = shape, parameter.dtype
    return found


def divisions(model: nn.Module) -> dict[str, list[str]]:
    """By the name of a parameter that is held in parts, the names of these, in order."""
    found: dict[str, list[str]] = {}
    for prefix, module in model.named_modules():
        for name, share in module.shares.items() if isinstance(module, BaseModule) else ():
            if share.names != (name,):
                begin = f"{prefix}." if prefix else ""
                found[f"{begin}{name}"] = [f"{begin}{part}" for part in share.names]
    return found


def _whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[no-any-return]


def _like(parameter: Any, tensor: torch.Tensor) -> torch.Tensor:
    if not hasattr(parameter, "placements") or not tensor.ndim:
        return tensor
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
