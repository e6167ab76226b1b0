"""The matcher: from a list of ops and the registered fusions to a list of steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fusible.compute_pipeline.sides import OpenSides
from fusible.errors import ArgumentError, expected
from fusible.fusions import Fusion
from fusible.ops import Op
from fusible.ops.protocols import OpaqueCode

__all__ = ["Group", "group_ops", "needs_backward", "outer_sides"]


@dataclass(frozen=True)
class Group:
    """The ops ``[start, stop)`` of a pipeline that one call executes: a fusion's, or a single op's own pass.

    ``side_inputs`` and ``side_outputs``: of the group as a whole, without the values that one of its ops gives and a later one takes.
    """

    start: int
    stop: int
    fusion: Fusion | None
    side_inputs: tuple[str, ...]
    side_outputs: tuple[str, ...]
    call_inputs: tuple[str, ...]
    opaque: bool
    """Whether its passes are code for torch tensors, whose results are looked at where they become ours."""

    @classmethod
    def of(cls, ops: Sequence[Op], start: int, stop: int, fusion: Fusion | None) -> Group:
        """The group of ``ops[start:stop]``. Raises ``ArgumentError`` where two side values of one name would meet in a call of it."""
        members = ops[start:stop]
        sides = [tuple(name for names in of_op for name in names) for of_op in outer_sides(members)]
        for names in sides:
            if len(set(names)) < len(names):
                of = f"the side values of {' + '.join(type(op).__name__ for op in members)} as one operation"
                raise ArgumentError(expected("different names", of=of, got=", ".join(names), do="put fewer of them together"))
        call_inputs = tuple(dict.fromkeys(name for op in members for name in op.call_inputs))
        opaque = isinstance(members[0], OpaqueCode) or (fusion is not None and fusion.opaque)
        return cls(start, stop, fusion, *sides, call_inputs=call_inputs, opaque=opaque)


def outer_sides(ops: Sequence[Op]) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Per op, the side inputs that none of ``ops`` before it gives, and the side outputs that none of ``ops`` after it takes."""
    inputs: list[tuple[str, ...]] = []
    open_ = OpenSides()
    for i, op in enumerate(ops):
        inputs.append(tuple(name for name in op.side_inputs if open_.take(name) is None))
        open_.give(op.side_outputs, i)
    return inputs, [tuple(name for name, maker in open_.open if maker == i) for i in range(len(ops))]


def needs_backward(op: Op) -> bool:
    """Whether anyone needs a gradient that the op's backward gives."""
    return any(op.wants(name) for name in ("x", *op.arg_names, *op.side_inputs))


def group_ops(ops: Sequence[Op], fusions: Iterable[Fusion], start: int = 0, fixed: Iterable[tuple[int, int, Fusion]] = ()) -> tuple[Group, ...]:
    """Cover ``ops[start:]``: the ``fixed`` groups, then the longest patterns first, each at its leftmost places, exact op types; what is left stands
    alone. A fixed group that begins before ``start`` is kept whole."""
    taken: dict[int, Group] = {}
    free = [i >= start for i in range(len(ops))]
    for first, stop, fusion in fixed:
        if stop > start:
            taken[first] = Group.of(ops, first, stop, fusion)
            free[first:stop] = [False] * (stop - first)
    for fusion in fusions:
        length = len(fusion.pattern)
        place = start
        while place + length <= len(ops):
            window = slice(place, place + length)
            if all(free[window]) and fusion.matches(ops[window]):
                taken[place] = Group.of(ops, place, place + length, fusion)
                free[window] = [False] * length
                place += length
            else:
                place += 1
    for place, alone in enumerate(free):
        if alone and place >= start:
            taken[place] = Group.of(ops, place, place + 1, None)
    return tuple(taken[place] for place in sorted(taken))
