"""Dimensions in another order."""

from __future__ import annotations

from collections.abc import Sequence

from fusible.errors import ArgumentError, expected
from fusible.lazy.dtypes import ALL, dtype
from fusible.lazy.flat_ir import FlatIRTensor
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.frontend import Tensor, TensorLike, constrained, normalize_dim, normalize_dims, record
from fusible.lazy.printing import Shape
from fusible.lazy.trace import TraceOp, TraceTensor

__all__ = ["Permute", "permute", "transpose"]


class Permute(TraceOp):
    """Output dimension ``i`` is input dimension ``perm[i]``."""

    perm: tuple[int, ...]

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtype]:
        (x,) = inputs
        return tuple([x.shape[d] for d in self.perm]), x.dtype

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        flat.TransposeOp(list(inputs), list(outputs), perm=list(self.perm))


@constrained("permute", input="T1", returns="T1", T1=ALL)
def permute(input: TensorLike, perm: Sequence[int]) -> Tensor:
    """``input`` with output dimension ``i`` taken from dimension ``perm[i]``. Raises ``ArgumentError`` unless each dimension is named once."""
    order = normalize_dims(perm, input.ndim, "permute")
    if len(order) != input.ndim:
        raise ArgumentError(expected(f"{input.ndim} dimensions", of="the order of a permute", got=order, do="name every dimension once"))
    return record(Permute(order), input)


@constrained("transpose", input="T1", returns="T1", T1=ALL)
def transpose(input: TensorLike, dim0: int, dim1: int) -> Tensor:
    """``input`` with two dimensions exchanged."""
    a, b = (normalize_dim(d, input.ndim, "transpose") for d in (dim0, dim1))
    order = list(range(input.ndim))
    order[a], order[b] = b, a
    return record(Permute(tuple(order)), input)
