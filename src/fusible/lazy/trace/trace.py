"""The trace: operations collected backwards from outputs, in a deterministic order, with deterministic names."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from typing import Any

from fusible.errors import ArgumentError, expected
from fusible.lazy.checks import run_checks
from fusible.lazy.dims import Symbol, symbols
from fusible.lazy.flat_ir import FlatIR
from fusible.lazy.printing import print_type
from fusible.lazy.trace.lower import lower_trace
from fusible.lazy.trace.op import Literal, TraceOp
from fusible.lazy.trace.storage import DimensionInput, Input, Storage
from fusible.lazy.trace.tensor import TraceTensor

__all__ = ["Trace"]

_STRANGE = re.compile(r"[^\w.]+")
"""Characters that the name of a tensor may have, and a name in a printed program may not."""

_RESERVED = re.compile(r"(t|t_inter|literal)\d+")
"""The names that tensors without one get."""


class Trace:
    """The operations that ``outputs`` depend on, as a function of ``inputs``.

    ``Trace(outputs)`` takes lazy tensors (or their trace tensors); ``inputs`` are its arguments, in order. Any tensor may be one: what it holds, or
    how it is computed, is then no part of the program, which reads the argument instead. Raises ``ArgumentError`` for a tensor that is given twice.

    ``str(trace)`` is its printed form, in which tensors that have no name are ``t0``, ``t1``, ... in the order of computation, so two
    programs that record the same operations on tensors of the same names print alike. ``storages`` are the stored tensors that it reads:
    inputs of the program, never part of it; ``sizes`` the arguments that are sizes.
    """

    def __init__(self, outputs: Iterable[Any], inputs: Sequence[Any] = ()) -> None:
        self.outputs = _traced(outputs, "output")
        self.inputs = _traced(inputs, "input")
        leaves = set(self.inputs)
        if len(leaves) < len(self.inputs):
            twice = next(t for t in self.inputs if self.inputs.count(t) > 1)
            raise ArgumentError(expected("each tensor once", of="the inputs of a trace", got=f"{twice} twice", do="pass it once, or a copy of it"))
        ops = _collect(self.outputs, leaves)
        read = [op for op in ops if op.is_input]
        self.storages: list[Storage] = [op for op in read if isinstance(op, Storage)]
        strangers = [op for op in read if isinstance(op, Input)]
        self.ops: list[TraceOp] = [*strangers, *(op for op in ops if not isinstance(op, Input))] if strangers else ops
        self.tracers: list[TraceTensor] = [op.outputs[0] for op in strangers]
        self.sizes: dict[Symbol, TraceTensor] = {
            size: t for t in self.inputs if isinstance(t.producer, DimensionInput) for size in symbols(t.producer.expression)
        }

    @cached_property
    def names(self) -> dict[TraceTensor, str]:
        """By tensor its name in printed programs: the one that it was given, in characters of names, or ``t`` with its number."""
        tensors = dict.fromkeys([*self.inputs, *(out for op in self.ops for out in op.outputs)])
        asked = {t: _STRANGE.sub(".", t.name).strip(".") for t in tensors if t.name}
        names = {t: asked.get(t) or f"t{i}" for i, t in enumerate(tensors)}
        taken = {name for t, name in names.items() if not asked.get(t)}
        for i, t in enumerate(tensors):
            if asked.get(t):
                while names[t] in taken or _RESERVED.fullmatch(names[t]):
                    names[t] += f"_{i}"
                taken.add(names[t])
        return names

    def __str__(self) -> str:
        lines = ["==== Trace IR ===="]
        if self.inputs:
            lines += ["inputs:", *map(self._typed, self.inputs)]
        for op in self.ops:
            left = ", ".join(self.names[out] for out in op.outputs)
            lines.append(f"{left} = {op.describe([self.names[t] for t in op.inputs])}")
        return "\n".join([*lines, "outputs:", *map(self._typed, self.outputs)])

    def _typed(self, tensor: TraceTensor) -> str:
        return f"    {self.names[tensor]}: {print_type(tensor.shape, tensor.dtype, tensor.device)}"

    def key(self) -> tuple[object, ...]:
        """The program without its names, sources and stored values. Traces with equal keys share one compiled program."""
        structure, literals = self.parts()
        return (*structure, *[(repr(value), of) for value, of in literals])

    def parts(self) -> tuple[tuple[object, ...], list[Literal]]:
        """``key`` in two parts: the program without its literals, and the literals, which it may read from inputs instead."""
        literals: list[Literal] = []
        number: dict[TraceTensor, int] = {}
        for tensor in self.inputs:
            number[tensor] = len(number)
        parts: list[object] = [len(number), *[(t.shape, t.dtype) for t in self.inputs]]
        for op in self.ops:
            key: object
            if op.has_literals:
                key, own = op.parts()
                literals += own
            else:
                key = op.key()
            parts.append((op.__class__, key, *[number[t] for t in op.inputs]))
            for out in op.outputs:
                number[out] = len(number)
        parts.append(tuple([number[t] for t in self.outputs]))
        return tuple(parts), literals

    def to_flat_ir(self, read: Collection[int] = ()) -> FlatIR:
        """The FlatIR of this trace, before any pass. Its last inputs are the literals, by their position in ``parts``, that are ``read``."""
        run_checks(self)
        return lower_trace(self, read)


def _traced(tensors: Iterable[Any], what: str) -> list[TraceTensor]:
    """The trace tensors of lazy tensors. Evaluations pass a tuple, for which the check of ``Iterable``, which takes 1 us, is left out."""
    if type(tensors) is not tuple and (not isinstance(tensors, Iterable) or isinstance(tensors, str)):
        got = type(tensors).__qualname__
        raise ArgumentError(expected("a list of lazy tensors", of=f"{what}s of Trace", got=got, do="pass one"))
    found = [t if type(t) is TraceTensor else getattr(t, "trace_tensor", t) for t in tensors]
    for t in found:
        if type(t) is not TraceTensor:
            raise ArgumentError(expected("a lazy tensor", of=f"an {what} of a trace", got=repr(t), do="pass lazy.Tensor"))
    return found


def _collect(outputs: Sequence[TraceTensor], leaves: set[TraceTensor]) -> list[TraceOp]:
    """Every operation between ``leaves`` and ``outputs``, operands first, first operand first; iterative, so depth does not matter.

    The producer of a tensor is read once only: an evaluation in another thread may replace it by a ``Storage`` at any time.
    """
    made = set(leaves)
    ops: list[TraceOp] = []
    stack: list[tuple[TraceTensor, TraceOp | None]] = [(t, None) for t in reversed(outputs)]
    while stack:
        tensor, op = stack.pop()
        if tensor in made:
            continue
        if op is None:
            op = tensor.producer
            if op.inputs:
                stack.append((tensor, op))
                stack.extend((t, None) for t in reversed(op.inputs) if t not in made)
                continue
        ops.append(op if made.isdisjoint(op.outputs) else _beside(op, made))
        made.update(op.outputs)
    return ops


def _beside(op: TraceOp, made: set[TraceTensor]) -> TraceOp:
    """A copy of ``op`` for a trace that has some of its outputs already, for instance as arguments.

    The copy makes new tensors in place of those, and nothing reads them: every tensor of the trace is made once.
    """
    copy = object.__new__(type(op))
    copy.__dict__.update(op.__dict__)
    copy.bind(op.inputs, tuple([TraceTensor(t.shape, t.dtype, t.device, copy, t.source) if t in made else t for t in op.outputs]))
    return copy
