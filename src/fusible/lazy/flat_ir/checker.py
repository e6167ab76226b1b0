"""Whether a FlatIR is valid; run between passes in tests."""

from __future__ import annotations

from fusible.errors import CompileError, expected
from fusible.lazy.flat_ir.flat_ir import FlatIR
from fusible.lazy.flat_ir.ops.call import Function
from fusible.lazy.flat_ir.tensor import FlatIRTensor

__all__ = ["check_flat_ir"]


def check_flat_ir(flat: FlatIR) -> FlatIR:
    """``flat`` itself; raises ``CompileError`` with the lines around the first operation that breaks a rule.

    Rules, of the program and of each of its functions: every operand is an input or made before; a tensor is given or made once, by its producer,
    under a name that no other has; lowering's own tensors say why they exist; types obey the operation's own ``check``; outputs are made. No two
    functions have one name.
    """
    functions = flat.functions
    if len({function.name for function in functions}) < len(functions):
        raise _wrong("that functions have names of their own", ", ".join(function.name for function in functions))
    for part in (*functions, flat):
        _check_part(part)
    return flat


def _check_part(part: FlatIR | Function) -> None:
    known: set[FlatIRTensor] = set(part.inputs)
    names = {t.name for t in part.inputs}
    if len(known) < len(part.inputs) or len(names) < len(part.inputs) or "" in names:
        raise _wrong("that an input is given once, under a name of its own", f"inputs {', '.join(map(str, part.inputs))}")
    for index, op in enumerate(part.ops):
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
            raise _wrong(f"that {wrong}", _context(part, index))
    if any(t not in known for t in part.outputs):
        raise _wrong("that outputs are made", str(part))


def _wrong(what: str, got: str) -> CompileError:
    return CompileError(expected(what, of="FlatIR", got=got, do="correct the lowering or the pass that made it"))


def _context(flat: FlatIR | Function, index: int) -> str:
    lines = [f"{'-> ' if i == index else '   '}{op}" for i, op in enumerate(flat.ops)]
    return "\n" + "\n".join(lines[max(0, index - 2) : index + 3]) + "\n"
