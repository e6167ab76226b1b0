"""Values that come from no operand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fusible.lazy.device import DEFAULT, device
from fusible.lazy.dtypes import dtype
from fusible.lazy.flat_ir.op import FlatIROp, emit
from fusible.lazy.flat_ir.tensor import FlatIRTensor

if TYPE_CHECKING:
    from fusible.lazy.stablehlo.mlir import Mlir

__all__ = ["ConstantOp", "IotaOp", "constant"]


@dataclass(eq=False)
class ConstantOp(FlatIROp):
    """A scalar literal (stablehlo.constant)."""

    data: float | int | bool
    dtype: dtype
    device: device = DEFAULT

    def to_mlir(self, mlir: Mlir, operands: Sequence[Any]) -> Any:
        return mlir.hlo.constant(mlir.splat(self.data, self.dtype))

    def check(self) -> str | None:
        return None if self.outputs[0].shape == () and self.outputs[0].dtype is self.dtype else "a constant is a scalar of its dtype"


@dataclass(eq=False)
class IotaOp(FlatIROp):
    """Counts along one dimension (stablehlo.iota)."""

    dim: int

    def to_mlir(self, mlir: Mlir, operands: Sequence[Any]) -> Any:
        return mlir.hlo.iota(mlir.type(self.outputs[0]), mlir.i64(self.dim))


def constant(value: float | bool, dtype: dtype, reason: str) -> FlatIRTensor:
    """An intermediate scalar literal."""
    return emit(ConstantOp, [], (), dtype, reason, data=value, dtype=dtype)
