"""``BoundOp``: an op with the module that it belongs to; and a counter of changes, by which pipelines notice that a module has made its op anew."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from fusible.compute_pipeline import Extras, between_rows
from fusible.ops import Op

__all__ = ["BoundOp", "changes", "key_of", "note_change", "with_rows"]


class BoundOp(NamedTuple):
    """An op, the module that it belongs to, and the module's names of the parameters behind ``op.args``. ``extras``: the extra tensors of an
    operation that has some. ``block``: the containers in which it stands, from the outermost inwards, each by its place in the one around it."""

    op: Op
    module: Any
    parameters: tuple[str, ...]
    extras: Extras | None = None
    block: tuple[int, ...] = ()

    @property
    def key(self) -> int:
        """Its identity: the module's, where that may make its op anew, else the op's."""
        return id(self.module if self.module.remakes_op else self.op)

    def within(self, block: tuple[int, ...]) -> BoundOp:
        """The same in a container that stands at ``block``."""
        return BoundOp(self.op, self.module, self.parameters, self.extras, (*block, *self.block)) if block else self

    def now(self) -> BoundOp:
        """The bound op that the module has in its place now; itself where nothing has changed."""
        made = self.module.current(self)
        same = made.op is self.op and made.extras == self.extras
        return self if same else BoundOp(made.op, made.module, made.parameters, made.extras, self.block)


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


_changes = 0


def changes() -> int:
    """How many times a module has made its op anew."""
    return _changes


def note_change() -> None:
    """A module has made its op anew: pipelines that run it look at their modules before the next call."""
    global _changes
    _changes += 1
