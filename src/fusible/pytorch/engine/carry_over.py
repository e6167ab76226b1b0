"""Scaling states of former pipelines are handed to the present ones, where modules have come, gone or moved.

A pipeline names its scales by the places of its ops. So when a list of modules changes, a scale is found again by the op that it belongs to.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any, NamedTuple

import torch

from fusible.compute_pipeline import StateLayout
from fusible.pytorch.engine.bound import BoundOp
from fusible.pytorch.engine.scaling import ScalingOwner
from fusible.quantized import ScalingState

__all__ = ["FormerState", "KeptState", "OpMark", "carried_over", "marks_of"]


class OpMark(NamedTuple):
    """Recognizes an op by its module and class, as the op itself may have been made anew with other tensors. ``block``: of ``BoundOp``."""

    module: Any
    kind: type
    block: tuple[int, ...]


class FormerState(NamedTuple):
    """The scaling state of a former pipeline, and the marks of its ops in order."""

    ops: tuple[OpMark, ...]
    owner: ScalingOwner


class KeptState(NamedTuple):
    """The same, as ``ScalingOwner.save`` gave it, with the names of the scales: it is copied and pickled with the modules that it names."""

    ops: tuple[OpMark, ...]
    layout: StateLayout
    saved: torch.Tensor

    def former(self) -> FormerState:
        owner = ScalingOwner(self.layout)
        owner.load(self.saved)
        return FormerState(self.ops, owner)


class _Source(NamedTuple):
    owner: ScalingOwner
    position: int


def marks_of(bound: Sequence[BoundOp]) -> tuple[OpMark, ...]:
    """The marks of a pipeline's ops."""
    return tuple(OpMark(b.module, b.op.kind, b.block) for b in bound)


def carried_over(
    former: Sequence[Sequence[FormerState]], ops: Sequence[Sequence[OpMark]], layouts: Sequence[StateLayout]
) -> list[dict[str, Any] | None]:
    """For each of several pipelines the state that ``ScalingOwner.adopt`` takes: an op that a former pipeline had keeps its scales and amaxes, a new
    one has a scale of 1 and no amaxes. None where no op is known. ``former``: groups of pipelines, the latest first; the first with an op decides."""
    now = [(id(mark.module), mark.kind) for marks in ops for mark in marks]
    found: dict[int, _Source] = {}
    for group in former:
        sources = [(state, position) for state in group if state.owner.current is not None for position in range(len(state.ops))]
        then = [(id(state.ops[position].module), state.ops[position].kind) for state, position in sources]
        left = [place for place in range(len(now)) if place not in found]
        for place, at in _matched(then, [now[place] for place in left]).items():
            found[left[place]] = _Source(sources[at][0].owner, sources[at][1])
    results = []
    start = 0
    for marks, layout in zip(ops, layouts, strict=True):
        own = {position: found[start + position] for position in range(len(marks)) if start + position in found}
        results.append(_gathered(layout, own))
        start += len(marks)
    return results


def _matched(then: Sequence[Any], now: Sequence[Any]) -> dict[int, int]:
    """By place in ``now``, the place of the same op in ``then``. Stretches that kept their order are matched first, so that each place of a module
    that stands at several keeps its own state; then, in order, the ops that moved."""
    found: dict[int, int] = {}
    for block in SequenceMatcher(None, then, now, autojunk=False).get_matching_blocks():
        found.update((block.b + i, block.a + i) for i in range(block.size))
    left: defaultdict[Any, deque[int]] = defaultdict(deque)
    taken = set(found.values())
    for place, key in enumerate(then):
        if place not in taken:
            left[key].append(place)
    for place, key in enumerate(now):
        if place not in found and left[key]:
            found[place] = left[key].popleft()
    return found


def _gathered(layout: StateLayout, sources: dict[int, _Source]) -> dict[str, Any] | None:
    if not sources or not layout:
        return None
    result: dict[str, Any] = {"open": any(source.owner.open for source in sources.values())}
    positions = {position: source.position for position, source in sources.items()}
    for direction in ("forward", "backward"):
        states = {position: getattr(source.owner.current, direction) for position, source in sources.items()}
        result[direction] = _columns(getattr(layout, direction), states, positions)
    return result


def _columns(slots: tuple[str, ...], states: dict[int, ScalingState], positions: dict[int, int]) -> ScalingState:
    """The state with a column for each of ``slots``: that of the op at its position, which stood at another."""
    first = next(iter(states.values()))
    device, window = first.scale.device, max(len(state.amax_history) for state in states.values())
    made = ScalingState.create(slots, first.fp8_dtype, window, device)
    scale, history = made.scale, made.amax_history
    for column, slot in enumerate(slots):
        position, name = slot.split(".", 1)
        state = states.get(int(position))
        was = f"{positions[int(position)]}.{name}" if state is not None else ""
        if state is None or was not in state.slots:
            continue
        at, state = state.slots.index(was), state.resized(window)
        scale[column], history[:, column] = state.scale[at].to(device), state.amax_history[:, at].to(device)
    return ScalingState(slots, first.fp8_dtype, scale, history)
