"""Whether a FlatIR is valid; run between passes in tests."""

from __future__ import annotations

from fusible.errors import CompileError, expected
from fusible.lazy.flat_ir.flat_ir import FlatIR
from fusible.lazy.flat_ir.tensor import FlatIRTensor

__all__ = ["check_flat_ir"]


def check_flat_ir(flat: FlatIR) -> FlatIR:
    """``flat`` itself; raises ``CompileError`` with the lines around the first operation that breaks a rule.

    Rules: every operand is an input or made before; a tensor is made once, by its producer; names are unique; lowering's own tensors say why
    they exist; types obey the operation's own ``check``; outputs are made.
    """
    known: set[FlatIRTensor] = set(flat.inputs)
    names = {t.name for t in flat.inputs}
    for index, op in enumerate(flat.ops):
        wrong = op.check()
        if any(t not in known for t in op.inputs):
            wrong = "an operand is made before its use"
        for out in op.outputs:
            if out in known or out.name in names or not out.name:
                wrong = "a tensor is made once, under a name of its own"
            elif out.producer is not op:
                wrong = "an output is bound to its producer"
            elif out.name.startswith("t_inter") and not out.reason_details:
                wrong = "a tensor that lowering introduced says why"
            known.add(out)
            names.add(out.name)
        if wrong:
            raise CompileError(expected(f"that {wrong}", of="FlatIR", got=_around(flat, index), do="correct the lowering or the pass that made it"))
    if any(t not in known for t in flat.outputs):
        raise CompileError(expected("that outputs are made", of="FlatIR", got=str(flat), do="correct the lowering or the pass that made it"))
    return flat


def _around(flat: FlatIR, index: int) -> str:
    lines = [f"{'-> ' if i == index else '   '}{op}" for i, op in enumerate(flat.ops)]
    return "\n" + "\n".join(lines[max(0, index - 2) : index + 3]) + "\n"
