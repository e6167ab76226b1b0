"""The base of every FlatIR operation, and the table of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from fusible.lazy.dtypes import dtype
from fusible.lazy.flat_ir.tensor import FlatIRTensor
from fusible.lazy.printing import Shape, print_attributes

if TYPE_CHECKING:
    from fusible.lazy.stablehlo.mlir import Mlir

__all__ = ["FLAT_OPS", "FlatIROp", "emit"]

FLAT_OPS: dict[str, type[FlatIROp]] = {}
"""Every concrete FlatIR operation by its printed name."""


@dataclass(eq=False)
class FlatIROp:
    """One StableHLO operation. Constructing it binds it: it becomes the producer of its outputs.

    A subclass is a dataclass whose further fields are its attributes, and defines ``to_mlir``, always one StableHLO operation.
    ``label`` names the trace operation that it came from; ``source`` the user's line; both are set when it is inlined.
    """

    HIDDEN: ClassVar[frozenset[str]] = frozenset({"inputs", "label", "outputs"})

    inputs: list[FlatIRTensor]
    outputs: list[FlatIRTensor]
    label: str = field(default="", init=False)

    def __init_subclass__(cls) -> None:
        FLAT_OPS[cls.__name__] = cls

    def __post_init__(self) -> None:
        self.inputs = list(self.inputs)
        self.outputs = list(self.outputs)
        for out in self.outputs:
            out.producer = self

    def to_mlir(self, mlir: Mlir, operands: Sequence[Any]) -> Any:
        """Build the StableHLO operation on ``operands`` and return its result value."""
        raise NotImplementedError

    def check(self) -> str | None:
        """What is wrong with the operand and output types, or nothing."""
        return None

    def attributes(self) -> list[str]:
        return print_attributes(self, self.HIDDEN)

    def __str__(self) -> str:
        left = ", ".join(map(str, self.outputs))
        return f"{left} = {type(self).__name__}({', '.join([*(t.name for t in self.inputs), *self.attributes()])})"


def emit(op: type[FlatIROp], inputs: Sequence[FlatIRTensor], shape: Shape, out_dtype: dtype, reason: str, **attributes: Any) -> FlatIRTensor:
    """An intermediate tensor made by ``op``; ``reason`` completes "this tensor was introduced to ..."."""
    out = FlatIRTensor(shape, out_dtype, reason=reason)
    op(list(inputs), [out], **attributes)
    return out
