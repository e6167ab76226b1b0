"""Buckets: one program for all sizes of a dynamic dimension up to a declared one."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fusible.errors import ArgumentError, CompileError, DTypeError, expected
from fusible.lazy.assumptions import Condition
from fusible.lazy.compilation.masking import masked
from fusible.lazy.compilation.source import TraceSource
from fusible.lazy.dims import Symbol, concrete, size_of, symbols
from fusible.lazy.dtypes import dtype
from fusible.lazy.engine import pjrt
from fusible.lazy.engine.engine import Array, Program, Types
from fusible.lazy.engine.host import aligned
from fusible.lazy.flat_ir import FlatIR
from fusible.lazy.printing import Shape
from fusible.lazy.stablehlo.module import StableHLO
from fusible.lazy.trace import Trace

__all__ = ["BucketSource", "Buckets", "check_conditions", "checked_buckets", "rounded"]

Buckets = Mapping[Symbol, tuple[int, ...]]
"""For each dynamic size the sizes that programs are compiled for, ascending up to its maximum."""

_CAPACITY = 64
"""How many programs of one executable are kept: one for each set of buckets (and of the sizes that have none)."""


_TRIED = 10_000
"""The largest number of sets of sizes that a condition is checked for by trying each."""


def checked_buckets(buckets: Any, known: Sequence[Symbol], donating: bool) -> Buckets:
    """``buckets`` of ``compile`` by symbol; raises ``ArgumentError`` or ``DTypeError`` for an unknown dimension, illegal sizes, or with donation."""
    of = "buckets of compile"
    if not isinstance(buckets, Mapping):
        raise DTypeError(expected("a mapping of names of dimensions to sizes", of=of, got=repr(buckets), do='pass for instance {"length": (16, 64)}'))
    by_name = {found.name: found for found in known}
    made: dict[Symbol, tuple[int, ...]] = {}
    for name, sizes in buckets.items():
        if name not in by_name:
            wanted = f"a dynamic dimension, of {', '.join(sorted(by_name)) or 'which there is none'}"
            raise ArgumentError(expected(wanted, of=of, got=repr(name), do="name a NamedDimension, or argument.dimension"))
        if not isinstance(sizes, Sequence) or isinstance(sizes, str) or not all(type(size_of(n)) is int for n in sizes):
            raise DTypeError(expected("a sequence of ints", of=f"{of} for {name!r}", got=repr(sizes), do="pass for instance (16, 64)"))
        low, high = by_name[name].min, by_name[name].max
        chosen = tuple([int(n) for n in sizes])
        if not chosen or list(chosen) != sorted(set(chosen)) or chosen[0] < low or chosen[-1] != high:
            wanted = f"ascending sizes from {low} or more to {high}, its bounds"
            raise ArgumentError(expected(wanted, of=f"{of} for {name!r}", got=chosen, do=f"end with {high}, and leave out what is beyond"))
        made[by_name[name]] = chosen
    if made and donating:
        raise ArgumentError(expected("no donated inputs", of=of, got="some", do="leave out either: results in buckets have memory of their own"))
    return made


def check_conditions(conditions: Sequence[Condition], buckets: Buckets) -> None:
    """Raise ``CompileError`` where a condition holds for true sizes and may not hold for their buckets: of two equal sizes one has no buckets."""
    for condition in conditions:
        found = sorted(symbols((condition.left, condition.right)), key=str)
        if buckets.keys().isdisjoint(found) or _keeps(condition, found, buckets):
            continue
        names = " and ".join(repr(s.name) for s in found)
        wanted = f"buckets in which {condition.left} {condition.relation} {condition.right}, as true sizes need"
        do = "give sizes that agree one name, or the same buckets"
        raise CompileError(expected(wanted, of=f"{condition.what} at {condition.where}", got=f"other ones for {names}", do=do))


def _keeps(condition: Condition, found: Sequence[Symbol], buckets: Buckets) -> bool:
    """Whether buckets fulfil a condition wherever the true sizes do: two equal sizes with the same buckets do; for others all sizes are tried."""
    if len(found) == 2 and {str(condition.left), str(condition.right)} == {s.name for s in found}:
        first, second = found
        if condition.relation == "==" and buckets.get(first) == buckets.get(second):
            return True
    spans = [range(s.min, s.max + 1) for s in found]
    return math.prod(map(len, spans)) <= _TRIED and all(
        condition.holds(rounded(values, buckets))
        for values in (dict(zip(found, sizes, strict=True)) for sizes in itertools.product(*spans))
        if condition.holds(values)
    )


def rounded(values: Mapping[Symbol, int], buckets: Buckets) -> dict[Symbol, int]:
    """``values`` with the smallest bucket that holds each."""
    return {s: next(b for b in buckets[s] if b >= n) if s in buckets else n for s, n in values.items()}


class BucketSource:
    """The programs of a recorded function on padded tensors. A program for true sizes pads its inputs to their buckets, and cuts the results.

    ``trace`` is the recorded program; ``flat_ir`` and later forms include what padding adds.
    """

    def __init__(self, trace: Trace, level: int, buckets: Buckets) -> None:
        self.trace = trace
        self.level = level
        self.buckets = buckets
        self._inner = TraceSource(masked(trace, list(buckets)), level, {})
        self.storages = self._inner.storages
        self._compiled = functools.lru_cache(_CAPACITY)(lambda sizes: self._inner.program(dict(sizes)))

    def program(self, values: Mapping[Symbol, int]) -> Program:
        program = self._compiled(tuple(rounded(values, self.buckets).items()))
        inputs, outputs = ([(concrete(t.shape, values), t.dtype) for t in tensors] for tensors in (self.trace.inputs, self.trace.outputs))
        return _Padding(program, inputs, outputs, [values[s] for s in self.buckets])

    def optimized(self, values: Mapping[Symbol, int]) -> FlatIR:
        return self._inner.optimized(rounded(values, self.buckets))

    @property
    def flat_ir(self) -> FlatIR:
        return self._inner.flat_ir

    @property
    def stablehlo(self) -> StableHLO:
        return self._inner.stablehlo

    def module(self) -> StableHLO:
        raise ArgumentError(expected("an executable without buckets", of="Executable.save", got="one with some", do="compile without them to save"))


class _Padding(pjrt.BufferProgram):
    """A program for inputs of the true sizes, made of ``program``, which reads padded inputs, the true sizes and constants."""

    def __init__(self, program: Program, inputs: Types, outputs: Types, true: Sequence[int]) -> None:
        self._program = program
        self._true = [pjrt.place(aligned(np.array(n, np.int32)), of) for n, (_, of) in zip(true, program.inputs[len(inputs) :], strict=False)]
        self.inputs = (*inputs, *program.inputs[len(inputs) + len(true) :])
        self.outputs = tuple(outputs)
        self._count = len(inputs)

    def execute(self, buffers: Sequence[Any]) -> list[Any]:
        """Pad, run, and cut. Padding and cutting copy."""
        inputs = list(buffers)
        for i, ((shape, of), (wide, _)) in enumerate(zip(self.inputs[: self._count], self._program.inputs, strict=False)):
            if shape != wide:
                array = _beyond(wide, of)
                array[_part(shape)] = pjrt.host_view(inputs[i], shape, of)
                inputs[i] = pjrt.place(aligned(array), of)
        results = self._program.execute([*inputs[: self._count], *self._true, *inputs[self._count :]])
        for i, ((shape, of), (wide, _)) in enumerate(zip(self.outputs, self._program.outputs, strict=True)):
            if shape != wide:
                results[i] = pjrt.place(aligned(np.ascontiguousarray(pjrt.host_view(results[i], wide, of)[_part(shape)])), of)
        return results

    def serialize(self) -> bytes:
        raise ArgumentError(expected("a program without buckets", of="serialize", got="one with some", do="compile without them"))


def _beyond(shape: Shape, of: dtype) -> Array:
    """What inputs are padded with. Any elements would do: the tests pad with NaN."""
    return np.zeros(shape, of.numpy)


def _part(shape: Shape) -> tuple[slice, ...]:
    return tuple([slice(n) for n in shape])
