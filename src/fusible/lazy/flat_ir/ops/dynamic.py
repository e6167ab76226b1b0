"""Operations on tensors whose sizes a call determines, and what computes those sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusible.lazy.flat_ir.op import FlatIROp
from fusible.lazy.stablehlo.mlir import Mlir

__all__ = ["DynamicBroadcastOp", "DynamicGatherOp", "DynamicIotaOp", "DynamicPadOp", "DynamicReshapeOp", "DynamicSliceOp", "GetDimensionSizeOp"]


class GetDimensionSizeOp(FlatIROp):
    """The size of dimension ``dim``, an int32 scalar (stablehlo.get_dimension_size)."""

    dim: int

    def to_mlir(self, mlir: Mlir, operands: Sequence[Any]) -> Any:
        return mlir.hlo.get_dimension_size(operands[0], mlir.i64(self.dim))

    def check(self) -> str | None:
        return None if 0 <= self.dim < len(self.inputs[0].shape) and self.outputs[0].shape == () else "the size of a dimension is a scalar"


class DynamicBroadcastOp(FlatIROp):
    """``inputs`` are the tensor and the output's shape; dimensions as in ``BroadcastOp`` (stablehlo.dynamic_broadcast_in_dim)."""

    broadcast_dim: list[int]

    def to_mlir(self, mlir: Mlir, operands: Sequence[Any]) -> Any:
        return mlir.hlo.dynamic_broadcast_in_dim(mlir.type(self.outputs[0]), operands[0], operands[1], mlir.ints(self.broadcast_dim))

    def check(self) -> str | None:
        return _is_vector(self, 1, len(self.outputs[0].shape))


class DynamicReshapeOp(FlatIROp):
    """``inputs`` are the tensor and the output's shape (stablehlo.dynamic_reshape)."""

    def to_mlir(self, mlir: Mlir, operands: Sequence[Any]) -> Any:
        return mlir.hlo.dynamic_reshape(mlir.type(self.outputs[0]), operands[0], operands[1])

    def check(self) -> str | None:
        return _is_vector(self, 1, len(self.outputs[0].shape))


class DynamicIotaOp(FlatIROp):
    """The input is the output's shape; counts along ``dim`` (stablehlo.dynamic_iota)."""

    dim: int

    def to_mlir(self, mlir: Mlir, operands: Sequence[Any]) -> Any:
        return mlir.hlo.dynamic_iota(mlir.type(self.outputs[0]), operands[0], mlir.i64(self.dim))

    def check(self) -> str | None:
        return _is_vector(self, 0, len(self.outputs[0].shape))


class DynamicSliceOp(FlatIROp):
    """``inputs`` are the tensor, and where to start, stop and step in every dimension (stablehlo.real_dynamic_slice)."""

    def to_mlir(self, mlir: Mlir, operands: Sequence[Any]) -> Any:
        return mlir.hlo.real_dynamic_slice(mlir.type(self.outputs[0]), *operands)

    def check(self) -> str | None:
        return next((wrong for i in (1, 2, 3) if (wrong := _is_vector(self, i, len(self.inputs[0].shape)))), None)


class DynamicPadOp(FlatIROp):
    """``inputs`` are the tensor, the scalar that fills, and counts before, after and between in every dimension (stablehlo.dynamic_pad)."""

    def to_mlir(self, mlir: Mlir, operands: Sequence[Any]) -> Any:
        return mlir.hlo.dynamic_pad(mlir.type(self.outputs[0]), *operands)

    def check(self) -> str | None:
        return next((wrong for i in (2, 3, 4) if (wrong := _is_vector(self, i, len(self.inputs[0].shape)))), None)


class DynamicGatherOp(FlatIROp):
    """``GatherOp`` where a third input gives the sizes of a slice (stablehlo.dynamic_gather)."""

    dim: int

    def to_mlir(self, mlir: Mlir, operands: Sequence[Any]) -> Any:
        return mlir.hlo.dynamic_gather(*operands, mlir.gather_numbers(self.outputs[0], self.inputs[1], self.dim))

    def check(self) -> str | None:
        return _is_vector(self, 2, len(self.inputs[0].shape))


def _is_vector(op: FlatIROp, index: int, length: int) -> str | None:
    """Operand ``index`` holds one number per dimension."""
    return None if op.inputs[index].shape == (length,) else f"operand {index} holds {length} sizes"
