"""Counting along a dimension."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusible.errors import DTypeError, expected
from fusible.lazy import dtypes
from fusible.lazy.dtypes import check_dtype
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.flat_ir.tensor import FlatIRTensor
from fusible.lazy.frontend.arguments import as_shape, normalize_dim
from fusible.lazy.frontend.tensor import Tensor, record
from fusible.lazy.printing import Shape
from fusible.lazy.trace.op import TraceOp
from fusible.lazy.trace.tensor import TraceTensor

__all__ = ["Iota", "iota"]


@dataclass(eq=False)
class Iota(TraceOp):
    """0, 1, 2, ... along ``dim``, the same along every other dimension."""

    dim: int
    shape: Shape
    dtype: dtypes.dtype

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtypes.dtype]:
        if not (self.dtype.is_floating or self.dtype.is_integer):
            raise DTypeError(expected("a floating or integer dtype", of="iota", got=self.dtype, do="cast the result"))
        return self.shape, self.dtype

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        flat.IotaOp([], list(outputs), dim=self.dim)


def iota(shape: Shape | int, dim: int = 0, dtype: dtypes.dtype = dtypes.float32) -> Tensor:
    """A tensor of ``shape`` that counts 0, 1, 2, ... along ``dim``. Raises ``DTypeError`` for bool and float8."""
    sizes = as_shape(shape)
    return record(Iota(normalize_dim(dim, len(sizes), "iota"), sizes, check_dtype(dtype)))
