"""Finds the queries, keys and values of an attention module, and with which of its arguments they are of one input, by trying its forward."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fusible.models.convert.trying import Stub, draw

__all__ = ["Argument", "Projections", "find_projections"]

_NAMES = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("q_lin", "k_lin", "v_lin"),
    ("query_proj", "key_proj", "value_proj"),
    ("to_q", "to_k", "to_v"),
    ("wq", "wk", "wv"),
)
_SHAPES = ((1, 4), (4,), (1, 2, 2))
"""Before the width: rows of several sequences, of one, and of a picture."""
_ROTATION = (torch.ones(1, 1, 1, device="cpu"), torch.zeros(1, 1, 1, device="cpu"))
"""Cosines and sines, of any place."""

Argument = tuple[int, str]
"""Of a forward: where it stands, behind the module, and its name."""


@dataclass(frozen=True)
class Projections:
    """``names``: of the layers; ``input``: what all of them read; ``others``: the arguments with which they do not, such as what is attended to."""

    names: tuple[str, ...]
    input: Argument
    others: tuple[Argument, ...]

    @property
    def text(self) -> str:
        return f"{', '.join(self.names)} as one product" + (f", but with {' or '.join(name for _, name in self.others)}" if self.others else "")

    def read_one_input(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether they do in a call of these arguments."""
        return not self.others or self._is_input_alone(args, kwargs)

    def _is_input_alone(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        x = _given(self.input, args, kwargs)
        return all((value := _given(other, args, kwargs)) is None or value is x for other in self.others)


def _given(argument: Argument, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    place, name = argument
    return args[place] if place < len(args) else kwargs.get(name)


def find_projections(module: nn.Module) -> Projections | None:
    """The linear layers in a module that make its queries, keys and values, where they may be one product: None otherwise."""
    for names in _NAMES:
        found = [module._modules.get(name) for name in names]
        if all(isinstance(layer, nn.Linear) for layer in found):
            weights: list[Any] = [layer._parameters["weight"] for layer in found if layer is not None]
            alike = {(weight.dtype, weight.device, weight.shape[1]) for weight in weights}
            return _by_trying(module, names, weights[0].shape[1]) if len(alike) == 1 else None
    return None


def _by_trying(module: nn.Module, names: tuple[str, ...], width: int) -> Projections | None:
    arguments = _arguments(module)
    if not arguments:
        return None
    (_, first), *others = arguments
    required = [name for name, default in _defaults(module) if default is inspect.Parameter.empty and name != first]
    for shape in _SHAPES:
        x, another = draw(*shape, width), draw(*shape, width, seed=1)
        for given in (None, x, _ROTATION):
            usual = {first: x, **dict.fromkeys(required, given)}
            if _read_the_same(module, names, usual):
                apart = tuple(one for one in others if _read_the_same(module, names, {**usual, one[1]: another}) is False)
                return Projections(names, (0, first), apart)
    return None


def _defaults(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The names and defaults of a forward's arguments, but for the module and those without a name."""
    _, *parameters = inspect.signature(type(module).forward).parameters.values()
    return ((one.name, one.default) for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY))


def _arguments(module: nn.Module) -> list[Argument]:
    return [(place, name) for place, (name, _) in enumerate(_defaults(module))]


def _read_the_same(module: nn.Module, names: tuple[str, ...], arguments: Mapping[str, Any]) -> bool | None:
    """Whether the layers are called on the same tensor, with these arguments; None where an error comes before all of them are."""
    read: dict[str, Any] = {}
    copy = object.__new__(type(module))
    stubs = {name: Stub() for name, child in module._modules.items() if child is not None}
    layers = {name: _Reader(name, len(module.get_parameter(f"{name}.weight")), read, len(names)) for name in names}
    vars(copy).update({**vars(module), "_parameters": {}, "_modules": {**module._modules, **stubs, **layers}, "training": False})
    try:
        with torch.no_grad(), torch.device("cpu"), torch.random.fork_rng(devices=()):
            type(module).forward(copy, **arguments)
    except Exception:
        pass  # that of the last reader, or of what a trial lacks
    return len({id(x) for x in read.values()}) == 1 if len(read) == len(names) else None


class _AllRead(Exception):
    """Ends a trial."""


class _Reader(nn.Module):
    """In the place of a layer: notes under its name what it is called on, and ends the trial with the last of so many."""

    def __init__(self, name: str, rows: int, read: dict[str, Any], layers: int) -> None:
        super().__init__()
        self.name, self.rows, self.read, self.layers = name, rows, read, layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.read.setdefault(self.name, x)
        if len(self.read) == self.layers:
            raise _AllRead
        return x.new_zeros(*x.shape[:-1], self.rows)
