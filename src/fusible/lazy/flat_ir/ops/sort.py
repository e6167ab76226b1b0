"""Order along a dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusible.lazy.flat_ir.op import FlatIROp
from fusible.lazy.stablehlo.mlir import Mlir

__all__ = ["SortOp"]


class SortOp(FlatIROp):
    """The operands in the descending order of the first along ``dim``: stable, and a NaN before every number (stablehlo.sort)."""

    dim: int

    def to_mlir(self, mlir: Mlir, operands: Sequence[Any]) -> Any:
        op = mlir.hlo.SortOp([mlir.type(t) for t in self.outputs], list(operands), dimension=mlir.i64(self.dim), is_stable=mlir.ir.BoolAttr.get(True))
        scalars = [mlir.ir.RankedTensorType.get((), mlir.element(t.dtype)) for t in self.inputs for _ in range(2)]
        block = op.regions[0].blocks.append(*scalars)
        with mlir.ir.InsertionPoint(block):
            mlir.hlo.return_([self._before(mlir, *block.arguments[:2])])
        return list(op.results)

    def _before(self, mlir: Mlir, a: Any, b: Any) -> Any:
        """Whether ``a`` comes before ``b``: it is larger, or it is a NaN and ``b`` is a number."""

        def compare(x: Any, y: Any, direction: str) -> Any:
            return mlir.hlo.compare(x, y, mlir.hlo.ComparisonDirectionAttr.get(direction))

        larger = compare(a, b, "GT")
        if not self.inputs[0].dtype.is_floating:
            return larger
        return mlir.hlo.or_(larger, mlir.hlo.and_(compare(a, a, "NE"), compare(b, b, "EQ")))

    def check(self) -> str | None:
        same = all(a.shape == self.inputs[0].shape == b.shape and a.dtype is b.dtype for a, b in zip(self.inputs, self.outputs, strict=True))
        return None if same else "sorted operands have one shape and keep their types"
