"""Consecutive steps of a replay that are calls of native kernels alone, as one native program.

There is no Python between two kernels of such a program: what one gives the next lies in memory that is laid out beforehand, and views of it are
numbers. What is read after the program is a tensor of its own.

A program is taken where its results are small. There the calls cost what stands around them; where results are large, that is nothing, and memory
that is given back as soon as it has been read is worth more.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fusible.pytorch.engine.steps import Run, Step, written
from fusible.tex.backends.cpu import native_program, pattern
from fusible.tex.interface.kernel_calls import Buffer, Operand, View

__all__ = ["with_native_programs"]

_FEWEST = 2
"""Calls of a program."""
_LARGE = 2**22
"""Bytes of results from which the calls of a program are made one by one."""
_LINE = 64
"""Bytes to whose multiples memory is aligned."""


def with_native_programs(steps: Sequence[Step], outputs: Collection[int]) -> list[Step]:
    """``steps`` with one in the place of those that follow one another and are native. ``outputs``: the places that are read after all."""
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
            found += _as_program(steps[begin:end], later, free)
            free += 1
        begin = end
    return found


def _as_program(steps: Sequence[Step], later: Collection[int], target: int) -> Sequence[Step]:
    """What takes the place of ``steps``: their program, whose result is put into ``target``, and views of what it made that are read ``later``; or
    ``steps`` themselves."""
    program = _Program(steps)
    wanted = {*later}
    views: list[Step] = []
    for step in reversed(steps):
        if any(place in wanted and not isinstance(program.results[place], Buffer) for place in step.places):
            if not program.only_views(step):
                return steps
            views.insert(0, step)
            wanted.update(step.sources)
    if program.calls < _FEWEST or program.bytes > _LARGE:
        return steps
    made = {place: buffer for place, buffer in program.results.items() if place in wanted and isinstance(buffer, Buffer)}
    place_of = {buffer: place for place, buffer in made.items()}
    numbers = {buffer: number for number, buffer in enumerate(place_of)}
    run = _function(program, list(place_of), written(steps, {}, list(program.inputs), list(place_of.values())))
    return [Step(run, tuple(program.inputs), target, tuple((f"[{numbers[buffer]}]", place) for place, buffer in made.items())), *views]


class _Location(NamedTuple):
    """Where a value lies: so many bytes behind the beginning of a tensor, one of the inputs, by its place, or one that the program makes."""

    root: int | Buffer
    offset: int


class _Program:
    """What the steps of a program read and make, and where that lies."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps
        self.results: dict[int, Any] = {}
        """By place, what is put there: a buffer, a view, an operand, None, or a list of such."""
        self.inputs: dict[int, None] = {}
        """The places, in order, of the tensors that come from elsewhere."""
        self.uses: dict[Buffer, list[int]] = {}
        """What is made, and the numbers of the steps that look at it."""
        self._locations: dict[int, _Location] = {}
        for number, step in enumerate(steps):
            for _, arguments in self._kernels(step).calls:
                self._note(arguments.values(), number)
            for text, place in (("", step.target), *step.parts):
                self.results[place] = result = _at(self._kernels(step).result, text)
                self._note([result], number)
                if isinstance(result, (Operand, View, Buffer)):
                    self._locations[place] = self.location(result, number)

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

    def location(self, value: Operand | View | Buffer, number: int) -> _Location:
        """Where a value of the step ``number`` lies."""
        if isinstance(value, Buffer):
            return _Location(value, 0)
        if isinstance(value, View):
            of = self.location(value.of, number)
            return _Location(of.root, of.offset + value.offset)
        place = self.steps[number].sources[value.number]
        if place not in self._locations:
            self.inputs[place] = None
            self._locations[place] = _Location(place, 0)
        return self._locations[place]

    def _note(self, values: Iterable[Any], number: int) -> None:
        for value in values:
            if isinstance(value, list):
                self._note(value, number)
            elif isinstance(value, (Operand, View, Buffer)):
                root = self.location(value, number).root
                if isinstance(root, Buffer):
                    self.uses.setdefault(root, []).append(number)


def _at(result: Any, text: str) -> Any:
    for index in re.findall(r"\[(\d+)\]", text):
        result = result[int(index)]
    return result


def _bytes_of(buffer: Buffer) -> int:
    return (math.prod(buffer.shape) * buffer.dtype.itemsize + _LINE - 1) // _LINE * _LINE


def _function(program: _Program, buffers: Sequence[Buffer], one_by_one: Run) -> Any:
    """The program as a function of its inputs that returns what is in ``buffers``. ``one_by_one``: the same, for tensors that share memory."""
    offsets, size = _arrange(program.uses, buffers)
    numbers: dict[int | Buffer, tuple[int, int]] = {root: (number, 0) for number, root in enumerate((*program.inputs, *buffers))}
    numbers |= {buffer: (len(numbers), offset) for buffer, offset in offsets.items()}
    values: dict[Any, int] = {}

    def value_of(value: Operand | View | Buffer, number: int) -> int:
        location = program.location(value, number)
        tensor, begin = numbers[location.root]
        return values.setdefault((tensor, begin + location.offset, value.dtype, value.shape, value.strides), len(values))

    calls = []
    for number, step in enumerate(program.steps):
        for function, arguments in step.kernels.calls if step.kernels is not None else ():
            places = {name: value_of(x, number) for name, x in arguments.items() if isinstance(x, (Operand, View, Buffer))}
            calls.append((function, {name: x for name, x in arguments.items() if name not in places}, places))
    scratch = [pattern((max(size, 1),), torch.uint8)] if offsets else []
    run_natively = native_program(len(program.inputs) + len(buffers) + len(scratch), list(values), calls)
    results, empty_like = [pattern(buffer.shape, buffer.dtype) for buffer in buffers], torch.empty_like

    def run(*inputs: Any) -> list[Any]:
        made = [empty_like(like) for like in results]
        return made if run_natively([*inputs, *made, *[empty_like(like) for like in scratch]]) else one_by_one(list(inputs))

    return run


def _arrange(uses: Mapping[Buffer, Sequence[int]], kept: Collection[Buffer]) -> tuple[dict[Buffer, int], int]:
    """Where in one piece of memory the buffers lie that are not ``kept`` as tensors, and its size. Two that are looked at in turn may share it."""
    offsets: dict[Buffer, int] = {}
    size = 0
    for buffer, numbers in uses.items():
        if buffer in kept:
            continue
        beside = [other for other in offsets if uses[other][-1] >= numbers[0]]
        begin = 0
        for other in sorted(beside, key=offsets.__getitem__):
            if begin + _bytes_of(buffer) <= offsets[other]:
                break
            begin = max(begin, offsets[other] + _bytes_of(other))
        offsets[buffer] = begin
        size = max(size, begin + _bytes_of(buffer))
    return offsets, size
