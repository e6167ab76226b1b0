"""The same bits under another dtype."""

from __future__ import annotations

from collections.abc import Sequence

from fusible.lazy import dtypes
from fusible.lazy.dtypes import ALL
from fusible.lazy.flat_ir import FlatIRTensor
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.frontend import Rule, Tensor, TensorLike, constrained, record
from fusible.lazy.printing import Shape
from fusible.lazy.trace import TraceOp, TraceTensor

__all__ = ["Bitcast", "bitcast"]

_WHOLE = ALL - {dtypes.bool, dtypes.int4}
_ONE_WIDTH = Rule("dtypes of one width", lambda T1, T2: T1.itemsize == T2.itemsize, "use cast to convert the values")


class Bitcast(TraceOp):
    """Elements of another dtype of the same width, bit for bit."""

    dtype: dtypes.dtype

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtypes.dtype]:
        return inputs[0].shape, self.dtype

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        flat.BitcastConvertOp(list(inputs), list(outputs))


@constrained("bitcast", input="T1", dtype="T2", returns="T2", T1=_WHOLE, T2=_WHOLE, rule=_ONE_WIDTH)
def bitcast(input: TensorLike, dtype: dtypes.dtype) -> Tensor:
    """``input`` read as elements of ``dtype``, which has the same width: uint8 as float8, float32 as uint32."""
    return input if input.dtype is dtype else record(Bitcast(dtype), input)
