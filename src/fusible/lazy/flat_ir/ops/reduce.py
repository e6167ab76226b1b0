"""Reductions: over whole dimensions, and over windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusible.lazy.flat_ir.op import FlatIROp
from fusible.lazy.stablehlo.mlir import Mlir

__all__ = ["ReduceOp", "ReduceWindowOp"]

_BODY = {"sum": "add", "prod": "multiply", "max": "maximum", "min": "minimum", "and": "and_", "or": "or_"}


def _fill_body(mlir: Mlir, op: Any, kind: str, element: Any) -> Any:
    block = op.regions[0].blocks.append(element, element)
    with mlir.ir.InsertionPoint(block):
        mlir.hlo.return_([getattr(mlir.hlo, _BODY[kind])(*block.arguments)])
    return op.results[0]


class ReduceOp(FlatIROp):
    """``inputs`` are the tensor and the initial value; ``kind`` is sum, prod, max, min, and, or (stablehlo.reduce)."""

    kind: str
    dims: list[int]

    def to_mlir(self, mlir: Mlir, operands: Sequence[Any]) -> Any:
        op = mlir.hlo.ReduceOp([mlir.type(self.outputs[0])], [operands[0]], [operands[1]], mlir.ints(self.dims))
        return _fill_body(mlir, op, self.kind, mlir.type(self.inputs[1]))

    def check(self) -> str | None:
        left = tuple(n for d, n in enumerate(self.inputs[0].shape) if d not in self.dims)
        return None if left == self.outputs[0].shape else "a reduction removes the dimensions that it reduces"


class ReduceWindowOp(FlatIROp):
    """A sliding reduction with ``padding`` before and after each dimension, and a ``stride`` (1 where none is given) (stablehlo.reduce_window)."""

    kind: str
    window: list[int]
    padding: list[tuple[int, int]]
    stride: list[int] | None = None

    def to_mlir(self, mlir: Mlir, operands: Sequence[Any]) -> Any:
        op = mlir.hlo.ReduceWindowOp(
            [mlir.type(self.outputs[0])],
            [operands[0]],
            [operands[1]],
            mlir.ints(self.window),
            window_strides=mlir.ints(self.stride or [1] * len(self.window)),
            padding=mlir.pairs(self.padding),
        )
        return _fill_body(mlir, op, self.kind, mlir.type(self.inputs[1]))
