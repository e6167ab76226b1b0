"""Operations that move elements and compute none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fusible.lazy.flat_ir.op import FlatIROp, emit
from fusible.lazy.flat_ir.tensor import FlatIRTensor
from fusible.lazy.printing import Shape
from fusible.lazy.stablehlo.mlir import Mlir

__all__ = ["BroadcastOp", "ConcatenateOp", "FlipOp", "PadOp", "ReshapeOp", "SliceAtOp", "SliceOp", "TransposeOp", "broadcast"]


class BroadcastOp(FlatIROp, hlo="broadcast_in_dim", typed=True):
    """Input dimension ``i`` becomes output dimension ``broadcast_dim[i]``."""

    broadcast_dim: list[int]

    def check(self) -> str | None:
        out = self.outputs[0].shape
        sizes = zip(self.inputs[0].shape, self.broadcast_dim, strict=True)
        return None if all(n in (1, out[d]) for n, d in sizes) else "a broadcast repeats dimensions of size 1 only"


class ReshapeOp(FlatIROp, hlo="reshape", typed=True):
    """The same elements in row-major order."""

    def check(self) -> str | None:
        return None if math.prod(self.inputs[0].shape) == math.prod(self.outputs[0].shape) else "a reshape keeps the number of elements"


class TransposeOp(FlatIROp, hlo="transpose"):
    """Output dimension ``i`` is input dimension ``perm[i]``."""

    perm: list[int]

    def check(self) -> str | None:
        permuted = tuple(self.inputs[0].shape[d] for d in self.perm)
        return None if permuted == self.outputs[0].shape else "a transpose permutes the shape"


class SliceOp(FlatIROp, hlo="slice"):
    """Elements ``start, start + stride, ...`` below ``limit`` of every dimension."""

    start: list[int]
    limit: list[int]
    stride: list[int]


class SliceAtOp(FlatIROp):
    """``inputs`` are the tensor, and for every dimension the scalar where a block of ``sizes`` begins (stablehlo.dynamic_slice)."""

    sizes: list[int]

    def to_mlir(self, mlir: Mlir, operands: Sequence[Any]) -> Any:
        return mlir.hlo.dynamic_slice(operands[0], list(operands[1:]), mlir.ints(self.sizes))

    def check(self) -> str | None:
        scalars = [t.shape for t in self.inputs[1:]] == [()] * len(self.inputs[0].shape)
        return None if scalars and tuple(self.sizes) == self.outputs[0].shape else "a block has its sizes, and one scalar start per dimension"


class FlipOp(FlatIROp, hlo="reverse"):
    """The order of elements reversed in ``dims``."""

    dims: list[int]


class ConcatenateOp(FlatIROp):
    """Operands one after the other in dimension ``dim`` (stablehlo.concatenate)."""

    dim: int

    def to_mlir(self, mlir: Mlir, operands: Sequence[Any]) -> Any:
        return mlir.hlo.concatenate(list(operands), mlir.i64(self.dim))


class PadOp(FlatIROp):
    """``low`` elements before and ``high`` after the tensor in every dimension; ``inputs`` are the tensor and the scalar that fills
    (stablehlo.pad)."""

    low: list[int]
    high: list[int]

    def to_mlir(self, mlir: Mlir, operands: Sequence[Any]) -> Any:
        return mlir.hlo.pad(operands[0], operands[1], mlir.ints(self.low), mlir.ints(self.high), mlir.ints([0] * len(self.low)))


def broadcast(x: FlatIRTensor, shape: Shape, reason: str) -> FlatIRTensor:
    """``x`` expanded to ``shape`` by numpy's rules; ``x`` itself when it has that shape."""
    if x.shape == shape:
        return x
    lead = len(shape) - len(x.shape)
    return emit(BroadcastOp, [x], shape, x.dtype, reason, broadcast_dim=list(range(lead, len(shape))))
