"""Tensors one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusible.errors import ArgumentError, ShapeError, expected
from fusible.lazy.dtypes import dtype
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.flat_ir.tensor import FlatIRTensor
from fusible.lazy.frontend.arguments import normalize_dim
from fusible.lazy.frontend.convert import TensorLike, promote
from fusible.lazy.frontend.tensor import Tensor, record
from fusible.lazy.printing import Shape
from fusible.lazy.trace.broadcasting import same_dtype
from fusible.lazy.trace.op import TraceOp
from fusible.lazy.trace.tensor import TraceTensor

__all__ = ["Concatenate", "concatenate"]


@dataclass(eq=False)
class Concatenate(TraceOp):
    """Operands joined along ``dim``; their other sizes are equal."""

    dim: int

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtype]:
        same_dtype("concatenate", *inputs)
        shapes = [t.shape for t in inputs]
        rest = {(*s[: self.dim], *s[self.dim + 1 :]) for s in shapes}
        if len(rest) != 1 or len({len(s) for s in shapes}) != 1:
            got = ", ".join(map(str, inputs))
            raise ShapeError(
                expected(f"equal sizes except in dimension {self.dim}", of="the operands of concatenate", got=got, do="reshape or slice them")
            )
        total = sum(s[self.dim] for s in shapes)
        return (*shapes[0][: self.dim], total, *shapes[0][self.dim + 1 :]), inputs[0].dtype

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        flat.ConcatenateOp(list(inputs), list(outputs), dim=self.dim)


def concatenate(tensors: Sequence[TensorLike], dim: int = 0) -> Tensor:
    """``tensors`` joined along ``dim``. Raises ``ShapeError`` where other sizes differ and ``ArgumentError`` for an empty sequence."""
    if not tensors:
        raise ArgumentError(expected("at least one tensor", of="concatenate", got="an empty sequence", do="pass the tensors to join"))
    given = promote(*tensors)
    return record(Concatenate(normalize_dim(dim, given[0].ndim, "concatenate")), *given)
