"""What is on its way from one region of a pass to the next, and how it is taken apart for a program and put together again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch

from fusible import nvte
from fusible.compute_pipeline import Region
from fusible.nvte import Leaf, Shell, StorageSpec, flatten, is_quantized_type, unflatten

__all__ = ["Border", "OnTheWay", "leaf_count", "packed", "spec_key"]


class Border(NamedTuple):
    """What passes between two regions without its tensors: whether each value is there, the side values' names, and how all were taken apart."""

    names: tuple[str, ...]
    there: tuple[bool, ...]
    spec: list[Leaf]
    count: int
    """Of the tensors."""

    @property
    def key(self) -> Any:
        """What a program depends on of it, beside the shapes and dtypes of the tensors."""
        return self.names, self.there, spec_key(self.spec)

    def opened(self, leaves: Sequence[Any]) -> list[nvte.Tensor | None]:
        """The values, None for what is not there, of tensors that may be another framework's."""
        values = iter(unflatten(leaves[: self.count], self.spec))
        return [next(values) if there else None for there in self.there]


def packed(value: nvte.Tensor | None, sides: Iterable[tuple[str, nvte.Tensor | None]]) -> tuple[list[Any], Border]:
    """The tensors of a pass's value and of side values, and the border that they pass."""
    named = [("", value), *sides]
    leaves, spec = flatten([tensor for _, tensor in named if tensor is not None])
    return leaves, Border(tuple([name for name, _ in named[1:]]), tuple([tensor is not None for _, tensor in named]), spec, len(leaves))


class OnTheWay:
    """``value``: what the regions so far have made of x, or of dy, in 8 bits perhaps. Beside it are the side values that are there and yet to be
    taken: ``names`` and ``values`` are those that the caller gave."""

    def __init__(self, value: nvte.Tensor, names: Iterable[str], values: Iterable[nvte.Tensor]) -> None:
        self.value: nvte.Tensor | None = value
        # the latest of a name last
        self._sides: dict[str, list[nvte.Tensor | None]] = {name: [side] for name, side in zip(names, values, strict=True)}

    def into(self, region: Region) -> tuple[list[Any], Border]:
        """The tensors that a region takes, which are here no more."""
        assert self.value is not None
        value, self.value = self.value, None
        return packed(value, [(name, self.take(name)) for name in region.takes])

    def out_of(self, border: Border, leaves: Sequence[Any]) -> None:
        """Go on from what a region has given."""
        self.value, *sides = border.opened(leaves)
        for name, side in zip(border.names, sides, strict=True):
            self._sides.setdefault(name, []).append(side)

    def take(self, name: str) -> nvte.Tensor | None:
        """The latest side value of a name; None for a gradient that nobody gave."""
        return self._sides[name].pop() if self._sides.get(name) else None


def spec_key(spec: Sequence[Leaf]) -> tuple[Any, ...]:
    """What a program depends on of how tensors were taken apart; the quantizer that a storage came from it does not."""
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
    return _tensors(storage) if is_quantized_type(type) else 1


def _tensors(storage: StorageSpec | Shell | None) -> int:
    if storage is None:
        return 1
    return storage.count if isinstance(storage, Shell) else sum([_tensors(inner) for _, inner in storage.parts])
