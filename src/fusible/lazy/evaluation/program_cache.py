"""The cache of compiled programs. Evaluations that differ in literals alone share one program from their second compilation on."""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from fusible.lazy.config import config
from fusible.lazy.dtypes import dtype
from fusible.lazy.engine import pjrt
from fusible.lazy.engine.engine import Program
from fusible.lazy.engine.host import Array, aligned
from fusible.lazy.evaluation.compiler import compile_trace
from fusible.lazy.flat_ir.literals import is_special, readable
from fusible.lazy.flat_ir.ops.constant import rounded
from fusible.lazy.trace import Literal, Trace
from fusible.locks import Lock

__all__ = ["CACHE", "ProgramCache", "Scalars"]

_NONE: Mapping[int, int] = MappingProxyType({})
_EFFORT = 3
"""The compiler's effort for an evaluation."""

Spelling = tuple[str | None, ...]
"""The spelling of each literal that a program was compiled with, and ``None`` for each that it reads from an input."""

Values = list[tuple[Array | float, dtype]]
"""The literals that a program reads: arrays of their dtypes, or numbers that are rounded when they are written to memory of the dtype."""


class Scalars:
    """Aligned memory from which a program reads literals.

    An evaluation takes it from ``pool``, fills it, and returns it when the program has run: a new buffer for each literal would cost 12 us. Buffers
    that do not share the memory of their array (those of int4, which is packed by two) are used once.
    """

    __slots__ = ("_pool", "arrays", "buffers")

    def __init__(self, values: Values, pool: list[Scalars]) -> None:
        self.arrays = [aligned(rounded(value, of)) for value, of in values]
        self.buffers = [pjrt.place(array, of) for array, (_, of) in zip(self.arrays, values, strict=True)]
        shared = all(pjrt.shares(array, of) for array, (_, of) in zip(self.arrays, values, strict=True))
        self._pool = pool if shared else None

    def release(self) -> None:
        if self._pool is not None:
            self._pool.append(self)


class _Entry:
    """A program, and memory for the literals that it reads."""

    __slots__ = ("pool", "program")

    def __init__(self, program: Program) -> None:
        self.program = program
        self.pool: list[Scalars] = []

    def filled(self, values: Values) -> Scalars:
        """Memory that holds ``values`` and belongs to one evaluation, also while other threads evaluate."""
        try:
            scalars = self.pool.pop()
        except IndexError:
            return Scalars(values, self.pool)
        for array, (value, _) in zip(scalars.arrays, values, strict=True):
            array[()] = value
        return scalars


class _Structure:
    """What is known of the programs that differ in literals alone: the ``first`` literals that came, and the positions of those ``differing``
    since."""

    __slots__ = ("differing", "first")

    def __init__(self) -> None:
        self.first: tuple[str, ...] | None = None
        self.differing: frozenset[int] = frozenset()

    def meet(self, spelled: tuple[str, ...]) -> bool:
        """Note the literals that differ from the first ones. Returns whether that adds positions to those known to differ."""
        if self.first is None:
            self.first = spelled
        differing = self.differing.union(i for i, (a, b) in enumerate(zip(self.first, spelled, strict=True)) if a != b)
        grown = differing != self.differing
        self.differing = differing
        return grown

    def fit(self, literals: Sequence[Literal]) -> tuple[Spelling, Values]:
        """The spelling of a program that reads every literal that has differed, and the values that it reads."""
        differing = self.differing
        if not differing:
            return _spell(literals), []
        spelling: list[str | None] = [None] * len(literals)
        values: Values = []
        for i, (value, of) in enumerate(literals):
            read = _readable(value, of) if i in differing else None
            if read is None:
                spelling[i] = repr(value)
            else:
                values.append((read, of))
        return tuple(spelling), values


def _readable(value: float, of: dtype) -> Array | float | None:
    """``value`` for a program to read; ``None`` where it is, once rounded, a float that compilers treat specially
    (``flat_ir.literals.is_special``)."""
    if _is_ordinary(value, of):
        return value
    array = rounded(value, of)
    return None if (of.is_floating or of.is_float8) and is_special(float(array), of) else array


@functools.cache
def _ordinary(of: dtype) -> tuple[float, float, float]:
    """``(low, high, eps)``: a float whose size is between low and high, and further than eps from 1, is not special when it is rounded.

    For numpy's own dtypes alone, whose assignment rounds once; of others no float qualifies.
    """
    if of.numpy.kind != "f" or of.numpy.isbuiltin != 1:
        return math.inf, 0.0, 0.0
    facts = np.finfo(of.numpy)
    return 2 * float(facts.smallest_normal), float(facts.max) / 2, float(facts.eps)


