"""Weights of several layers that one product takes as one: they lie one behind another in memory, each still a parameter of its own.

So the joined weight is a look at that memory, no copy, and its 8-bit copy is kept as that of any weight. What moves parameters elsewhere (a change of
dtype or device, a copy, FSDP) tears them apart; then each layer computes by itself, until ``pack`` has put them together again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from fusible.pytorch.engine.lowered import own_parameter

__all__ = ["JoinedLinears", "Stand", "is_joined", "pack"]


def is_joined(weights: Sequence[torch.Tensor | None]) -> bool:
    """Whether parameters lie one behind another in one piece of memory. A call that ``torch.compile`` traces puts them together itself."""
    if torch.compiler.is_compiling():
        return all(type(weight) is nn.Parameter for weight in weights)
    first = weights[0]
    if type(first) is not nn.Parameter or not first.is_contiguous():
        return False
    memory, end, dtype = first.untyped_storage().data_ptr(), first.data_ptr() + first.nbytes, first.dtype
    for weight in weights[1:]:
        if type(weight) is not nn.Parameter or weight.dtype is not dtype or not weight.is_contiguous():
            return False
        if weight.data_ptr() != end or weight.untyped_storage().data_ptr() != memory:
            return False
        end += weight.nbytes
    return bool(memory)


def pack(weights: Sequence[torch.Tensor | None]) -> bool:
    """Move parameters ``[rows, K]`` into one piece of memory, one behind another; whether they lie so now. They stay the objects that they are, and
    who holds their memory holds a former one. Memory that processes share stays where it is."""
    if is_joined(weights):
        return True
    parameters = [weight for weight in weights if type(weight) is nn.Parameter]
    kinds = {(p.dtype, p.device, p.shape[1:], p.is_meta or p.is_shared() or p.is_inference() or p.layout is not torch.strided) for p in parameters}
    if len(parameters) != len(weights) or len(kinds) != 1 or next(iter(kinds))[3] or len({id(p) for p in parameters}) != len(parameters):
        return False
    with torch.no_grad():
        whole = torch.cat([p.detach() for p in parameters])
    for parameter, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        parameter.data = part
    return True


class _Join(torch.autograd.Function):
    """Joined parameters as one tensor; its gradient goes on to them."""

    @staticmethod
    def forward(ctx: Any, *weights: torch.Tensor) -> torch.Tensor:
        ctx.rows = [len(weight) for weight in weights]
        return _whole(weights)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return grad.split(ctx.rows)


def _whole(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    first = weights[0]
    shape = (sum(len(weight) for weight in weights), *first.shape[1:])
    return first.new_empty(0).set_(first.untyped_storage(), first.storage_offset(), shape, first.stride())  # type: ignore[call-overload]  # pyright: ignore


class Stand:
    """Stands for a module in a pipeline, where a parameter that an op takes is computed from those that the module has.

    As for a parameter that ``torch.nn.utils.parametrize`` computes, nothing is found in ``_parameters``, and the attribute of its name is asked.
    """

    remakes_op = False
    amax_group = None
    _changes = 0
    _parameters: Mapping[str, torch.Tensor] = MappingProxyType({})

    def __init__(self, *modules: Any) -> None:
        self.modules = modules

    @property
    def training(self) -> bool:
        return self.modules[0].training

    def current(self, bound: Any) -> Any:
        return bound

    def local_passes(self, position: int) -> tuple[()]:
        return ()


class JoinedLinears(Stand):
    """Linear layers of one input as one: their outputs stand side by side. A bias that some have and others lack is 0 for these."""

    @property
    def weights(self) -> list[torch.Tensor | None]:
        return [module._parameters.get("weight") for module in self.modules]

    @property
    def weight(self) -> torch.Tensor:
        weights: list[Any] = self.weights
        if torch.compiler.is_compiling():  # what looks at memory is none of a graph's
            return torch.cat(weights)
        wanted = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
        return _Join.apply(*weights) if wanted else _whole(weights)  # type: ignore[return-value]

    @property
    def bias(self) -> torch.Tensor:
        weights: list[Any] = [own_parameter(module, "weight") for module in self.modules]
        biases = [module._parameters.get("bias") for module in self.modules]
        like = next(bias for bias in biases if bias is not None)
        return torch.cat([like.new_zeros(len(weight)) if bias is None else bias for weight, bias in zip(weights, biases, strict=True)])
