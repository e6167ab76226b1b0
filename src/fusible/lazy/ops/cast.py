"""Conversion of values between dtypes, with every edge defined."""

from __future__ import annotations

from collections.abc import Sequence

from fusible.lazy import dtypes
from fusible.lazy.dtypes import ALL
from fusible.lazy.flat_ir import FlatIRTensor
from fusible.lazy.frontend import Tensor, TensorLike, constrained, record
from fusible.lazy.ops.lowering.convert import lower_cast
from fusible.lazy.printing import Shape
from fusible.lazy.trace import TraceOp, TraceTensor

__all__ = ["Cast", "cast"]


class Cast(TraceOp):
    """Every element converted to ``dtype``."""

    dtype: dtypes.dtype

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtypes.dtype]:
        return inputs[0].shape, self.dtype

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        lower_cast(inputs[0], outputs[0])


@constrained("cast", input="T1", dtype="T2", returns="T2", T1=ALL, T2=ALL)
def cast(input: TensorLike, dtype: dtypes.dtype) -> Tensor:
    """``input`` with every element converted to ``dtype``.

    To a float: rounded to nearest even (overflow gives infinity). To a float8: rounded to nearest even, *saturating*: beyond the largest
    finite value (448 for float8, 57344 for float8e5m2), infinities included, that value; NaN stays NaN. Float to integer: truncated toward
    zero, saturating at the integer's range, NaN gives 0. Integer to narrower integer, int4 included: the low bits. To bool: whether it is not 0.
    """
    return input if input.dtype is dtype else record(Cast(dtype), input)
