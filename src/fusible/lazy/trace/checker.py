"""Whether a trace is valid; run in tests, and after anything that rewrites one."""

from __future__ import annotations

from fusible.errors import CompileError, expected
from fusible.lazy.trace.tensor import TraceTensor
from fusible.lazy.trace.trace import Trace

__all__ = ["check_trace"]


def check_trace(trace: Trace) -> Trace:
    """``trace`` itself; raises ``CompileError`` with the offending operation.

    Rules: operands are made before their use; every tensor is given or made once, and has a name that no other has; the recorded types are those
    that the operation infers.
    """
    known: set[TraceTensor] = set(trace.inputs)
    if len(known) < len(trace.inputs):
        raise CompileError(expected("that an input is given once", of="a trace", got=str(trace), do="correct what recorded or rewrote it"))
    for op in trace.ops:
        wrong = None
        if any(t not in known for t in op.inputs):
            wrong = "an operand is made before its use"
        elif any(t in known for t in op.outputs):
            wrong = "a tensor is made once"
        elif [(t.shape, t.dtype) for t in op.outputs] != op.infer_all(*op.inputs):
            wrong = "an output has the type that its operation infers"
        if wrong:
            got = f"{op.describe([trace.names.get(t, '?') for t in op.inputs])}"
            raise CompileError(expected(f"that {wrong}", of="a trace", got=got, do="correct what recorded or rewrote it"))
        known.update(op.outputs)
    if any(t not in known for t in trace.outputs):
        raise CompileError(expected("that outputs are made", of="a trace", got=str(trace), do="correct what recorded or rewrote it"))
    if {*trace.names} != known or len({*trace.names.values()}) < len(known):
        wrong = "that every tensor has a name of its own"
        raise CompileError(expected(wrong, of="a trace", got=str(trace.names.values()), do="correct what recorded or rewrote it"))
    return trace
