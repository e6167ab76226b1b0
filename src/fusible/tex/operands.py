"""What dispatch sees of an argument: its *kind*, a small hashable value.

The kind of a tensor is ``(device kind, dtype)``, of a quantized tensor or a quantizer ``(scaling, device kind, dtype)``, of a flag the flag
itself. Kinds are looked up by the argument's exact class; a room that brings a class of its own registers how to describe it.

Of an argument that decides nothing dispatch sees its *sort*, which says whether it is what the declaration says: of a tensor its kind, and its
layout where it is not dense; of a value or a list its class.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from fusible.errors import ArgumentError, check_callable, check_class, expected

__all__ = ["is_dense", "kind", "not_dense", "register_kind", "sort"]


def kind(argument: Any) -> Hashable:
    """The kind of one argument of a call; anything unregistered is described by its class."""
    return KINDS[type(argument)](argument)


class _Kinds(dict[type, Callable[[Any], Hashable]]):
    """Descriptions by exact class; a class that has none takes its nearest base's, once."""

    def __missing__(self, cls: type) -> Callable[[Any], Hashable]:
        base = next((base for base in cls.__mro__ if base in self), None)
        self[cls] = self[base] if base is not None else lambda _: cls.__qualname__
        return self[cls]


KINDS = _Kinds()
"""How to describe an argument, by its class. Dispatch reads it directly, and not at all for None and ``torch.Tensor``s on a CPU: calls cost most."""


def sort(argument: Any) -> Hashable:
    """The sort of one argument of a call. There are few: calls that differ in numbers and lengths alone are of one sort."""
    cls = type(argument)
    if cls in _VALUES or cls is list or cls is tuple:
        return cls
    return (cls, KINDS[cls](argument)) if is_dense(argument) else (cls, KINDS[cls](argument), argument.layout)


def is_dense(argument: Any) -> bool:
    """Whether an argument is no tensor of torch's own classes that is sparse, or of another library's layout."""
    return type(argument) not in _TENSORS or argument.layout is torch.strided


def not_dense(x: torch.Tensor, of: str) -> ArgumentError:
    """The error of a tensor that is sparse, or of another library's layout, where only a dense one will do."""
    return ArgumentError(expected("a dense tensor", of=of, got=f"one of layout {str(x.layout).removeprefix('torch.')}", do="pass x.to_dense()"))


_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_VALUES = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device})


def register_kind(cls: type, describe: Callable[[Any], Hashable]) -> None:
    """Describe instances of ``cls`` (and of its subclasses that register nothing) by ``describe(instance)`` when a backend is chosen."""
    check_class(cls, "cls of register_kind")
    check_callable(describe, "describe of register_kind")
    KINDS[cls] = describe


def _itself(argument: Any) -> Hashable:
    return argument


def _of_tensor(tensor: torch.Tensor) -> Hashable:
    if tensor.is_cpu:
        return "cpu", tensor.dtype
    return tensor.device.type, tensor.dtype


def _of_list(arguments: Any) -> Hashable:
    return tuple(dict.fromkeys(_of_list(a) if isinstance(a, (list, tuple)) else kind(a) for a in arguments))


for _cls in _VALUES:
    register_kind(_cls, _itself)
register_kind(torch.Tensor, _of_tensor)
register_kind(torch.nn.Parameter, _of_tensor)
register_kind(list, _of_list)
register_kind(tuple, _of_list)
