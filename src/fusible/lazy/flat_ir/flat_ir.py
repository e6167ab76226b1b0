"""The FlatIR: operations in order, with their inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, Protocol

from fusible.lazy.checks import run_checks
from fusible.lazy.flat_ir.build import build_module
from fusible.lazy.flat_ir.op import FlatIROp
from fusible.lazy.flat_ir.ops.call import CallOp, Function
from fusible.lazy.flat_ir.tensor import FlatIRTensor
from fusible.lazy.stablehlo.module import StableHLO

__all__ = ["Change", "FlatIR", "Pass", "PassReport"]

_NONE: Mapping[int, int] = MappingProxyType({})


class Change(NamedTuple):
    """What a pass did to one operation: ``how``, the names of its outputs, and the names of the tensors that replace them."""

    how: str
    outputs: tuple[str, ...]
    became: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join([", ".join(self.outputs), self.how, *([", ".join(self.became)] if self.became else [])])


class PassReport(NamedTuple):
    """The report of a pass: the numbers of operations before and after it (those of functions counted once), and every change in order."""

    name: str
    before: int
    after: int
    changes: tuple[Change, ...]

    def __str__(self) -> str:
        return "\n    ".join([f"{self.name}: {self.before} -> {self.after} operations", *map(str, self.changes)])


@dataclass
class FlatIR:
    """A straight-line program 1:1 with StableHLO; ``str`` of it is its printed form.

    ``report`` has one ``PassReport`` for each pass that led to this program; ``changes`` are those of the last one.
    """

    inputs: list[FlatIRTensor]
    ops: list[FlatIROp]
    outputs: list[FlatIRTensor]
    changes: list[Change] = field(default_factory=list, repr=False)
    report: list[PassReport] = field(default_factory=list, repr=False)

    @property
    def functions(self) -> list[Function]:
        """The functions that operations call, in the order of their first call."""
        return list(dict.fromkeys(op.callee for op in self.ops if isinstance(op, CallOp)))

    @property
    def size(self) -> int:
        """The number of operations, those of every function counted once."""
        return len(self.ops) + sum(len(function.ops) for function in self.functions)

    def __str__(self) -> str:
        lines = ["==== Flat IR ===="]
        if self.inputs:
            lines += ["inputs:", *(f"    {t}" for t in self.inputs)]
        for function in self.functions:
            lines += str(function).split("\n")
        return "\n".join([*lines, *map(str, self.ops), "outputs:", *(f"    {t}" for t in self.outputs)])

    def run(self, *passes: Pass) -> FlatIR:
        """The program after ``passes``, one after the other. This one stays as it is."""
        flat = self
        for step in passes:
            run_checks(flat)
            before, after = flat, step(flat)
            name = step.__name__.replace("_", "-")
            flat = FlatIR(after.inputs, after.ops, after.outputs, after.changes)
            flat.report = [*before.report, PassReport(name, before.size, after.size, tuple(after.changes))]
        run_checks(flat)
        return flat

    def to_stablehlo(self, aliases: Mapping[int, int] = _NONE) -> StableHLO:
        """The StableHLO module of this program; raises ``CompileError`` naming the user's line where one cannot be built.

        ``aliases``: by input whose memory may be overwritten, the output that takes it.
        """
        run_checks(self)
        return build_module(self, aliases)


class Pass(Protocol):
    """A function from one program to another, which does not change its argument. The pass is named as the function, with hyphens."""

    __name__: str

    def __call__(self, flat: FlatIR, /) -> FlatIR: ...
