"""Calls of functions that the user registered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusible.lazy.flat_ir.op import FlatIROp
from fusible.lazy.flat_ir.tensor import FlatIRTensor
from fusible.lazy.stablehlo.mlir import Mlir

__all__ = ["CustomCallOp"]

_TYPED_FFI = 4
"""The version of a custom call whose configuration is a dictionary, which XLA hands to a typed FFI handler."""


class CustomCallOp(FlatIROp):
    """A call of the XLA FFI handler registered as ``target``, on row-major operands and results (stablehlo.custom_call).

    ``config`` holds the handler's attributes: pairs of a name and an MLIR attribute as text.
    """

    is_pure = False

    target: str
    config: tuple[tuple[str, str], ...]

    def to_mlir(self, mlir: Mlir, operands: Sequence[Any]) -> Any:
        ir = mlir.ir
        op = mlir.hlo.CustomCallOp(
            [mlir.type(t) for t in self.outputs],
            list(operands),
            call_target_name=ir.StringAttr.get(self.target),
            has_side_effect=ir.BoolAttr.get(False),
            backend_config=ir.DictAttr.get({name: ir.Attribute.parse(text) for name, text in self.config}),
            api_version=ir.IntegerAttr.get(ir.IntegerType.get_signless(32), _TYPED_FFI),
            operand_layouts=ir.ArrayAttr.get([_row_major(mlir, t) for t in self.inputs]),
            result_layouts=ir.ArrayAttr.get([_row_major(mlir, t) for t in self.outputs]),
        )
        return list(op.results)


def _row_major(mlir: Mlir, tensor: FlatIRTensor) -> Any:
    """The layout of a tensor: its dimensions from the fastest one."""
    order = ", ".join(str(d) for d in reversed(range(len(tensor.shape))))
    return mlir.ir.Attribute.parse(f"dense<[{order}]> : tensor<{len(tensor.shape)}xindex>")
