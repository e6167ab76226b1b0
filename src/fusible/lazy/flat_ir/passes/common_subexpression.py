"""One operation where several compute the same (constants included)."""

from __future__ import annotations

from fusible.lazy.flat_ir.flat_ir import FlatIR
from fusible.lazy.flat_ir.op import FlatIROp
from fusible.lazy.flat_ir.passes.rebuild import fresh, rebuild
from fusible.lazy.flat_ir.tensor import FlatIRTensor

__all__ = ["common_subexpression"]


def common_subexpression(flat: FlatIR) -> FlatIR:
    """Keep the first of all operations with one type, one set of attributes, the same operands and the same output types."""
    now: dict[FlatIRTensor, FlatIRTensor] = {t: fresh(t) for t in flat.inputs}
    seen: dict[tuple[object, ...], FlatIROp] = {}
    ops: list[FlatIROp] = []
    for op in flat.ops:
        operands = [now[t] for t in op.inputs]
        key = (type(op), *op.attributes(), *map(id, operands), *((t.shape, t.dtype) for t in op.outputs))
        kept = seen.get(key)
        if kept is None:
            kept = seen[key] = rebuild(op, operands)
            ops.append(kept)
        now.update(zip(op.outputs, kept.outputs, strict=True))
    return FlatIR([now[t] for t in flat.inputs], ops, [now[t] for t in flat.outputs])
