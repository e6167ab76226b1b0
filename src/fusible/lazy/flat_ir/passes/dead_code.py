"""Dropping operations that no output needs."""

from __future__ import annotations

from fusible.lazy.flat_ir.flat_ir import Change, FlatIR
from fusible.lazy.flat_ir.op import FlatIROp

__all__ = ["dead_code"]


def dead_code(flat: FlatIR) -> FlatIR:
    """Drop every pure operation whose outputs no other needs. Inputs stay: they are the program's signature."""
    needed = set(flat.outputs)
    kept: list[FlatIROp] = []
    changes: list[Change] = []
    for op in reversed(flat.ops):
        if op.is_pure and needed.isdisjoint(op.outputs):
            changes.append(Change("dropped", tuple([t.name for t in op.outputs])))
        else:
            needed.update(op.inputs)
            kept.append(op)
    return FlatIR(flat.inputs, kept[::-1], flat.outputs, changes=changes[::-1])
