"""Counting along a dimension."""

from __future__ import annotations

from collections.abc import Sequence

from fusible.lazy import dtypes
from fusible.lazy.dtypes import ALL, NUMBERS
from fusible.lazy.flat_ir import FlatIRTensor, emit
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.frontend import Tensor, as_shape, constrained, normalize_dim, record
from fusible.lazy.ops.lowering.convert import lower_cast
from fusible.lazy.printing import Shape
from fusible.lazy.trace import TraceOp, TraceTensor

__all__ = ["Iota", "iota", "iota_like"]


class Iota(TraceOp):
    """0, 1, 2, ... along ``dim``, the same along every other dimension."""

    dim: int
    shape: Shape
    dtype: dtypes.dtype

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtypes.dtype]:
        return self.shape, self.dtype

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        if self.dtype in NUMBERS:
            flat.IotaOp([], list(outputs), dim=self.dim)
        else:
            counted = emit(flat.IotaOp, [], self.shape, dtypes.int32, f"count before the cast to {self.dtype}", dim=self.dim)
            lower_cast(counted, outputs[0])


@constrained(dtype="T1", returns="T1", T1=ALL)
def iota(shape: Shape | int, dim: int = 0, dtype: dtypes.dtype = dtypes.float32) -> Tensor:
    """A tensor of ``shape`` that counts 0, 1, 2, ... along ``dim``, cast to ``dtype``: a float8 saturates, int4 wraps around, bool is 0 or not."""
    sizes = as_shape(shape)
    return record(Iota(normalize_dim(dim, len(sizes), "iota"), sizes, dtype))


@constrained(input="T1", dtype="T2", returns="T2", T1=ALL, T2=ALL)
def iota_like(input: Tensor, dim: int = 0, dtype: dtypes.dtype | None = None) -> Tensor:
    """``iota`` with the shape of ``input``, and its dtype where none is given."""
    return iota(input.shape, dim, dtype or input.dtype)
