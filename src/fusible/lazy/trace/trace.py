"""The trace: operations collected backwards from outputs, in a deterministic order, with deterministic names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from fusible.lazy.dims import Symbol, symbols
from fusible.lazy.flat_ir.lower import lower_trace
from fusible.lazy.printing import print_type
from fusible.lazy.trace.op import TraceOp
from fusible.lazy.trace.ops.storage import DimensionInput, Input, Storage
from fusible.lazy.trace.tensor import TraceTensor

if TYPE_CHECKING:
    from fusible.lazy.flat_ir.flat_ir import FlatIR

__all__ = ["Trace"]


class Trace:
    """The operations that ``outputs`` depend on.

    ``Trace(outputs)`` takes lazy tensors (or their trace tensors); ``inputs`` are the arguments of a function being compiled, in order.
    ``str(trace)`` is its printed form, in which tensors are named ``t0``, ``t1``, ... in the order of computation, so two
    programs that record the same operations print alike. ``storages`` are the stored tensors that it reads: inputs of the program,
    never part of it; ``sizes`` the arguments that are sizes.
    """

    def __init__(self, outputs: Iterable[Any], inputs: Sequence[Any] = ()) -> None:
        self.outputs: list[TraceTensor] = [getattr(t, "trace_tensor", t) for t in outputs]
        self.inputs: list[TraceTensor] = [getattr(t, "trace_tensor", t) for t in inputs]
        self.ops: list[TraceOp] = _collect(self.outputs)
        given = [t.producer for t in self.inputs]
        computed = [op for op in self.ops if not isinstance(op, Input)]
        strangers = [op for op in self.ops if isinstance(op, Input) and op not in given]
        self.ops = [*strangers, *computed]
        self.tracers: list[TraceTensor] = [op.outputs[0] for op in strangers]
        self.storages: list[Storage] = [op for op in computed if isinstance(op, Storage)]
        self.sizes: dict[Symbol, TraceTensor] = {
            size: t for t in self.inputs if isinstance(t.producer, DimensionInput) for size in symbols(t.producer.expression)
        }
        self.names: dict[TraceTensor, str] = {}
        for tensor in [*self.inputs, *(out for op in self.ops for out in op.outputs)]:
            self.names[tensor] = f"t{len(self.names)}"

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
        """What the program is, apart from names, sources and stored values: equal keys are one compiled program."""
        number: dict[TraceTensor, int] = {}
        for tensor in self.inputs:
            number[tensor] = len(number)
        parts: list[object] = [len(number), *[(t.shape, t.dtype) for t in self.inputs]]
        for op in self.ops:
            parts.append((op.__class__, op.key(), *[number[t] for t in op.inputs]))
            for out in op.outputs:
                number[out] = len(number)
        parts.append(tuple([number[t] for t in self.outputs]))
        return tuple(parts)

    def to_flat_ir(self) -> FlatIR:
        """The FlatIR of this trace, before any pass."""
        return lower_trace(self)


def _collect(outputs: Sequence[TraceTensor]) -> list[TraceOp]:
    """Every operation behind ``outputs``, operands first, first operand first; iterative, so depth does not matter."""
    done: set[int] = set()
    ops: list[TraceOp] = []
    stack: list[tuple[TraceOp, bool]] = [(t.producer, False) for t in reversed(outputs)]
    while stack:
        op, ready = stack.pop()
        if id(op) in done:
            continue
        if ready or not op.inputs:
            done.add(id(op))
            ops.append(op)
            continue
        stack.append((op, True))
        stack.extend((t.producer, False) for t in reversed(op.inputs) if id(t.producer) not in done)
    return ops
