"""The memory of a call's arguments and results: which of them share it, what the call wrote, and the same values with other strides."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from copy import deepcopy
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from fusible.conformance.table import Disagreement
from fusible.quantized import BlockScaledStorage, Float8TensorStorage, GroupedTensorStorage

__all__ = ["Snapshot", "holds", "relaid", "shared", "tensors", "with_copies", "within"]

_PLAIN = (Tensor, torch.nn.Parameter)
_POISON = 0xFF
"""The byte between the elements of tensors with gaps. Filled with it, every float type is NaN."""


def tensors(tree: Any, path: str = "", _seen: set[int] | None = None) -> Iterator[tuple[str, Tensor]]:
    """``(path, tensor)`` of every plain tensor in lists, dicts and attributes of objects. Paths have the form of ``Output.at``."""
    seen = set() if _seen is None else _seen
    if type(tree) in _PLAIN:
        yield path, tree
    elif isinstance(tree, dict | list | tuple):
        for name, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from tensors(value, f"{path}.{name}" if path else str(name), seen)
    elif hasattr(tree, "__dict__") and not isinstance(tree, type | FunctionType):
        if id(tree) not in seen:
            seen.add(id(tree))
            for name, value in vars(tree).items():
                yield from tensors(value, f"{path}.{name}", seen)


def holds(x: Any) -> bool:
    """Whether ``x`` is a quantized or grouped tensor, whose attributes are the tensors that a kernel reads."""
    return isinstance(x, Float8TensorStorage | BlockScaledStorage | GroupedTensorStorage)


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _memory(x: Tensor) -> Tensor:
    """All bytes of the storage that ``x`` is a view of."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def within(path: str, roots: Collection[str]) -> bool:
    """Whether ``path`` is one of ``roots`` or a part of one."""
    return any(path == root or path.startswith(f"{root}.") for root in roots)


class Snapshot:
    """The bytes of every tensor in ``tree``, including those around and between its elements."""

    def __init__(self, tree: Any) -> None:
        self._before = [(path, x, _memory(x).clone()) for path, x in tensors(tree)]

    def check(self, written: Collection[str]) -> None:
        """Raise ``Disagreement`` if bytes have changed, other than the elements of the tensors at the paths ``written``."""
        free = [x for path, x, _ in self._before if within(path, written)]
        for path, x, before in self._before:
            after = _memory(x)
            if torch.equal(after, before):
                continue
            allowed = after.clone()
            for other in free:
                if _storage(other) == _storage(x):
                    mine, theirs = (
                        torch.empty(0, dtype=other.dtype, device=x.device).set_(
                            whole.untyped_storage(), other.storage_offset(), other.shape, other.stride()
                        )
                        for whole in (allowed, before)
                    )
                    mine.copy_(theirs)
            if not torch.equal(allowed, before):
                beside = "beside the elements of " if within(path, written) else ""
                raise Disagreement(f"the call wrote {beside}the argument {path}")


def shared(one: Any, other: Any, *, under: tuple[str, str] = ("", ""), distinct: bool = True) -> set[tuple[str, str]]:
    """The pairs of paths in ``one`` and ``other`` whose tensors share memory. ``distinct=False``: both are one tree, and each pair comes once."""
    places: dict[tuple[torch.device, int], list[str]] = {}
    for path, x in tensors(other, under[1]):
        if x.numel() and x.untyped_storage().nbytes():
            places.setdefault((x.device, _storage(x)), []).append(path)
    found = [(path, x) for path, x in tensors(one, under[0]) if x.numel() and x.untyped_storage().nbytes()]
    return {(path, there) for path, x in found for there in places.get((x.device, _storage(x)), ()) if distinct or path < there}


def with_copies(tree: Any) -> list[tuple[str, Tensor, Tensor]]:
    """``(path, tensor, its elements now)`` of every tensor in ``tree``."""
    return [(path, x, x.clone()) for path, x in tensors(tree)]


def relaid(arguments: dict[str, Any], *, strided: Collection[str], shifted: Collection[str]) -> dict[str, Any]:
    """A copy of ``arguments`` whose tensors have the same values, surrounded by poison.

    The tensors of the arguments named in ``strided`` are every other element of a larger buffer. Those of the arguments named in ``shifted`` keep
    their strides, and begin behind the start of their storage. A list, a quantized and a grouped tensor pass the name on to their parts.
    """
    made: dict[int, Tensor] = {}
    copied: dict[int, Any] = {}

    def laid(x: Any, step: int) -> Any:
        if isinstance(x, list | tuple):
            return type(x)(laid(value, step) for value in x)
        if holds(x):
            twin = deepcopy(x, copied)
            for name, part in vars(x).items():
                if type(part) in _PLAIN or isinstance(part, list):
                    setattr(twin, name, laid(part, step))
            return twin
        if type(x) not in _PLAIN:
            return deepcopy(x, copied)
        if id(x) not in made:
            made[id(x)] = _amid_poison(x, step)
        return made[id(x)]

    steps = {**dict.fromkeys(shifted, 1), **dict.fromkeys(strided, 2)}
    return {name: laid(x, steps[name]) if name in steps else deepcopy(x, copied) for name, x in arguments.items()}


def _amid_poison(x: Tensor, step: int) -> Tensor:
    if step > 1:
        whole = _poisoned(x.numel() * step, x)
        view = whole.view(*x.shape, step)[..., 0]
        view.copy_(x)
        return view
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    whole = _poisoned(span, x)
    whole.copy_(x.as_strided((span,), (1,)))
    return whole.as_strided(x.shape, x.stride(), whole.storage_offset())


def _poisoned(count: int, like: Tensor) -> Tensor:
    """``count`` elements within a larger buffer, not aligned for vector loads."""
    memory = torch.full(((count + 9) * like.element_size(),), _POISON, dtype=torch.uint8, device=like.device)
    return memory.view(like.dtype)[3 : 3 + count]
