"""Computing operations on constants at compile time, where the result is exact and small."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from fusible.lazy import dtypes
from fusible.lazy.dims import is_static
from fusible.lazy.flat_ir import ops as flat_ops
from fusible.lazy.flat_ir.flat_ir import Change, FlatIR
from fusible.lazy.flat_ir.op import FlatIROp
from fusible.lazy.flat_ir.ops import ConstantOp
from fusible.lazy.flat_ir.passes.rewrite import Rewrite, fresh

__all__ = ["FOLDED", "MAX_ELEMENTS", "constant_folding"]

MAX_ELEMENTS = 16
"""The largest constant that is made: a program must not grow by its literals."""

Array = np.ndarray[Any, Any]


def constant_folding(flat: FlatIR) -> FlatIR:
    """Replace operations on constants by the constants that they compute, of one to ``MAX_ELEMENTS`` elements.

    The result has the bits that running the operation gives. So an operation is not folded where engines may differ: transcendental functions,
    sums, NaN, float subnormals (which XLA's arithmetic flushes to zero), integer division by zero, and conversions that round twice.
    """
    rewrite = Rewrite(flat)
    for op in flat.ops:
        operands = rewrite.operands(op)
        value = _fold(op, [t.producer for t in operands]) if operands and type(op) in FOLDED else None
        if value is None:
            rewrite.keep(op, operands)
            continue
        out = fresh(op.outputs[0])
        literal = ConstantOp([], [out], _plain(value, out.dtype), out.dtype, out.device)
        literal.label, literal.origin = op.label, op.origin
        rewrite.ops.append(literal)
        rewrite.replace(op.outputs, [out], Change("folded", (out.name,)))
    return rewrite.done()


def _fold(op: FlatIROp, producers: Sequence[FlatIROp | None]) -> Array | None:
    """The value of ``op``, or ``None`` where it is unknown, large or not exact."""
    out = op.outputs[0]
    literals = [p for p in producers if isinstance(p, ConstantOp)]
    if len(literals) != len(producers) or not is_static(out.shape) or op.check() is not None or not 0 < math.prod(out.shape) <= MAX_ELEMENTS:
        return None
    arrays = [literal.array() for literal in literals]
    with np.errstate(all="ignore"):
        value = None if any(map(_is_delicate, arrays)) else FOLDED[type(op)](op, *arrays)
        if value is None or _is_delicate(value):
            return None
    assert value.dtype == out.dtype.numpy and value.shape == out.shape, f"{op} was folded to {value.dtype} {value.shape}"
    return value


def _is_delicate(array: Array) -> bool:
    """Whether a float array holds a NaN or a subnormal."""
    of = dtypes.from_numpy(array.dtype)
    if not (of.is_floating or of.is_float8):
        return False
    wide = array.astype(np.float64)
    return bool((np.isnan(wide) | ((wide != 0) & (np.abs(wide) < float(ml_dtypes.finfo(of.numpy).smallest_normal)))).any())


def _plain(array: Array, of: dtypes.dtype) -> Any:
    """The literal's Python numbers."""
    return (array.astype(np.float64) if of.is_floating or of.is_float8 else array.astype(object)).tolist()


def _numpy(function: Callable[..., Any]) -> Callable[..., Array | None]:
    return lambda op, *arrays: np.asarray(function(*arrays))


def _arithmetic(function: Callable[..., Any]) -> Callable[..., Array | None]:
    """Integers wrap around; floats round once, 16-bit ones by way of float32, which has more than twice their bits."""
    return lambda op, *arrays: np.asarray(function(*arrays)).astype(arrays[0].dtype)


def _divide(op: FlatIROp, a: Array, b: Array) -> Array | None:
    """Integer division truncates; by zero, and of the smallest by -1, it is up to the engine."""
    of = op.outputs[0].dtype
    if of.is_floating:
        return np.asarray(a / b).astype(a.dtype)
    whole, parts = a.astype(object), b.astype(object)
    if (parts == 0).any() or ((whole == of.min) & (parts == -1)).any():
        return None
    return np.asarray(np.abs(whole) // np.abs(parts) * np.sign(whole) * np.sign(parts)).astype(a.dtype)


def _extreme(function: Callable[..., Any]) -> Callable[..., Array | None]:
    def fold(op: FlatIROp, a: Array, b: Array) -> Array | None:
        zeros = (a == 0) & (b == 0)
        return None if zeros.any() and op.outputs[0].dtype.is_floating else np.asarray(function(a, b))

    return fold


_DIRECTIONS = {"EQ": np.equal, "NE": np.not_equal, "LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal}


def _compare(op: flat_ops.CompareOp, a: Array, b: Array) -> Array:
    return np.asarray(_DIRECTIONS[op.direction](a, b))


_ROUNDS_ONCE = {np.dtype(np.float32): (2, 1), np.dtype(np.float64): (4,)}
"""The item sizes of the floats that numpy rounds a float to in one step."""


def _convert(op: FlatIROp, a: Array) -> Array | None:
    """Exact conversions, and those of float32 to a narrower float and float64 to float32; none that overflows."""
    of, source = op.outputs[0].dtype, dtypes.from_numpy(a.dtype)
    if of.kind == "bool":
        return None
    if source.is_floating and of.is_integer:
        whole = np.trunc(a.astype(np.float64))
        inside = np.isfinite(whole) & (whole >= float(of.min)) & (whole < float(of.max))
        return np.array([int(v) for v in whole.ravel()], object).reshape(a.shape).astype(of.numpy) if inside.all() else None
    made = np.asarray(a.astype(of.numpy))
    if source.is_integer and of.is_integer:
        return made
    exact = bool((made.astype(object if source.is_integer else np.float64) == a.astype(object if source.is_integer else np.float64)).all())
    rounds_once = (of.is_floating or of.is_float8) and made.itemsize in _ROUNDS_ONCE.get(a.dtype, ())
    return made if exact or (rounds_once and np.isfinite(made.astype(np.float64)).all()) else None


def _broadcast(op: flat_ops.BroadcastOp, a: Array) -> Array:
    shape: list[int] = [1] * len(op.outputs[0].shape)
    for size, dim in zip(a.shape, op.broadcast_dim, strict=True):
        shape[dim] = size
    order = np.argsort(op.broadcast_dim) if op.broadcast_dim else []
    return np.broadcast_to(a.transpose(order).reshape(shape), op.outputs[0].shape)


def _reshape(op: FlatIROp, a: Array) -> Array:
    return a.reshape(op.outputs[0].shape)


def _slice(op: flat_ops.SliceOp, a: Array) -> Array:
    return a[tuple(map(slice, op.start, op.limit, op.stride))]


def _transpose(op: flat_ops.TransposeOp, a: Array) -> Array:
    return a.transpose(op.perm)


def _concatenate(op: flat_ops.ConcatenateOp, *arrays: Array) -> Array:
    return np.concatenate(arrays, op.dim)


FOLDED: dict[type[FlatIROp], Callable[..., Array | None]] = {
    flat_ops.AbsOp: _numpy(np.abs),
    flat_ops.AddOp: _arithmetic(np.add),
    flat_ops.AndOp: _numpy(np.bitwise_and),
    flat_ops.BroadcastOp: _broadcast,
    flat_ops.CompareOp: _compare,
    flat_ops.ConcatenateOp: _concatenate,
    flat_ops.ConvertOp: _convert,
    flat_ops.DivideOp: _divide,
    flat_ops.MaxOp: _extreme(np.maximum),
    flat_ops.MinOp: _extreme(np.minimum),
    flat_ops.MulOp: _arithmetic(np.multiply),
    flat_ops.NegateOp: _numpy(np.negative),
    flat_ops.NotOp: _numpy(np.bitwise_not),
    flat_ops.OrOp: _numpy(np.bitwise_or),
    flat_ops.ReshapeOp: _reshape,
    flat_ops.SelectOp: _numpy(np.where),
    flat_ops.SliceOp: _slice,
    flat_ops.SubtractOp: _arithmetic(np.subtract),
    flat_ops.TransposeOp: _transpose,
    flat_ops.XorOp: _numpy(np.bitwise_xor),
}
"""By operation the function that folds it: it computes the value from arrays, and returns ``None`` where engines may differ."""
