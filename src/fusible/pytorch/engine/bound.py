"""``BoundOp``: an op with the module that it belongs to; and a counter of changes, by which pipelines notice that a module has made its op anew."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from fusible.compute_pipeline import Extras, between_rows
from fusible.nvte import Tensor
from fusible.ops import Op

__all__ = ["BoundOp", "changes", "in_shape", "key_of", "note_change", "with_rows", "without_memory"]


class BoundOp(NamedTuple):
    """An op, the module that it belongs to, and the module's names of the parameters behind ``op.args``. ``extras``: the extra tensors of an
    operation that has some. ``block``: the containers in which it stands, from the outermost inwards, each by its place in the one around it.
    ``place``: which of its module's ops it is, where the module makes them anew when its options change."""

    op: Op
    module: Any
    parameters: tuple[str, ...]
    extras: Extras | None = None
    block: tuple[int, ...] = ()
    place: int | None = None

    @property
    def key(self) -> Any:
        """Its identity: the module's and its place there, where that may make its op anew, else the op's."""
        if self.place is not None:
            return id(self.module), self.place
        return id(self.module if self.module.remakes_op else self.op)

    def within(self, block: tuple[int, ...]) -> BoundOp:
        """The same in a container that stands at ``block``."""
        return BoundOp(self.op, self.module, self.parameters, self.extras, (*block, *self.block), self.place) if block else self

    def now(self) -> BoundOp:
        """The bound op that the module has in its place now; itself where nothing has changed."""
        made = self.module.current(self)
        same = made.op is self.op and made.extras == self.extras
        return self if same else BoundOp(made.op, made.module, made.parameters, made.extras, self.block, self.place)


def key_of(bound: Sequence[BoundOp]) -> tuple[Any, ...]:
    """The identity of a list of ops."""
    return tuple([(b.key, b.block) for b in bound])


def with_rows(bound: Iterable[BoundOp]) -> tuple[BoundOp, ...]:
    """A list of ops as a pipeline runs it: where its ops share out rows between processes, with those that scatter and gather them."""
    entries = tuple(bound)
    if all(b.op.row_share is None for b in entries):
        return entries
    result: list[BoundOp] = []
    *before, end = between_rows([b.op for b in entries])
    for b, op in zip(entries, before, strict=True):
        result += [b] if op is None else [BoundOp(op, b.module, (), block=b.block), b]
    return (*result, *([] if end is None else [BoundOp(end, entries[-1].module, (), block=entries[-1].block)]))


def without_memory(op: Op) -> Op:
    """``op`` with parameters of the same shapes and types that have no memory. A pass takes the module's own, which may be others by then: of which
    FSDP2 has given this process a shard, or that were loaded in their place."""
    empty = {name: in_shape(arg) for name, arg in zip(op.arg_names, op.args, strict=True) if name in vars(op)}
    return op.with_(**empty) if empty else op


def in_shape(tensor: Tensor) -> Tensor:
    """A tensor of the same shape and type without memory."""
    return Tensor(torch.empty(tensor.shape, dtype=tensor.data.dtype, device="meta"), tensor.type)


_changes = 0


def changes() -> int:
    """How many times a module has made its op anew."""
    return _changes


def note_change() -> None:
    """A module has made its op anew: pipelines that run it look at their modules before the next call."""
    global _changes
    _changes += 1
