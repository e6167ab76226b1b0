"""The values that pass from one region of a pass to the next, and how they are taken apart for a program and put together again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property
from typing import Any

import torch

from fusible import nvte
from fusible.compute_pipeline import Region
from fusible.nvte import Leaf, QuantizedType, Shell, StorageSpec, Type, flatten, make_nvte_tensor, nvte_dtype, unflatten
from fusible.quantized import QuantizedTensor

__all__ = ["Border", "OnTheWay", "leaf_count", "packed", "spec_key"]


@dataclass(frozen=True, eq=False)
class Border:
    """The static part of what passes between two regions: the names of side values, which values are present, and how all were taken apart."""

    names: tuple[str, ...]
    there: tuple[bool, ...]
    spec: list[Leaf]
    count: int
    """Of the tensors."""
    plain: Type | None = None
    """The type of a single value in high precision, the usual case, in which there is nothing to take apart; else None."""

    def key(self, leaves: Sequence[Any]) -> Any:
        """The part of a program's key that follows from the border and the tensors that pass it; executors add the first tensor's shape and dtype.
        The names are those of the program's region."""
        return self._form if self.count == 1 else (self._form, tuple([(leaf.shape, leaf.dtype) for leaf in leaves[1:]]))

    @cached_property
    def _form(self) -> Any:
        return self.there, spec_key(self.spec)

    def opened(self, leaves: Sequence[Any]) -> list[nvte.Tensor | None]:
        """The values, None for what is not there, of tensors that may be another framework's."""
        if self.plain is not None:
            return [nvte.Tensor(leaves[0], self.plain)]
        values = iter(unflatten(leaves, self.spec))
        return [next(values) if there else None for there in self.there]


@cache
def _plain(type: Type) -> Border:
    return Border((), (True,), [(type, None)], 1, type)


_NOTHING = Border((), (False,), [], 0)


def packed(value: nvte.Tensor | None, sides: Sequence[tuple[str, nvte.Tensor | None]]) -> tuple[list[Any], Border]:
    """The tensors of a pass's value and of side values, and the border that they pass."""
    if not sides:
        if value is None:
            return [], _NOTHING
        if not isinstance(value.type, QuantizedType):
            return [value.data], _plain(value.type)
    named = [("", value), *sides]
    leaves, spec = flatten([tensor for _, tensor in named if tensor is not None])
    return leaves, Border(tuple([name for name, _ in named[1:]]), tuple([tensor is not None for _, tensor in named]), spec, len(leaves))


class OnTheWay:
    """The values of a pass between its regions. ``data`` and ``type``: what the regions so far have made of x, or of dy; it may be quantized, and is
    None where there is no gradient. Side values wait here until a region takes them; ``names`` and ``values`` are those that the caller gave."""

    def __init__(self, data: torch.Tensor, names: Sequence[str], values: Iterable[torch.Tensor]) -> None:
        self.data, self.type = _inside(data)
        # the latest of a name last
        self._sides: dict[str, list[nvte.Tensor | None]] = (
            {name: [nvte.Tensor(*_inside(side))] for name, side in zip(names, values, strict=True)} if names else {}
        )

    def into(self, region: Region) -> tuple[list[Any], Border]:
        """Hand over the tensors that a region takes: they are not kept here."""
        data, type, self.data = self.data, self.type, None
        if not region.takes and not isinstance(type, QuantizedType):
            return [data], _plain(type)
        return packed(nvte.Tensor(data, type), [(name, self.take(name)) for name in region.takes])

    def out_of(self, border: Border, leaves: Sequence[Any]) -> None:
        """Take what a region has returned."""
        if border.plain is not None:
            self.data, self.type = leaves[0], border.plain
            return
        if border is _NOTHING:
            return
        value, *sides = border.opened(leaves)
        if value is not None:
            self.data, self.type = value.data, value.type
        for name, side in zip(border.names, sides, strict=True):
            self._sides.setdefault(name, []).append(side)

    def take(self, name: str) -> nvte.Tensor | None:
        """The latest side value of a name; None for a gradient that nobody gave."""
        return self._sides[name].pop() if self._sides.get(name) else None


def _inside(data: Any) -> tuple[Any, Type]:
    """A tensor that comes from outside, and its type; a quantized one by its storage, as passes know it."""
    if data.__class__ is torch.Tensor:
        return data, nvte_dtype(data.dtype)
    tensor = make_nvte_tensor(data.storage_without_autograd() if isinstance(data, QuantizedTensor) else data)
    return tensor.data, tensor.type


def spec_key(spec: Sequence[Leaf]) -> tuple[Any, ...]:
    """The part of a program's key that follows from how tensors were taken apart. No program depends on the quantizers of storages."""
    return tuple([type if storage is None else (type, _form(storage)) for type, storage in spec])


_OPTIONS = (bool, int, float, str, type(None), torch.dtype, torch.Size, Enum)


def _form(storage: StorageSpec | Shell) -> Any:
    if isinstance(storage, Shell):
        return type(storage.storage), storage.count
    parts = tuple([(name, None if inner is None else _form(inner)) for name, inner in storage.parts])
    return storage.make, parts, tuple([value if isinstance(value, _OPTIONS) else type(value) for value in storage.rest.values()])


def leaf_count(leaf: Leaf) -> int:
    """How many framework tensors one tensor was taken apart into."""
    type, storage = leaf
    return _tensors(storage) if isinstance(type, QuantizedType) else 1


def _tensors(storage: StorageSpec | Shell | None) -> int:
    if storage is None:
        return 1
    return storage.count if isinstance(storage, Shell) else sum([_tensors(inner) for _, inner in storage.parts])
