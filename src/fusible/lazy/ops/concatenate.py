"""Tensors one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from fusible.errors import ArgumentError, ShapeError, expected
from fusible.lazy.assumptions import holds
from fusible.lazy.dtypes import ALL, dtype
from fusible.lazy.flat_ir import FlatIRTensor
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.frontend import Tensor, TensorLike, constrained, normalize_dim, record
from fusible.lazy.printing import Shape
from fusible.lazy.trace import TraceOp, TraceTensor

__all__ = ["Concatenate", "concatenate"]


class Concatenate(TraceOp):
    """Operands joined along ``dim``; their other sizes are equal."""

    dim: int

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtype]:
        shapes = [t.shape for t in inputs]
        rest = [(*s[: self.dim], *s[self.dim + 1 :]) for s in shapes]
        agree = len({len(s) for s in shapes}) == 1 and all(s == rest[0] or _agree(rest[0], s) for s in rest)
        if not agree:
            got = ", ".join(map(str, inputs))
            wanted = f"equal sizes except in dimension {self.dim}"
            raise ShapeError(expected(wanted, of="the operands of concatenate", got=got, do="reshape or slice them"))
        total = sum(s[self.dim] for s in shapes)
        return (*shapes[0][: self.dim], total, *shapes[0][self.dim + 1 :]), inputs[0].dtype

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        flat.ConcatenateOp(list(inputs), list(outputs), dim=self.dim)


def _agree(a: Shape, b: Shape) -> bool:
    return all(holds(n, "==", m, "concatenate") for n, m in zip(a, b, strict=True))


@constrained(tensors="[T1]", returns="T1", T1=ALL)
def concatenate(tensors: Sequence[TensorLike], dim: int) -> Tensor:
    """``tensors`` joined along ``dim``. Raises ``ShapeError`` where other sizes differ and ``ArgumentError`` for an empty sequence."""
    if not tensors:
        raise ArgumentError(expected("at least one tensor", of="concatenate", got="an empty sequence", do="pass the tensors to join"))
    return record(Concatenate(normalize_dim(dim, tensors[0].ndim, "concatenate")), *tensors)
