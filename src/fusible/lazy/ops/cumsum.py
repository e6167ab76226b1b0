"""Running sums."""

from __future__ import annotations

from collections.abc import Sequence

from fusible.lazy import dtypes
from fusible.lazy.dims import bounds
from fusible.lazy.dtypes import NUMBERS
from fusible.lazy.flat_ir import FlatIRTensor, emit
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.frontend import Tensor, TensorLike, constrained, normalize_dim, record
from fusible.lazy.ops.lowering.convert import bind, convert
from fusible.lazy.trace import TraceOp

__all__ = ["CumSum", "cumsum"]


class CumSum(TraceOp):
    """The sum of all elements up to and including each, along ``dim``."""

    dim: int

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        x, out = inputs[0], outputs[0]
        if 0 in x.shape:
            flat.ReshapeOp([x], [out])
            return
        wide = dtypes.float32 if x.dtype in (dtypes.float16, dtypes.bfloat16) else x.dtype
        x = convert(x, wide, "accumulate in float32")
        start = flat.constant(0, wide, "start a running sum")
        size = bounds(x.shape[self.dim])[1]  # a window has a fixed size: where that of the dimension is unknown, the longest one does
        window = [size if d == self.dim else 1 for d in range(len(x.shape))]
        padding = [(size - 1 if d == self.dim else 0, 0) for d in range(len(x.shape))]
        bind(emit(flat.ReduceWindowOp, [x, start], x.shape, wide, "accumulate in float32", kind="sum", window=window, padding=padding), out)


@constrained("cumsum", input="T1", returns="T1", T1=NUMBERS)
def cumsum(input: TensorLike, dim: int) -> Tensor:
    """Running sums along ``dim``, in the dtype of ``input``; 16-bit floats accumulate in float32, integers wrap around."""
    return record(CumSum(normalize_dim(dim, input.ndim, "cumsum")), input)
