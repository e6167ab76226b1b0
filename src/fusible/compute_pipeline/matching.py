"""The matcher: from a list of ops and the registered fusions to a list of steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fusible.fusions import Fusion
from fusible.ops import Op

__all__ = ["Group", "group_ops"]


@dataclass(frozen=True)
class Group:
    """The ops ``[start, stop)`` of a pipeline that one call executes: a fusion's, or a single op's own pass."""

    start: int
    stop: int
    fusion: Fusion | None
    side_inputs: tuple[str, ...]
    side_outputs: tuple[str, ...]
    given: tuple[str, ...]

    @classmethod
    def of(cls, ops: Sequence[Op], start: int, stop: int, fusion: Fusion | None) -> Group:
        """The group of ``ops[start:stop]`` with the side values that its ops name."""
        members = ops[start:stop]
        sides = [tuple(dict.fromkeys(name for op in members for name in getattr(op, kind))) for kind in ("side_inputs", "side_outputs", "given")]
        return cls(start, stop, fusion, *sides)


def group_ops(ops: Sequence[Op], fusions: Iterable[Fusion], start: int = 0) -> tuple[Group, ...]:
    """Cover ``ops[start:]``: the longest patterns first, each at its leftmost places, exact op types; what is left stands alone."""
    taken: dict[int, Group] = {}
    free = [i >= start for i in range(len(ops))]
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
