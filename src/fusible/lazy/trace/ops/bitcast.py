"""The same bits under another dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusible.errors import DTypeError, expected
from fusible.lazy import dtypes
from fusible.lazy.dtypes import check_dtype
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.flat_ir.tensor import FlatIRTensor
from fusible.lazy.frontend.convert import TensorLike, as_tensor
from fusible.lazy.frontend.registry import TENSOR_METHOD_REGISTRY
from fusible.lazy.frontend.tensor import Tensor, record
from fusible.lazy.printing import Shape
from fusible.lazy.trace.op import TraceOp
from fusible.lazy.trace.tensor import TraceTensor

__all__ = ["Bitcast", "bitcast"]


@dataclass(eq=False)
class Bitcast(TraceOp):
    """Elements of another dtype of the same width, bit for bit."""

    dtype: dtypes.dtype

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtypes.dtype]:
        (x,) = inputs
        if x.dtype.itemsize != self.dtype.itemsize or dtypes.bool in (x.dtype, self.dtype):
            width = f"a dtype of {8 * self.dtype.itemsize} bits other than bool"
            raise DTypeError(expected(width, of=f"the operand of a bitcast to {self.dtype}", got=x, do="use cast to convert the values"))
        return x.shape, self.dtype

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        flat.BitcastConvertOp(list(inputs), list(outputs))


@TENSOR_METHOD_REGISTRY("bitcast")
def bitcast(x: TensorLike, dtype: dtypes.dtype) -> Tensor:
    """``x`` read as elements of ``dtype``, which has the same width: uint8 as float8, float32 as uint32. Raises ``DTypeError`` else."""
    x = as_tensor(x)
    return x if x.dtype is check_dtype(dtype) else record(Bitcast(dtype), x)
