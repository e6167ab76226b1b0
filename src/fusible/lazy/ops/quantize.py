"""To 8- and 4-bit values with a scale, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusible.errors import DTypeError, ShapeError, expected
from fusible.lazy import dtypes
from fusible.lazy.assumptions import holds
from fusible.lazy.dtypes import FLOAT8S, FLOATS
from fusible.lazy.flat_ir import FlatIRTensor, emit
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.frontend import Tensor, constrained, normalize_dim, record
from fusible.lazy.frontend.convert import TensorLike, is_scalar, scalar
from fusible.lazy.locate import pointing
from fusible.lazy.ops.lowering.convert import bind, convert, lower_cast, single
from fusible.lazy.ops.lowering.expression import Expression
from fusible.lazy.printing import Shape
from fusible.lazy.trace import TraceOp, TraceTensor

__all__ = ["Dequantize", "Quantize", "dequantize", "quantize"]

_QUANTIZED = FLOAT8S | {dtypes.int8, dtypes.int4}


class Quantize(TraceOp):
    """``input / scale`` rounded to ``dtype``, saturating; ``dim`` is that of a 1-dimensional scale."""

    dtype: dtypes.dtype
    dim: int | None

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtypes.dtype]:
        x, scale = inputs
        _check_scale("quantize", x, scale, self.dim)
        return x.shape, self.dtype

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        x, scale, out = inputs[0], inputs[1], outputs[0]
        of = single(x.dtype)
        reason = "divide by the scale, rounding once"
        # An engine may divide by a broadcast value by multiplying with its reciprocal. In float64 that is still close enough to round to the
        # float32 nearest to the quotient: it lies at least 2**-49 of its size from where float32 rounds the other way.
        x, scale = (convert(t, dtypes.float64, reason) for t in (x, scale))
        quotient = convert((Expression(x, reason) / _spread(scale, x, self.dim)).tensor, of, reason)
        if out.dtype.is_integer:
            quotient = emit(flat.RoundNearestEvenOp, [quotient], x.shape, of, "round a quotient to the nearest integer, ties to even")
        lower_cast(quotient, out)


class Dequantize(TraceOp):
    """``input * scale`` in ``dtype``; ``dim`` is that of a 1-dimensional scale."""

    dtype: dtypes.dtype
    dim: int | None

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtypes.dtype]:
        x, scale = inputs
        _check_scale("dequantize", x, scale, self.dim)
        return x.shape, self.dtype

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        x, scale, out = inputs[0], inputs[1], outputs[0]
        of = single(self.dtype)
        reason = "multiply by the scale, rounding once"
        x, scale = (convert(t, of, reason) for t in (x, scale))
        bind((Expression(x, reason) * _spread(scale, x, self.dim)).tensor, out)


def _check_scale(what: str, x: TraceTensor, scale: TraceTensor, dim: int | None) -> None:
    """Raise ``ShapeError`` unless ``scale`` is a scalar, one number per element of dimension ``dim``, or one per block of rows and column."""
    of = f"the scale of {what}"
    if dim is not None:
        if len(scale.shape) == 1 and holds(scale.shape[0], "==", x.shape[dim], of):
            return
        wanted, do = f"shape ({x.shape[dim]},)", f"pass one scale per element of dimension {dim}, or no dim"
    elif not scale.shape:
        return
    elif len(scale.shape) == 2 and len(x.shape) == 2:
        (rows, columns), (blocks, width) = x.shape, scale.shape
        fits = holds(width, "==", columns, of) and holds(blocks, ">=", 1, of)
        if fits and holds(rows % blocks, "==", 0, of):
            return
        wanted, do = f"a shape [a divisor of {rows}, {columns}]", "pass one scale per block of rows and column"
    else:
        wanted, do = "no dimensions without dim (or two, for blocks of a matrix)", "pass a scalar, or name the dimension"
    error = ShapeError(expected(wanted, of=f"{of} for {x}", got=scale, do=do))
    raise pointing(error, "scale")


def _spread(scale: FlatIRTensor, x: FlatIRTensor, dim: int | None) -> FlatIRTensor:
    """The scale of every element of ``x``."""
    reason = "give every element its scale"
    if dim is not None:
        return emit(flat.BroadcastOp, [scale], x.shape, scale.dtype, reason, broadcast_dim=[dim])
    if not scale.shape or scale.shape == x.shape:
        return flat.broadcast(scale, x.shape, reason)
    (rows, columns), blocks = x.shape, scale.shape[0]
    blocked = emit(flat.BroadcastOp, [scale], (blocks, rows // blocks, columns), scale.dtype, reason, broadcast_dim=[0, 2])
    return emit(flat.ReshapeOp, [blocked], x.shape, scale.dtype, reason)


def _dim(dim: Any, x: Tensor, what: str) -> int | None:
    return None if dim is None else normalize_dim(dim, x.ndim, what)


@constrained("quantize", input="T1", scale="T1", dtype="T2", returns="T2", T1=FLOATS, T2=_QUANTIZED)
def quantize(input: TensorLike, scale: TensorLike, dtype: dtypes.dtype, dim: Any = None) -> Tensor:
    """``input / scale`` rounded to nearest even in ``dtype``, *saturating* at its range; NaN gives 0 in an integer.

    The quotient is rounded to float32 first (float64 for float64). ``scale`` is a scalar; or, with ``dim``, of shape ``[input.shape[dim]]``; or,
    for a matrix ``[rows, columns]``, of shape ``[rows / block, columns]``: one number for ``block`` consecutive elements of a column.
    Raises ``ShapeError`` for another shape.
    """
    return record(Quantize(dtype, _dim(dim, input, "quantize")), input, scale)


@constrained("dequantize", input="T1", dtype="T2", returns="T2", T1=_QUANTIZED, T2=FLOATS)
def dequantize(input: TensorLike, scale: TensorLike, dtype: dtypes.dtype, dim: Any = None) -> Tensor:
    """``input * scale`` in ``dtype``, which is that of ``scale``; the shapes of ``scale`` are those of ``quantize``.

    16-bit floats are computed in float32 and rounded once. Raises ``ShapeError`` for another shape, and ``DTypeError`` for a scale of
    another dtype.
    """
    return record(Dequantize(dtype, _dim(dim, input, "dequantize")), input, _scale(scale, dtype))


def _scale(scale: Any, of: dtypes.dtype) -> Tensor:
    made = scale if isinstance(scale, Tensor) else scalar(scale, of) if is_scalar(scale) else Tensor(scale, dtype=of)
    if made.dtype is not of:
        do = "cast it, or ask for a result of its dtype"
        raise pointing(DTypeError(expected(f"dtype {of}", of="scale of dequantize", got=made.trace_tensor, do=do)), "scale")
    return made
