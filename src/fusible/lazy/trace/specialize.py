"""Replacing the symbolic sizes of a trace by numbers."""

from __future__ import annotations

from collections.abc import Mapping

from fusible.lazy.dims import Symbol, concrete
from fusible.lazy.operation import attribute_names
from fusible.lazy.trace.op import TraceOp
from fusible.lazy.trace.storage import Input, Storage
from fusible.lazy.trace.tensor import TraceTensor
from fusible.lazy.trace.trace import Trace

__all__ = ["specialize"]


def specialize(trace: Trace, values: Mapping[Symbol, int]) -> Trace:
    """``trace`` with every size in its shapes and attributes replaced by its number. It lowers as if it had been recorded so."""
    now: dict[TraceTensor, TraceTensor] = {}
    for t in trace.inputs:
        if isinstance(t.producer, Input):
            _copy(t.producer, values, now)
        else:  # any other tensor that is an argument: its producer is not part of the program
            now[t] = t
    for op in trace.ops:
        if not all(out in now for out in op.outputs):
            _copy(op, values, now)
    return Trace([now[t] for t in trace.outputs], [now[t] for t in trace.inputs])


def _copy(op: TraceOp, values: Mapping[Symbol, int], now: dict[TraceTensor, TraceTensor]) -> None:
    """Add the outputs of ``op`` to ``now``; stored tensors stay themselves."""
    if isinstance(op, Storage):
        now[op.outputs[0]] = op.outputs[0]
        return
    made = object.__new__(type(op))
    made.__dict__.update(op.__dict__)
    for name in attribute_names(type(op)):
        setattr(made, name, concrete(getattr(op, name), values))
    outputs = []
    for t in op.outputs:
        now[t] = out = TraceTensor(concrete(t.shape, values), t.dtype, t.device, made, t.source)
        out.name = t.name
        outputs.append(out)
    made.bind(tuple([now[t] for t in op.inputs]), tuple(outputs))
