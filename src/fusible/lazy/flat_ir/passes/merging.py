"""Merging operations, or constants alone, that are equal."""

from __future__ import annotations

from fusible.lazy.flat_ir.flat_ir import Change, FlatIR
from fusible.lazy.flat_ir.op import FlatIROp
from fusible.lazy.flat_ir.ops import ConstantOp
from fusible.lazy.flat_ir.passes.rewrite import Rewrite

__all__ = ["common_subexpression", "constant_deduplication"]


def common_subexpression(flat: FlatIR) -> FlatIR:
    """Keep the first of all operations of one class with equal attributes, the same operands and the same output types (constants included)."""
    return _merge_equal(flat)


def constant_deduplication(flat: FlatIR) -> FlatIR:
    """Keep the first of all constants of one type that are equal bit for bit (-0.0 is not 0.0; a NaN is itself)."""
    return _merge_equal(flat, only=ConstantOp)


def _merge_equal(flat: FlatIR, only: type[FlatIROp] = FlatIROp) -> FlatIR:
    """Keep the first of all pure operations of class ``only`` with equal keys, the same operands and the same output types."""
    rewrite = Rewrite(flat)
    seen: dict[tuple[object, ...], FlatIROp] = {}
    for op in flat.ops:
        operands = rewrite.operands(op)
        if not op.is_pure or not isinstance(op, only):
            rewrite.keep(op, operands)
            continue
        key = (op.__class__, op.key(), *operands, *[(t.shape, t.dtype) for t in op.outputs])
        kept = seen.get(key)
        if kept is None:
            seen[key] = rewrite.keep(op, operands)
        else:
            names = [tuple([t.name for t in tensors]) for tensors in (op.outputs, kept.outputs)]
            rewrite.replace(op.outputs, kept.outputs, Change("merged into", *names))
    return rewrite.done()
