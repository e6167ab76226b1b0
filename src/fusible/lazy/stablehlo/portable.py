"""Modules as versioned bytes that other versions read, and dynamic modules made static."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fusible.errors import CompileError, expected
from fusible.lazy import dtypes
from fusible.lazy.dtypes import dtype
from fusible.lazy.engine import pjrt
from fusible.lazy.printing import Shape
from fusible.lazy.stablehlo import mlir as bindings
from fusible.lazy.stablehlo.module import StableHLO

__all__ = ["check_types", "read_portable", "refined"]

Type = tuple[Shape, dtype]


def read_portable(data: bytes) -> StableHLO:
    """The module of a portable artifact; raises ``CompileError`` for bytes that are none."""
    with bindings.LOCK:
        mlir = bindings.get()
        quiet = mlir.context.attach_diagnostic_handler(lambda _: True)
        try:
            return StableHLO(mlir.hlo.deserialize_portable_artifact(mlir.context, data))
        except (mlir.ir.MLIRError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise CompileError(expected("a portable StableHLO module", of="a saved program", got=reason, do="save the executable again")) from error
        finally:
            quiet.detach()


def check_types(module: StableHLO, inputs: Sequence[Type], outputs: Sequence[Type]) -> None:
    """Raise ``CompileError`` unless ``main`` takes and returns exactly these types (the engine would not notice)."""
    with bindings.LOCK:
        mlir = bindings.get()
        with mlir.context, mlir.ir.Location.unknown():
            kind = mlir.ir.FunctionType(module.module.body.operations[0].attributes["function_type"].value)
            wanted = [[str(mlir.type(bindings.TensorType(*of))) for of in types] for types in (inputs, outputs)]
            found = [[str(of) for of in types] for types in (kind.inputs, kind.results)]
    if wanted != found:
        got = f"{found[0]} -> {found[1]}"
        raise CompileError(expected(f"the types {wanted[0]} -> {wanted[1]}", of="a saved program", got=got, do="save the executable again"))


def refined(module: StableHLO, inputs: Sequence[Type], values: Mapping[int, int]) -> None:
    """Make a dynamic module static in place: ``inputs`` are its input types, ``values`` the values of the inputs that are sizes."""
    with bindings.LOCK:
        mlir = bindings.get()
        ir = mlir.ir
        with mlir.context, ir.Location.unknown():
            block = module.module.body.operations[0].regions[0].blocks[0]
            with ir.InsertionPoint.at_block_begin(block):
                for index, value in values.items():
                    literal = mlir.hlo.constant(mlir.dense(np.array(value, np.int32), dtypes.int32))
                    block.arguments[index].replace_all_uses_with(literal)
            types = ",".join(str(mlir.type(bindings.TensorType(shape, of))) for shape, of in inputs)
            steps = f"stablehlo-refine-arguments{{types={types}}},stablehlo-refine-shapes,func.func(stablehlo-canonicalize-dynamism)"
            try:
                pjrt.pass_manager().parse(f"builtin.module({steps})").run(module.module.operation)
            except ir.MLIRError as error:
                reason = " ".join(str(error).split())
                do = "pass other sizes, or compile for fixed ones"
                raise CompileError(expected("sizes that its program can take", of="a loaded executable", got=reason, do=do)) from error
