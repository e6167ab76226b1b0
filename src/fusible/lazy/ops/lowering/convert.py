"""Value conversions with every edge defined, and computing in a wider dtype than that of the operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fusible.lazy import dtypes
from fusible.lazy.dtypes import dtype
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.flat_ir.op import emit
from fusible.lazy.flat_ir.tensor import FlatIRTensor

__all__ = ["Body", "compute_counted", "compute_in", "convert", "lower_cast", "single", "splat", "stored_as"]

Body = Callable[[list[FlatIRTensor], list[FlatIRTensor]], object]
"""What binds outputs to a computation on inputs: a FlatIR operation, or a function that builds several."""


def splat(value: float, like: FlatIRTensor, reason: str) -> FlatIRTensor:
    """The literal ``value`` in the dtype and shape of ``like``."""
    return flat.broadcast(flat.constant(value, like.dtype, reason), like.shape, reason)


def stored_as(of: dtype) -> dtype:
    """The dtype in which the values of a storage type are computed with, exactly: float32 for float8, int8 for int4; others themselves."""
    return dtypes.float32 if of.is_float8 else dtypes.int8 if of is dtypes.int4 else of


def single(of: dtype) -> dtype:
    """``stored_as``, and float32 for 16-bit floats: what several operations in a row are computed in, to round once."""
    return dtypes.float32 if of in (dtypes.float16, dtypes.bfloat16) else stored_as(of)


def compute_in(wide: dtype, body: Body, inputs: Sequence[FlatIRTensor], output: FlatIRTensor) -> None:
    """Bind ``output`` to ``body`` of the ``inputs`` converted to ``wide``, and the result converted back (a bool result stays)."""
    reason = f"compute in {wide}"
    operands = [convert(x, wide, reason) for x in inputs]
    if output.dtype in (wide, dtypes.bool):
        body(operands, [output])
        return
    value = FlatIRTensor(output.shape, wide, reason=reason)
    body(operands, [value])
    lower_cast(value, output)


def compute_counted(body: Body, inputs: Sequence[FlatIRTensor], output: FlatIRTensor) -> None:
    """Bind ``output``, of bools, to whether ``body`` of the ``inputs``, bools that count as 0 and 1, is not 0."""
    reason = "count bools as 0 and 1"
    value = FlatIRTensor(output.shape, dtypes.int32, reason=reason)
    body([convert(x, dtypes.int32, reason) for x in inputs], [value])
    lower_cast(value, output)


def convert(x: FlatIRTensor, of: dtype, reason: str) -> FlatIRTensor:
    """``x`` as ``of``, by the rules of ``lower_cast``."""
    if x.dtype is of:
        return x
    out = FlatIRTensor(x.shape, of, reason=reason)
    lower_cast(x, out)
    return out


def lower_cast(x: FlatIRTensor, out: FlatIRTensor) -> None:
    """Bind ``out`` to the values of ``x``: saturating to float8 and from float to integer, the low bits from integer to integer."""
    if dtypes.int4 in (x.dtype, out.dtype) and x.dtype is not out.dtype:
        _by_int8(x, out)
    elif out.dtype.kind == "bool" and x.dtype.kind != "bool":
        x = convert(x, dtypes.float32, "compare a float8 with zero") if x.dtype.is_float8 else x
        flat.CompareOp([x, splat(0, x, "compare with zero")], [out], direction="NE")
    elif out.dtype.is_float8:
        _to_float8(x, out)
    elif out.dtype.is_integer and (x.dtype.is_floating or x.dtype.is_float8):
        _to_integer(x, out)
    else:
        flat.ConvertOp([x], [out])


def _by_int8(x: FlatIRTensor, out: FlatIRTensor) -> None:
    """To and from int4: engines convert it to and from int8 alone. A float saturates at int4's own range before that."""
    if dtypes.int8 in (x.dtype, out.dtype):
        flat.ConvertOp([x], [out])
        return
    between = FlatIRTensor(x.shape, dtypes.int8, reason="go by way of int8")
    if out.dtype is dtypes.int4 and (x.dtype.is_floating or x.dtype.is_float8):
        _to_integer(x, between, dtypes.int4)
    else:
        lower_cast(x, between)
    lower_cast(between, out)


def _to_float8(x: FlatIRTensor, out: FlatIRTensor) -> None:
    """Saturating: through float32 (or float64), clamped to the finite range, and rounded once. A clamp keeps NaN."""
    reason = f"saturate at the largest finite {out.dtype}"
    wide = convert(x, x.dtype if x.dtype is dtypes.float64 else dtypes.float32, reason)
    low, high = (splat(bound, wide, reason) for bound in (out.dtype.min, out.dtype.max))
    clamped = emit(flat.ClampOp, [low, wide, high], wide.shape, wide.dtype, reason)
    flat.ConvertOp([clamped], [out])


def _to_integer(x: FlatIRTensor, out: FlatIRTensor, within: dtype | None = None) -> None:
    """Truncated toward zero, saturating at the ends of the range of ``within`` (by default the output's); NaN becomes 0.

    The largest integer may lie between two floats: the clamp stops at the float below it, and what is above becomes the integer itself.
    """
    within = within or out.dtype
    reason = f"saturate at the range of {within}"
    wide = x if x.dtype is dtypes.float64 else convert(x, dtypes.float32, reason)
    top = wide.dtype.numpy.type(within.max)
    exact = int(top) <= within.max
    below = top if exact else np.nextafter(top, wide.dtype.numpy.type(0))
    low, high = splat(float(within.min), wide, reason), splat(float(below), wide, reason)
    clamped = emit(flat.ClampOp, [low, wide, high], wide.shape, wide.dtype, reason)
    value = emit(flat.ConvertOp, [clamped], wide.shape, out.dtype, reason)
    if not exact:
        over = emit(flat.CompareOp, [wide, splat(float(top), wide, reason)], wide.shape, dtypes.bool, reason, direction="GE")
        value = emit(flat.SelectOp, [over, splat(within.max, value, reason), value], wide.shape, out.dtype, reason)
    nan = emit(flat.CompareOp, [wide, wide], wide.shape, dtypes.bool, "make 0 of NaN", direction="NE")
    flat.SelectOp([nan, splat(0, value, "make 0 of NaN"), value], [out])
