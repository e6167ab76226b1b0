"""Nothing that no output needs."""

from __future__ import annotations

from fusible.lazy.flat_ir.flat_ir import FlatIR
from fusible.lazy.flat_ir.op import FlatIROp
from fusible.lazy.flat_ir.passes.rebuild import fresh, rebuild
from fusible.lazy.flat_ir.tensor import FlatIRTensor

__all__ = ["dead_code"]


def dead_code(flat: FlatIR) -> FlatIR:
    """Drop every operation whose outputs no other needs. Inputs stay: they are the program's signature."""
    needed = set(flat.outputs)
    kept: list[FlatIROp] = []
    for op in reversed(flat.ops):
        if needed.intersection(op.outputs):
            needed.update(op.inputs)
            kept.append(op)
    now: dict[FlatIRTensor, FlatIRTensor] = {t: fresh(t) for t in flat.inputs}
    ops: list[FlatIROp] = []
    for op in reversed(kept):
        made = rebuild(op, [now[t] for t in op.inputs])
        ops.append(made)
        now.update(zip(op.outputs, made.outputs, strict=True))
    return FlatIR([now[t] for t in flat.inputs], ops, [now[t] for t in flat.outputs])
