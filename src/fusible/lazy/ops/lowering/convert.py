"""Value conversions with every edge defined, and computing in a wider dtype than that of the operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fusible.lazy import dtypes
from fusible.lazy.dtypes import dtype
from fusible.lazy.flat_ir import FlatIRTensor
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.ops.lowering.expression import Expression, redirect, splat, where

__all__ = ["Body", "bind", "compute_counted", "compute_in", "convert", "lower_cast", "single", "stored_as"]

Body = Callable[[list[FlatIRTensor], list[FlatIRTensor]], object]
"""Computes outputs from inputs: a FlatIR operation, or a function that builds several. Both are lists of tensors."""


def stored_as(of: dtype) -> dtype:
    """The dtype in which the values of a storage type are computed with, exactly: float32 for float8, int8 for int4; others themselves."""
    return dtypes.float32 if of.is_float8 else dtypes.int8 if of is dtypes.int4 else of


def single(of: dtype) -> dtype:
    """``stored_as``, and float32 for 16-bit floats: the dtype in which several operations are computed, so that the result is rounded once."""
    return dtypes.float32 if of in (dtypes.float16, dtypes.bfloat16) else stored_as(of)


def compute_in(wide: dtype, body: Body, inputs: Sequence[FlatIRTensor], output: FlatIRTensor) -> None:
    """Bind ``output`` to ``body`` of the ``inputs`` converted to ``wide``, and the result converted back (a bool result stays)."""
    reason = f"compute in {wide}"
    value = output if output.dtype in (wide, dtypes.bool) else FlatIRTensor(output.shape, wide, reason=reason)
    body([convert(x, wide, reason) for x in inputs], [value])
    if value is not output:
        lower_cast(value, output)


def compute_counted(body: Body, inputs: Sequence[FlatIRTensor], output: FlatIRTensor) -> None:
    """Bind ``output``, a bool, to ``body(inputs) != 0``, where the ``inputs`` are bools that count as 0 and 1."""
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


def bind(value: FlatIRTensor, out: FlatIRTensor) -> None:
    """Bind ``out`` to ``value``, which was emitted for it: converted, by the rules of ``lower_cast``, where it is of another dtype."""
    if value.dtype is out.dtype:
        redirect(value, out)
    else:
        lower_cast(value, out)


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
    Expression(wide, reason).clamp(out.dtype.min, out.dtype.max).to(out.dtype).bind(out)


def _to_integer(x: FlatIRTensor, out: FlatIRTensor, within: dtype | None = None) -> None:
    """Truncated toward zero, saturating at the ends of the range of ``within`` (by default the output's); NaN becomes 0.

    The largest integer may lie between two floats. Then the clamp stops at the float below it, and larger values become the integer itself.
    """
    within = within or out.dtype
    reason = f"saturate at the range of {within}"
    wide = Expression(x if x.dtype is dtypes.float64 else convert(x, dtypes.float32, reason), reason)
    number = wide.tensor.dtype.numpy.type
    top = number(within.max)
    exact = int(top) <= within.max
    below = top if exact else np.nextafter(top, number(0))
    value = wide.clamp(float(within.min), float(below)).to(out.dtype)
    if not exact:
        value = where(wide >= float(top), within.max, value)
    wide, value = wide.because("make 0 of NaN"), value.because("make 0 of NaN")
    where(wide != wide, 0, value).bind(out)