def _is_ordinary(value: float, of: dtype) -> bool:
    """Whether ``value`` is certainly not special. Nothing is rounded here, which would take 5 us."""
    if type(value) is int:
        return of.numpy.kind in "iu"
    low, high, eps = _ordinary(of)
    size = abs(value)
    return low <= size <= high and abs(size - 1.0) > eps


class ProgramCache:
    """Compiled programs by the structure of their trace and their literals, least recently used first; safe under threads.

    The first evaluation of a structure compiles its literals as constants, which fold. An evaluation with other literals compiles a program that
    reads the differing ones from inputs, where that gives the same bits (``flat_ir.literals``); later evaluations use that program. ``capacity`` is
    the largest number of programs, and of structures; ``compiled`` counts compilations.
    """

    def __init__(self, capacity: int = 1024) -> None:
        self.capacity = capacity
        self.compiled = 0
        self._lock = Lock()
        self._programs: OrderedDict[tuple[_Structure, Spelling], _Entry] = OrderedDict()
        self._structures: OrderedDict[object, _Structure] = OrderedDict()
        self._choices: OrderedDict[tuple[_Structure, Spelling], list[bool]] = OrderedDict()

    def get(self, trace: Trace, level: int = _EFFORT, aliases: Mapping[int, int] = _NONE) -> Program:
        """The program of ``trace`` whose literals are constants, compiled unless one of an equal key is there."""
        parts, literals = trace.parts()
        structure, spelled = self._structure((config.engine, level, parts, *aliases.items())), _spell(literals)
        return (self._find(structure, spelled) or self._compile(structure, spelled, trace, level, aliases)).program

    def evaluation(self, trace: Trace) -> tuple[Program, Scalars | None]:
        """The program that evaluates ``trace``, and the literals that it reads after the stored tensors. The caller releases them."""
        parts, literals = trace.parts()
        structure = self._structure((config.engine, _EFFORT, parts))
        spelling, values = structure.fit(literals)
        entry = self._find(structure, spelling)
        if entry is None and structure.meet(_spell(literals)):
            spelling, values = structure.fit(literals)
            entry = self._find(structure, spelling)
        if entry is None:
            chosen = self._choose(structure, spelling, trace)
            values = [value for value, fine in zip(values, chosen, strict=True) if fine]
            read = {i for i, fine in zip(_slots(spelling), chosen, strict=True) if fine}
            spelling = tuple([None if i in read else repr(value) for i, (value, _) in enumerate(literals)])
            entry = self._find(structure, spelling) or self._compile(structure, spelling, trace)
        return entry.program, entry.filled(values) if values else None

    def _choose(self, structure: _Structure, spelling: Spelling, trace: Trace) -> Sequence[bool]:
        """For each literal that ``spelling`` would read, whether it may be read. The answer is kept: an evaluation may ask for the same spelling
        again."""
        slots = _slots(spelling)
        if not slots:
            return ()
        key = structure, spelling
        with self._lock:
            found = self._choices.get(key)
        if found is None:
            flat = trace.to_flat_ir(slots)
            found = readable(flat, flat.inputs[len(flat.inputs) - len(slots) :])
            with self._lock:
                self._choices[key] = found
                while len(self._choices) > self.capacity:
                    self._choices.popitem(last=False)
        return found

    def _structure(self, key: object) -> _Structure:
        with self._lock:
            found = self._structures.get(key)
            if found is None:
                found = self._structures[key] = _Structure()
                if len(self._structures) > self.capacity:
                    self._structures.popitem(last=False)
            else:
                self._structures.move_to_end(key)
            return found

    def _find(self, structure: _Structure, spelling: Spelling) -> _Entry | None:
        key = structure, spelling
        with self._lock:
            found = self._programs.get(key)
            if found is not None:
                self._programs.move_to_end(key)
            return found

    def _compile(self, structure: _Structure, spelling: Spelling, trace: Trace, level: int = _EFFORT, aliases: Mapping[int, int] = _NONE) -> _Entry:
        entry = _Entry(compile_trace(trace, level, aliases, _slots(spelling)))
        with self._lock:
            self.compiled += 1
            self._programs[structure, spelling] = entry
            while len(self._programs) > self.capacity:
                self._programs.popitem(last=False)
        return entry

    def clear(self) -> None:
        with self._lock:
            self._programs.clear()
            self._structures.clear()
            self._choices.clear()

    def __len__(self) -> int:
        return len(self._programs)


def _slots(spelling: Spelling) -> list[int]:
    """The literals that are read."""
    return [i for i, literal in enumerate(spelling) if literal is None]


def _spell(literals: Sequence[Literal]) -> tuple[str, ...]:
    """Literals by their spelling: -0.0 is not 0.0, and NaN is itself."""
    return tuple([repr(value) for value, _ in literals])


CACHE = ProgramCache()
