"""Regions: the stretches of a pass that run as one program each, and those that are called as they stand, as no compiler sees what they do.

Regions decide how a pass is run, and nothing else. The plan, its segments (autograd nodes), its state and its parameters do not depend on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from fusible.compute_pipeline.inference import StateLayout
from fusible.compute_pipeline.matching import Group
from fusible.nvte import PassKind, QuantizedType
from fusible.ops import Op
from fusible.ops.protocols import OpaqueCode

__all__ = ["Region", "regions_of"]


@dataclass(frozen=True, eq=False)
class Region:
    """A stretch ``[start, stop)`` of the ops of a pass, which runs as one program."""

    start: int
    stop: int
    groups: tuple[Group, ...]
    """In the order of the ops; backward executes them from the last to the first."""
    called: str | None
    """Why it is called as it stands, each time, and is neither replayed nor compiled; None for one that can be."""
    takes: tuple[str, ...]
    """The side values that come from regions before it, in the order in which they are taken."""
    call_inputs: tuple[str, ...]
    """The values of the whole call that its ops take."""
    scales: tuple[str, ...]
    """The slots of the scales that it reads."""
    args: slice
    """The places of its ops' parameters among those of all ops."""


def regions_of(
    kind: PassKind, ops: Sequence[Op], start: int, stop: int, groups: Sequence[Group], state: StateLayout, counts: Sequence[int], split_opaque: bool
) -> tuple[Region, ...]:
    """The regions of a pass over ``[start, stop)``, in the order of the ops: one at least.

    ``split_opaque``: cut where groups that can be compiled meet groups that cannot. ``state``: the slots of the ops ``[start, stop)``. ``counts``:
    how many parameters are before each op, and in all.
    """
    why = [_why_called(ops[group.start : group.stop], group) for group in groups]
    runs = [list(run) for _, run in groupby(zip(groups, why, strict=True), key=lambda pair: split_opaque and bool(pair[1]))] or [[]]
    starts = [start, *(run[0][0].start for run in runs[1:])]
    found: list[Region] = []
    for run, first, last in zip(runs, starts, [*starts[1:], stop], strict=True):
        called = "; ".join(dict.fromkeys(reason for _, reason in run if reason)) or None
        of_run = tuple(group for group, _ in run)
        call_inputs = tuple(dict.fromkeys(name for op in ops[first:last] for name in op.call_inputs))
        scales = _scales(kind, ops[first:last], state, called is not None, len(runs) > 1, first, last)
        found.append(Region(first, last, of_run, called, _taken(kind, of_run), call_inputs, scales, slice(counts[first], counts[last])))
    return tuple(found)


def _why_called(members: Sequence[Op], group: Group) -> str:
    """Why a group must be called as it stands; empty where it need not."""
    if group.fusion is not None and group.fusion.opaque:
        return f"{group.fusion.name} is the caller's own code"
    op = next((op for op in members if op.direct_only), None)
    if op is None:
        return ""
    if isinstance(op, OpaqueCode):
        return f"{op.title} is written in plain torch"
    return f"{op.title} hands over more than it returns" if op.effects else f"{op.title} gives gradients later"


def _taken(kind: PassKind, groups: Sequence[Group]) -> tuple[str, ...]:
    """The side values that groups take and none of them gives; in a backward these are gradients, which go the other way."""
    taken: list[str] = []
    here: list[str] = []
    for group in reversed(groups) if kind == "backward" else groups:
        takes, gives = (group.side_outputs, group.side_inputs) if kind == "backward" else (group.side_inputs, group.side_outputs)
        for name in takes:
            here.remove(name) if name in here else taken.append(name)
        here += gives
    return tuple(taken)


def _scales(kind: PassKind, ops: Iterable[Op], state: StateLayout, called: bool, cut: bool, start: int, stop: int) -> tuple[str, ...]:
    """The slots whose scales a region reads. A region that is called as it stands may use its neighbours' quantizers, of forward and of backward, so
    it gets all; a program reads those that the types of its ops name."""
    if kind == "backward":
        slots = state.backward
    else:
        slots = state.forward + state.backward if called and kind == "forward" else state.forward
    if called or not cut:
        return slots
    named = {type.slot for op in ops for type in vars(op).values() if isinstance(type, QuantizedType)}
    return tuple(slot for slot in slots if slot in named or start <= int(slot.split(".", 1)[0]) < stop)
