"""Functions of a FlatIR, and calls to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fusible.lazy.flat_ir.op import FlatIROp
from fusible.lazy.flat_ir.tensor import FlatIRTensor
from fusible.lazy.stablehlo.mlir import Mlir

__all__ = ["CallOp", "Function"]


@dataclass(eq=False)
class Function:
    """A private function (func.func): operations from ``inputs`` to ``outputs``. Its tensors are its own."""

    name: str
    inputs: list[FlatIRTensor]
    ops: list[FlatIROp]
    outputs: list[FlatIRTensor]

    def __str__(self) -> str:
        """The printed form, without a banner."""
        head = f"function {self.name}({', '.join(map(str, self.inputs))}):"
        return "\n".join([head, *(f"    {op}" for op in self.ops), f"    return {', '.join(t.name for t in self.outputs)}"])


class CallOp(FlatIROp):
    """``callee`` on the operands (func.call)."""

    callee: Function

    def to_mlir(self, mlir: Mlir, operands: Sequence[Any]) -> Any:
        types = [mlir.type(t) for t in self.outputs]
        return list(mlir.func.CallOp(types, mlir.ir.FlatSymbolRefAttr.get(self.callee.name), list(operands)).results)

    def attributes(self) -> list[str]:
        return [f"callee={self.callee.name}"]

    def check(self) -> str | None:
        passed, taken = ([(t.shape, t.dtype) for t in tensors] for tensors in (self.inputs, self.callee.inputs))
        made, returned = ([(t.shape, t.dtype) for t in tensors] for tensors in (self.outputs, self.callee.outputs))
        return None if passed == taken and made == returned else "a call has the types of the function's inputs and outputs"
