"""Building the module of a FlatIR, and its printed form."""

from __future__ import annotations

import io
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fusible.errors import CompileError, expected
from fusible.lazy.flat_ir.op import FlatIROp
from fusible.lazy.source import describe
from fusible.lazy.stablehlo import mlir as bindings

if TYPE_CHECKING:
    from fusible.lazy.flat_ir.flat_ir import FlatIR

__all__ = ["StableHLO", "build_module"]


class StableHLO:
    """A StableHLO module with one function ``main``. ``str`` is its numbered printed form, ``text`` and ``bytecode`` the MLIR."""

    def __init__(self, module: Any) -> None:
        self.module = module

    @cached_property
    def bytecode(self) -> bytes:
        """MLIR bytecode: what is compiled, apart from the context that all threads build in."""
        stream = io.BytesIO()
        with bindings.LOCK:
            self.module.operation.write_bytecode(stream)
        return stream.getvalue()

    @cached_property
    def text(self) -> str:
        with bindings.LOCK:
            return str(self.module)

    def __str__(self) -> str:
        lines = self.text.split("\n")
        return "\n".join(["==== StableHLO IR ====", *(f"{i}: {line}".rstrip() for i, line in enumerate(lines, 1))])


def build_module(flat: FlatIR) -> StableHLO:
    """The verified module of ``flat``. Every operation's location carries its tensors' names and the user's line."""
    with bindings.LOCK:
        mlir = bindings.get()
        ir = mlir.ir
        with mlir.context, ir.Location.unknown():
            module = ir.Module.create()
            with ir.InsertionPoint(module.body):
                main = mlir.func.FuncOp("main", ([mlir.type(t) for t in flat.inputs], [mlir.type(t) for t in flat.outputs]))
                block = main.add_entry_block()
                values = dict(zip(flat.inputs, block.arguments, strict=True))
                with ir.InsertionPoint(block):
                    for op in flat.ops:
                        values[op.outputs[0]] = _build(mlir, op, [values[t] for t in op.inputs])
                    mlir.func.ReturnOp([values[t] for t in flat.outputs])
            _verify(mlir, module, flat)
            return StableHLO(module)


def _build(mlir: bindings.Mlir, op: FlatIROp, operands: list[Any]) -> Any:
    out = op.outputs[0]
    names = f"{op.label}:{','.join(t.name for t in op.inputs)}->{out.name}"
    file, line = out.source
    with mlir.ir.Location.name(names, mlir.ir.Location.file(file, line, 0)):
        try:
            value = op.to_mlir(mlir, operands)
        except (mlir.ir.MLIRError, ValueError, TypeError) as error:
            raise _refused(op, error) from error
    if value.type != mlir.type(out):
        raise _refused(op, f"its result is {value.type}")
    return value


def _verify(mlir: bindings.Mlir, module: Any, flat: FlatIR) -> None:
    try:
        module.operation.verify()
    except mlir.ir.MLIRError as error:
        text = str(error)
        named = [op for op in flat.ops if f'->{op.outputs[0].name}"' in text]
        raise (_refused(named[0], error) if named else CompileError(_sentence("a recorded program", error))) from error


def _refused(op: FlatIROp, why: object) -> CompileError:
    out = op.outputs[0]
    made = f", a tensor introduced to {out.reason_details}," if out.reason_details else ""
    return CompileError(_sentence(f"{op.label} recorded at {describe(out.source)} ({type(op).__name__}{made})", why))


def _sentence(what: str, why: object) -> str:
    reason = " ".join(str(why).split())
    return expected("a valid StableHLO operation", of=what, got=reason, do="change the operation at that line, or report this program")
