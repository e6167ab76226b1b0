"""Values that come from no operand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fusible.lazy.device import DEFAULT, device
from fusible.lazy.dtypes import dtype
from fusible.lazy.flat_ir.op import FlatIROp, emit
from fusible.lazy.flat_ir.tensor import FlatIRTensor
from fusible.lazy.printing import Shape
from fusible.lazy.stablehlo.mlir import Mlir

__all__ = ["ConstantOp", "IotaOp", "constant", "rounded"]


class ConstantOp(FlatIROp):
    """A literal (stablehlo.constant): a number, or nested lists of them where a pass made a small tensor."""

    data: float | int | bool | list[Any]
    dtype: dtype
    device: device = DEFAULT

    def array(self) -> np.ndarray[Any, Any]:
        """The literal rounded to its dtype."""
        return rounded(self.data, self.dtype, self.outputs[0].shape)

    def key(self) -> tuple[object, ...]:
        return self.dtype, self.array().tobytes()

    def to_mlir(self, mlir: Mlir, operands: Sequence[Any]) -> Any:
        return mlir.hlo.constant(mlir.dense(self.array(), self.dtype))

    def check(self) -> str | None:
        out = self.outputs[0]
        return None if np.shape(self.data) == out.shape and out.dtype is self.dtype else "a constant has the shape of its data and its dtype"


class IotaOp(FlatIROp, hlo="iota", typed=True):
    """Counts along one dimension."""

    dim: int


def rounded(data: Any, of: dtype, shape: Shape = ()) -> np.ndarray[Any, Any]:
    """Numbers as an array of ``of``, rounded to nearest even; integers by way of no float."""
    with np.errstate(all="ignore"):
        return np.array(data, object if of.is_integer else None).astype(of.numpy).reshape(shape)


def constant(value: float | bool, dtype: dtype, reason: str) -> FlatIRTensor:
    """An intermediate scalar literal."""
    return emit(ConstantOp, [], (), dtype, reason, data=value, dtype=dtype)
