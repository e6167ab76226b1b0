"""Building the StableHLO module of a FlatIR."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fusible.lazy.dims import is_static
from fusible.lazy.flat_ir.diagnostics import VALID, location_name, op_refusal, refusal
from fusible.lazy.flat_ir.op import FlatIROp
from fusible.lazy.flat_ir.tensor import FlatIRTensor
from fusible.lazy.stablehlo import mlir as bindings
from fusible.lazy.stablehlo.module import StableHLO

if TYPE_CHECKING:
    from fusible.lazy.flat_ir.flat_ir import FlatIR

__all__ = ["build_module"]


def build_module(flat: FlatIR, aliases: Mapping[int, int]) -> StableHLO:
    """The verified module of ``flat``. Every operation's location carries its tensors' names and the user's line.

    ``aliases`` maps each input whose memory may be overwritten to the output that takes it. Where an operation is refused, raises ``CompileError``
    that begins with the user's line.
    """
    with bindings.LOCK:
        mlir = bindings.get()
        ir = mlir.ir
        with mlir.context, ir.Location.unknown():
            module = ir.Module.create()
            with ir.InsertionPoint(module.body):
                main = _add_function(mlir, "main", flat.inputs, flat.ops, flat.outputs)
                if aliases:
                    main.arg_attrs = [mlir.attributes({"tf.aliasing_output": aliases[i]} if i in aliases else {}) for i in range(len(flat.inputs))]
                for function in flat.functions:
                    _add_function(mlir, function.name, function.inputs, function.ops, function.outputs, visibility="private")
            try:
                module.operation.verify()
            except ir.MLIRError as error:
                raise refusal(flat, error, VALID) from error
            return StableHLO(module)


def _add_function(
    mlir: bindings.Mlir, name: str, inputs: list[FlatIRTensor], ops: list[FlatIROp], outputs: list[FlatIRTensor], visibility: str | None = None
) -> Any:
    ir = mlir.ir
    function = mlir.func.FuncOp(name, ([mlir.type(t) for t in inputs], [mlir.type(t) for t in outputs]), visibility=visibility)
    block = function.add_entry_block()
    values: dict[FlatIRTensor, Any] = dict(zip(inputs, block.arguments, strict=True))
    refusals = (ir.MLIRError, ValueError, TypeError)
    with ir.InsertionPoint(block):
        for op in ops:
            with mlir.location(location_name(op), op.outputs[0].source):
                try:
                    made = op.to_mlir(mlir, [values[t] for t in op.inputs])
                except refusals as error:
                    raise op_refusal(op, error) from error
            results = made if isinstance(made, list | tuple) else (made,)
            if len(results) != len(op.outputs) or not all([isinstance(value, ir.Value) for value in results]):
                given = ", ".join(type(value).__name__ for value in results)
                raise op_refusal(op, f"its to_mlir gives {given or 'nothing'} where a value for each of its {len(op.outputs)} outputs was recorded")
            for out, value in zip(op.outputs, results, strict=True):
                if value.type != mlir.type(out) and (is_static(out.shape) or not _agrees(value.type, mlir.type(out))):
                    raise op_refusal(op, f"its result is {value.type} where {out} was recorded")
                values[out] = value
        mlir.func.ReturnOp([values[t] for t in outputs])
    return function


def _agrees(made: Any, wanted: Any) -> bool:
    """Whether two types are equal but for sizes that one of them leaves open."""
    if made.element_type != wanted.element_type or made.rank != wanted.rank:
        return False
    return all(a.is_dynamic_dim(d) or b.is_dynamic_dim(d) or a.shape[d] == b.shape[d] for a, b in [(made, wanted)] for d in range(made.rank))
