"""Operations on tensors whose sizes a call determines, and what computes those sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusible.lazy.flat_ir.op import FlatIROp
from fusible.lazy.stablehlo.mlir import Mlir

__all__ = ["DynamicBroadcastOp", "DynamicGatherOp", "DynamicIotaOp", "DynamicPadOp", "DynamicReshapeOp", "DynamicSliceOp", "GetDimensionSizeOp"]


class GetDimensionSizeOp(FlatIROp, hlo="get_dimension_size"):
    """The size of dimension ``dim``, an int32 scalar."""

    dim: int

    def check(self) -> str | None:
        return None if 0 <= self.dim < len(self.inputs[0].shape) and self.outputs[0].shape == () else "the size of a dimension is a scalar"


class DynamicBroadcastOp(FlatIROp, hlo="dynamic_broadcast_in_dim", typed=True):
    """``inputs`` are the tensor and the output's shape; dimensions as in ``BroadcastOp``."""

    broadcast_dim: list[int]

    def check(self) -> str | None:
        return _is_vector(self, 1, len(self.outputs[0].shape))


class DynamicReshapeOp(FlatIROp, hlo="dynamic_reshape", typed=True):
    """``inputs`` are the tensor and the output's shape."""

    def check(self) -> str | None:
        return _is_vector(self, 1, len(self.outputs[0].shape))


class DynamicIotaOp(FlatIROp, hlo="dynamic_iota", typed=True):
    """The input is the output's shape; counts along ``dim``."""

    dim: int

    def check(self) -> str | None:
        return _is_vector(self, 0, len(self.outputs[0].shape))


class DynamicSliceOp(FlatIROp, hlo="real_dynamic_slice", typed=True):
    """``inputs`` are the tensor, and where to start, stop and step in every dimension."""

    def check(self) -> str | None:
        return next((wrong for i in (1, 2, 3) if (wrong := _is_vector(self, i, len(self.inputs[0].shape)))), None)


class DynamicPadOp(FlatIROp, hlo="dynamic_pad", typed=True):
    """``inputs`` are the tensor, the scalar that fills, and counts before, after and between in every dimension."""

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
