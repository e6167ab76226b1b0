"""The largest elements along a dimension."""

from __future__ import annotations

from collections.abc import Sequence

from fusible.errors import ArgumentError, expected
from fusible.lazy import dtypes
from fusible.lazy.assumptions import holds
from fusible.lazy.dims import SizeLike, size_of
from fusible.lazy.dtypes import NUMBERS, dtype
from fusible.lazy.flat_ir import FlatIRTensor, emit
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.frontend import Tensor, TensorLike, constrained, normalize_dim, record_all
from fusible.lazy.locate import pointing
from fusible.lazy.printing import Shape
from fusible.lazy.trace import TraceOp, TraceTensor

__all__ = ["TopK", "topk"]


class TopK(TraceOp):
    """The ``k`` largest elements along ``dim`` in descending order, and their indices; equal ones in their order, a NaN before all."""

    k: SizeLike
    dim: int

    def infer_all(self, *inputs: TraceTensor) -> list[tuple[Shape, dtype]]:
        (x,) = inputs
        shape = (*x.shape[: self.dim], self.k, *x.shape[self.dim + 1 :])
        return [(shape, x.dtype), (shape, dtypes.int32)]

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        x = inputs[0]
        reason = "sort before the largest are taken"
        positions = emit(flat.IotaOp, [], x.shape, dtypes.int32, reason, dim=self.dim)
        ordered = [FlatIRTensor(x.shape, t.dtype, reason=reason) for t in (x, positions)]
        flat.SortOp([x, positions], ordered, dim=self.dim)
        rank = len(x.shape)
        for whole, out in zip(ordered, outputs, strict=True):
            flat.SliceOp([whole], [out], start=[0] * rank, limit=list(out.shape), stride=[1] * rank)


@constrained("topk", input="T1", returns=("T1", "int32"), T1=NUMBERS)
def topk(input: TensorLike, k: int, dim: int) -> tuple[Tensor, Tensor]:
    """The ``k`` largest elements of ``input`` along ``dim`` in descending order, and their indices along it in int32.

    NaN is larger than every number, and of equal elements the first comes first. A scalar counts as one element along ``dim`` 0, and gives
    scalars. Raises ``ArgumentError`` unless ``k`` is from 0 to the size of the dimension (1 of a scalar).
    """
    if not input.ndim and size_of(k) == 1:
        values, indices = topk(input.reshape((1,)), 1, dim)
        return values.reshape(()), indices.reshape(())
    at = normalize_dim(dim, input.ndim, "topk")
    n, count = input.trace_tensor.shape[at], size_of(k)
    if count is None or not (holds(count, ">=", 0, "k of topk") and holds(n, ">=", count, "the dimension of topk")):
        raise pointing(ArgumentError(expected(f"an int from 0 to {n}", of="k of topk", got=repr(k), do="ask for no more than there are")), "k")
    values, indices = record_all(TopK(count, at), input)
    return values, indices
