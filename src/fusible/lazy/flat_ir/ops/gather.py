"""Reading along one dimension by an index tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusible.lazy.flat_ir.op import FlatIROp
from fusible.lazy.stablehlo.mlir import Mlir

__all__ = ["GatherOp"]


class GatherOp(FlatIROp):
    """``out[..., i, ...] = x[..., index[i], ...]`` at dimension ``dim``; indices are clamped to the dimension (stablehlo.gather)."""

    dim: int

    def to_mlir(self, mlir: Mlir, operands: Sequence[Any]) -> Any:
        x, index = self.inputs
        sizes = [1 if d == self.dim else n for d, n in enumerate(x.shape)]
        return mlir.hlo.gather(operands[0], operands[1], mlir.gather_numbers(self.outputs[0], index, self.dim), mlir.ints(sizes))
