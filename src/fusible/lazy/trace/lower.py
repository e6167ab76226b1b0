"""From trace to FlatIR: each operation's subgraph is built, then inlined with names and sources."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from fusible.errors import CompileError, expected
from fusible.lazy.dtypes import dtype
from fusible.lazy.flat_ir import FlatIR, FlatIROp, FlatIRTensor
from fusible.lazy.flat_ir.dynamic import make_dynamic
from fusible.lazy.trace.op import TraceOp

if TYPE_CHECKING:
    from fusible.lazy.trace.trace import Trace

__all__ = ["lower_trace"]


def lower_trace(trace: Trace, read: Collection[int] = ()) -> FlatIR:
    """The FlatIR of ``trace`` before any pass. Its inputs are the trace's arguments, then its stored tensors, then the literals that are ``read``."""
    tensors = {t: FlatIRTensor(t.shape, t.dtype, name=name, device=t.device, source=t.source) for t, name in trace.names.items()}
    stored = [op.outputs[0] for op in trace.storages]
    ops: list[FlatIROp] = []
    counter = [0]
    literals: list[FlatIRTensor] = []
    position = 0
    for op in trace.ops:
        if op.is_input:
            continue
        inputs, outputs = [tensors[t] for t in op.inputs], [tensors[t] for t in op.outputs]
        of = [of for _, of in op.parts()[1]] if op.has_literals and read else []
        own = {i: _literal(op, of[i], position + i) for i in range(len(of)) if position + i in read}
        position += len(of)
        if own:
            op.to_flat_ir_reading(inputs, outputs, own)
        else:
            op.to_flat_ir(inputs, outputs)
        literals += own.values()
        _inline(op, [*inputs, *own.values()], outputs, ops, counter)
    flat = FlatIR([*[tensors[t] for t in [*trace.inputs, *stored]], *literals], ops, [tensors[t] for t in trace.outputs])
    return make_dynamic(flat, {size: tensors[t] for size, t in trace.sizes.items()}, counter)


def _literal(op: TraceOp, of: dtype, position: int) -> FlatIRTensor:
    """The input that stands for a literal of ``op``, the program's at ``position``."""
    reason = "hold a literal, which differs from call to call"
    return FlatIRTensor((), of, name=f"literal{position}", source=op.outputs[0].source, reason=reason)


def _inline(op: TraceOp, inputs: list[FlatIRTensor], outputs: list[FlatIRTensor], ops: list[FlatIROp], counter: list[int]) -> None:
    """Append the operations between ``inputs`` and ``outputs``, operands first, and name the tensors that lowering introduced."""
    boundary = {id(t) for t in inputs}
    label, origin = type(op).__name__.lower(), len(ops)
    # Depth first with a stack of its own: recursion would limit the depth of a subgraph. A tensor is pushed again, ready, beneath its operands.
    done: set[int] = set()
    stack: list[tuple[FlatIRTensor, bool]] = [(t, False) for t in reversed(outputs)]
    while stack:
        tensor, ready = stack.pop()
        if id(tensor) in boundary:
            continue
        producer = tensor.producer
        if producer is None:
            of, got, do = f"to_flat_ir of {type(op).__name__}", f"none that has {tensor}", "construct one with it among its outputs"
            raise CompileError(expected("operations that give each output", of=of, got=got, do=do))
        if id(producer) in done:
            continue
        if not ready:
            stack.append((tensor, True))
            stack.extend((t, False) for t in reversed(producer.inputs))
            continue
        done.add(id(producer))
        producer.label = label
        producer.origin = origin
        for out in producer.outputs:
            if not out.name:
                counter[0] += 1
                out.name = f"t_inter{counter[0]}"
                out.source = outputs[0].source
        ops.append(producer)
