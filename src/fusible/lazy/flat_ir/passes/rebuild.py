"""Copying operations with other operands, as passes do instead of writing to the program that they were given."""

from __future__ import annotations

from fusible.lazy.flat_ir.op import FlatIROp
from fusible.lazy.flat_ir.tensor import FlatIRTensor

__all__ = ["fresh", "rebuild"]


def fresh(tensor: FlatIRTensor) -> FlatIRTensor:
    """An unbound copy of a tensor."""
    return FlatIRTensor(tensor.shape, tensor.dtype, name=tensor.name, device=tensor.device, source=tensor.source, reason=tensor.reason_details)


def rebuild(op: FlatIROp, inputs: list[FlatIRTensor]) -> FlatIROp:
    """``op`` on other operands, bound to fresh outputs."""
    made = object.__new__(type(op))
    made.__dict__.update(op.__dict__)
    made.inputs = inputs
    made.outputs = [fresh(t) for t in op.outputs]
    for out in made.outputs:
        out.producer = made
    return made
