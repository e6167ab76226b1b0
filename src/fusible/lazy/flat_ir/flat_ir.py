"""The FlatIR: operations in order, with their inputs and outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fusible.lazy.flat_ir.op import FlatIROp
from fusible.lazy.flat_ir.tensor import FlatIRTensor
from fusible.lazy.stablehlo.module import StableHLO, build_module

if TYPE_CHECKING:
    from fusible.lazy.flat_ir.passes import Pass

__all__ = ["FlatIR"]


@dataclass
class FlatIR:
    """A straight-line program 1:1 with StableHLO; ``str`` of it is its printed form."""

    inputs: list[FlatIRTensor]
    ops: list[FlatIROp]
    outputs: list[FlatIRTensor]

    def __str__(self) -> str:
        lines = ["==== Flat IR ===="]
        if self.inputs:
            lines += ["inputs:", *(f"    {t}" for t in self.inputs)]
        return "\n".join([*lines, *map(str, self.ops), "outputs:", *(f"    {t}" for t in self.outputs)])

    def run(self, *passes: Pass) -> FlatIR:
        """The program after ``passes``, one after the other."""
        flat = self
        for step in passes:
            flat = step(flat)
        return flat

    def to_stablehlo(self) -> StableHLO:
        """The StableHLO module of this program; raises ``CompileError`` naming the user's line where one cannot be built."""
        return build_module(self)
