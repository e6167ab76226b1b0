"""How a pass builds a new program from an old one, which it does not change."""

from __future__ import annotations

from collections.abc import Sequence

from fusible.lazy.flat_ir.flat_ir import Change, FlatIR
from fusible.lazy.flat_ir.op import FlatIROp
from fusible.lazy.flat_ir.tensor import FlatIRTensor

__all__ = ["Rewrite", "fresh", "rebuild"]


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


class Rewrite:
    """A new program in the making, operation by operation. What does not change is shared with the old one; the rest is copied.

    Inputs stay: they are the program's signature.
    """

    def __init__(self, flat: FlatIR) -> None:
        self._flat = flat
        self._now: dict[FlatIRTensor, FlatIRTensor] = {}
        self.ops: list[FlatIROp] = []
        self.changes: list[Change] = []

    def now(self, tensor: FlatIRTensor) -> FlatIRTensor:
        """The tensor of the new program that replaces ``tensor`` of the old one."""
        return self._now.get(tensor, tensor)

    def operands(self, op: FlatIROp) -> list[FlatIRTensor]:
        """The operands of an old operation in the new program."""
        now = self._now
        return [now.get(t, t) for t in op.inputs] if now else op.inputs

    def keep(self, op: FlatIROp, operands: list[FlatIRTensor]) -> FlatIROp:
        """Append ``op`` on ``operands``: ``op`` itself where these are its own, else a copy."""
        if operands == op.inputs:
            self.ops.append(op)
            return op
        made = rebuild(op, operands)
        self.ops.append(made)
        self._now.update(zip(op.outputs, made.outputs, strict=True))
        return made

    def replace(self, old: Sequence[FlatIRTensor], new: Sequence[FlatIRTensor], change: Change) -> None:
        """Replace ``old`` tensors by ``new`` ones, which the new program computes."""
        self._now.update(zip(old, new, strict=True))
        self.changes.append(change)

    def done(self) -> FlatIR:
        return FlatIR(self._flat.inputs, self.ops, [self._now.get(t, t) for t in self._flat.outputs], changes=self.changes)
