"""Matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusible.lazy.dims import may_agree
from fusible.lazy.flat_ir.op import FlatIROp
from fusible.lazy.stablehlo.mlir import Mlir

__all__ = ["DotOp"]


class DotOp(FlatIROp):
    """A contraction over paired dimensions, accumulated in the output's dtype (stablehlo.dot_general).

    ``contracting`` and ``batch`` are (dimensions of the left operand, dimensions of the right one). The output's dimensions are the
    batch ones, then the other ones of the left operand, then those of the right operand.
    """

    contracting: tuple[list[int], list[int]]
    batch: tuple[list[int], list[int]] = ((), ())  # type: ignore[assignment]

    def to_mlir(self, mlir: Mlir, operands: Sequence[Any]) -> Any:
        numbers = mlir.hlo.DotDimensionNumbers.get(
            lhs_batching_dimensions=list(self.batch[0]),
            rhs_batching_dimensions=list(self.batch[1]),
            lhs_contracting_dimensions=list(self.contracting[0]),
            rhs_contracting_dimensions=list(self.contracting[1]),
        )
        return mlir.hlo.dot_general(mlir.type(self.outputs[0]), operands[0], operands[1], numbers)

    def check(self) -> str | None:
        a, b = self.inputs
        pairs = [*zip(*self.contracting, strict=True), *zip(*self.batch, strict=True)]
        return None if all(may_agree(a.shape[i], b.shape[j]) for i, j in pairs) else "paired dimensions of a dot have equal sizes"
