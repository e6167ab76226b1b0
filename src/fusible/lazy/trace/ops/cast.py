"""Conversion of values between dtypes, with every edge defined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fusible.lazy import dtypes
from fusible.lazy.dtypes import check_dtype
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.flat_ir.op import emit
from fusible.lazy.flat_ir.tensor import FlatIRTensor
from fusible.lazy.frontend.convert import TensorLike, as_tensor
from fusible.lazy.frontend.registry import TENSOR_METHOD_REGISTRY
from fusible.lazy.frontend.tensor import Tensor, record
from fusible.lazy.printing import Shape
from fusible.lazy.trace.op import TraceOp
from fusible.lazy.trace.tensor import TraceTensor

__all__ = ["Cast", "cast"]


@dataclass(eq=False)
class Cast(TraceOp):
    """Every element converted to ``dtype``."""

    dtype: dtypes.dtype

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtypes.dtype]:
        return inputs[0].shape, self.dtype

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        x, out = inputs[0], outputs[0]
        if out.dtype.kind == "bool" and x.dtype.kind != "bool":
            _to_bool(x, out)
        elif out.dtype.is_float8:
            _to_float8(x, out)
        elif out.dtype.is_integer and (x.dtype.is_floating or x.dtype.is_float8):
            _to_integer(x, out)
        else:
            flat.ConvertOp([x], [out])


def _splat(value: float, like: FlatIRTensor, reason: str) -> FlatIRTensor:
    return flat.broadcast(flat.constant(value, like.dtype, reason), like.shape, reason)


def _as(x: FlatIRTensor, of: dtypes.dtype, reason: str) -> FlatIRTensor:
    return x if x.dtype is of else emit(flat.ConvertOp, [x], x.shape, of, reason)


def _to_bool(x: FlatIRTensor, out: FlatIRTensor) -> None:
    if x.dtype.is_float8:
        x = _as(x, dtypes.float32, "compare a float8 with zero")
    flat.CompareOp([x, _splat(0, x, "compare with zero")], [out], direction="NE")


def _to_float8(x: FlatIRTensor, out: FlatIRTensor) -> None:
    """Saturating: through float32 (or float64), clamped to the finite range, and rounded once. A clamp keeps NaN."""
    reason = f"saturate at the largest finite {out.dtype}"
    wide = _as(x, x.dtype if x.dtype is dtypes.float64 else dtypes.float32, reason)
    low, high = (_splat(bound, wide, reason) for bound in (out.dtype.min, out.dtype.max))
    clamped = emit(flat.ClampOp, [low, wide, high], wide.shape, wide.dtype, reason)
    flat.ConvertOp([clamped], [out])


def _to_integer(x: FlatIRTensor, out: FlatIRTensor) -> None:
    """Truncated toward zero, saturating at the ends of the integer's range; NaN becomes 0.

    The largest integer may lie between two floats: the clamp stops at the float below it, and what is above becomes the integer itself.
    """
    reason = f"saturate at the range of {out.dtype}"
    wide = x if x.dtype is dtypes.float64 else _as(x, dtypes.float32, reason)
    top = wide.dtype.numpy.type(out.dtype.max)
    exact = int(top) <= out.dtype.max
    below = top if exact else np.nextafter(top, wide.dtype.numpy.type(0))
    low, high = _splat(float(out.dtype.min), wide, reason), _splat(float(below), wide, reason)
    clamped = emit(flat.ClampOp, [low, wide, high], wide.shape, wide.dtype, reason)
    value = emit(flat.ConvertOp, [clamped], wide.shape, out.dtype, reason)
    if not exact:
        over = emit(flat.CompareOp, [wide, _splat(float(top), wide, reason)], wide.shape, dtypes.bool, reason, direction="GE")
        value = emit(flat.SelectOp, [over, _splat(out.dtype.max, value, reason), value], wide.shape, out.dtype, reason)
    nan = emit(flat.CompareOp, [wide, wide], wide.shape, dtypes.bool, "make 0 of NaN", direction="NE")
    flat.SelectOp([nan, _splat(0, value, "make 0 of NaN"), value], [out])


@TENSOR_METHOD_REGISTRY("cast")
def cast(x: TensorLike, dtype: dtypes.dtype) -> Tensor:
    """``x`` with every element converted to ``dtype``.

    To a float: rounded to nearest even (overflow gives infinity). To a float8: rounded to nearest even, *saturating*: beyond the largest
    finite value (448 for float8, 57344 for float8e5m2), infinities included, that value; NaN stays NaN. Float to integer: truncated toward
    zero, saturating at the integer's range, NaN gives 0. Integer to narrower integer: the low bits. To bool: whether it is not 0.
    """
    x = as_tensor(x)
    return x if x.dtype is check_dtype(dtype) else record(Cast(dtype), x)
