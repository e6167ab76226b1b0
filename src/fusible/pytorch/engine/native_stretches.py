"""Stretches of a replay that are calls of native kernels alone, each as one native program.

Between two kernels of such a stretch stands no Python: what one gives the next takes lies in memory that is laid out beforehand, and views of it are
numbers. What is read after the stretch is a tensor of its own.

A stretch is taken where its results are small. There the calls cost what stands around them; where results are large, that is nothing, and memory
that is given back as soon as it has been read is worth more.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from fusible.pytorch.engine.steps import Run, Step, written
from fusible.tex.backends.cpu import native_program
from fusible.tex.interface.kernel_calls import Operand, Part, Room

__all__ = ["with_native_stretches"]

_FEWEST = 2
"""Calls of a stretch."""
_LARGE = 2**22
"""Bytes of results from which the calls of a stretch are made one by one."""
_LINE = 64
"""Bytes to whose multiples memory is aligned."""


def with_native_stretches(steps: Sequence[Step], outputs: Collection[int]) -> list[Step]:
    """``steps`` with one for each stretch of them that is native. ``outputs``: the places that are read after all."""
    free = 1 + max(place for step in steps for place in step.places)
    found: list[Step] = []
    begin = 0
    while begin < len(steps):
        end = begin
        while end < len(steps) and steps[end].kernels is not None:
            end += 1
        if end == begin:
            found.append(steps[end])
            end += 1
        else:
            later = {*outputs, *(source for step in steps[end:] for source in step.sources)}
            found += _in_place_of(steps[begin:end], later, free)
            free += 1
        begin = end
    return found


def _in_place_of(steps: Sequence[Step], later: Collection[int], target: int) -> Sequence[Step]:
    """The steps in place of a stretch: its program, whose result is put into ``target``, and views of what it made that are read ``later``; or the
    same steps."""
    stretch = _Stretch(steps)
    wanted = {*later}
    views: list[Step] = []
    for step in reversed(steps):
        if any(place in wanted and not isinstance(stretch.results[place], Room) for place in step.places):
            if not stretch.only_views(step):
                return steps
            views.insert(0, step)
            wanted.update(step.sources)
    if stretch.calls < _FEWEST or stretch.bytes > _LARGE:
        return steps
    made = {place: room for place, room in stretch.results.items() if place in wanted and isinstance(room, Room)}
    of_room = {room: place for place, room in made.items()}
    numbers = {room: number for number, room in enumerate(of_room)}
    run = _function(stretch, list(of_room), written(steps, {}, list(stretch.given), list(of_room.values())))
    return [Step(run, tuple(stretch.given), target, tuple((f"[{numbers[room]}]", place) for place, room in made.items())), *views]


class _Lying(NamedTuple):
    """Where a value lies: so many bytes behind the beginning of a tensor, one that the stretch is given, at a place, or one that it makes."""

    root: int | Room
    offset: int


class _Stretch:
    """What the steps of a stretch read and make."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps
        self.results: dict[int, Any] = {}
        """By place, what is put there: a room, a part, an operand, None, or a list of such."""
        self.given: dict[int, None] = {}
        """The places, in order, of the tensors that come from elsewhere."""
        self.uses: dict[Room, list[int]] = {}
        """What is made, and the numbers of the steps that look at it."""
        self._lying: dict[int, _Lying] = {}
        for number, step in enumerate(steps):
            for _, arguments in self._kernels(step).calls:
                self._note(arguments.values(), number)
            for text, place in (("", step.target), *step.parts):
                self.results[place] = result = _found_at(self._kernels(step).result, text)
                self._note([result], number)
                if isinstance(result, (Operand, Part, Room)):
                    self._lying[place] = self.lying(result, number)

    @staticmethod
    def _kernels(step: Step) -> Any:
        assert step.kernels is not None
        return step.kernels

    def only_views(self, step: Step) -> bool:
        return not self._kernels(step).calls

    @property
    def calls(self) -> int:
        return sum(len(self._kernels(step).calls) for step in self.steps)

    @property
    def bytes(self) -> int:
        return sum(map(_bytes_of, self.uses))

    def lying(self, value: Operand | Part | Room, number: int) -> _Lying:
        """Where a value of the step ``number`` lies."""
        if isinstance(value, Room):
            return _Lying(value, 0)
        if isinstance(value, Part):
            of = self.lying(value.of, number)
            return _Lying(of.root, of.offset + value.offset)
        place = self.steps[number].sources[value.number]
        if place not in self._lying:
            self.given[place] = None
            self._lying[place] = _Lying(place, 0)
        return self._lying[place]

    def _note(self, values: Iterable[Any], number: int) -> None:
        for value in values:
            if isinstance(value, list):
                self._note(value, number)
            elif isinstance(value, (Operand, Part, Room)):
                root = self.lying(value, number).root
                if isinstance(root, Room):
                    self.uses.setdefault(root, []).append(number)


def _found_at(result: Any, text: str) -> Any:
    for index in re.findall(r"\[(\d+)\]", text):
        result = result[int(index)]
    return result


def _bytes_of(room: Room) -> int:
    return (math.prod(room.shape) * room.dtype.itemsize + _LINE - 1) // _LINE * _LINE


def _function(stretch: _Stretch, rooms: Sequence[Room], one_by_one: Run) -> Any:
    """The stretch as a function of what it is given, which gives what is in ``rooms``. ``one_by_one``: the same, for tensors that share memory."""
    offsets, size = _arranged(stretch.uses, rooms)
    numbers: dict[int | Room, tuple[int, int]] = {root: (number, 0) for number, root in enumerate((*stretch.given, *rooms))}
    numbers |= {room: (len(numbers), offset) for room, offset in offsets.items()}
    values: dict[Any, int] = {}

    def value_of(value: Operand | Part | Room, number: int) -> int:
        lying = stretch.lying(value, number)
        tensor, begin = numbers[lying.root]
        return values.setdefault((tensor, begin + lying.offset, value.dtype, value.shape, value.strides), len(values))

    calls = []
    for number, step in enumerate(stretch.steps):
        for function, arguments in step.kernels.calls if step.kernels is not None else ():
            places = {name: value_of(x, number) for name, x in arguments.items() if isinstance(x, (Operand, Part, Room))}
            calls.append((function, {name: x for name, x in arguments.items() if name not in places}, places))
    empty, scratch = torch.empty, [partial(torch.empty, max(size, 1), dtype=torch.uint8)] if offsets else []
    program = native_program(len(stretch.given) + len(rooms) + len(scratch), list(values), calls)
    kinds = [(room.shape, room.dtype) for room in rooms]

    def run(*given: Any) -> list[Any]:
        made = [empty(shape, dtype=dtype) for shape, dtype in kinds]
        return made if program([*given, *made, *[make() for make in scratch]]) else one_by_one(list(given))

    return run


def _arranged(uses: Mapping[Room, Sequence[int]], kept: Collection[Room]) -> tuple[dict[Room, int], int]:
    """Where in one piece of memory the rooms lie that are not ``kept`` as tensors, and its size. Two that are looked at in turn may share it."""
    offsets: dict[Room, int] = {}
    size = 0
    for room, numbers in uses.items():
        if room in kept:
            continue
        beside = [other for other in offsets if uses[other][-1] >= numbers[0]]
        begin = 0
        for other in sorted(beside, key=offsets.__getitem__):
            if begin + _bytes_of(room) <= offsets[other]:
                break
            begin = max(begin, offsets[other] + _bytes_of(other))
        offsets[room] = begin
        size = max(size, begin + _bytes_of(room))
    return offsets, size
