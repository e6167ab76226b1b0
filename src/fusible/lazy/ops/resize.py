"""Sampling at another resolution."""

from __future__ import annotations

import enum
import functools
import numbers
import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from fusible.errors import ArgumentError, ShapeError, expected
from fusible.lazy import dtypes
from fusible.lazy.assumptions import holds
from fusible.lazy.dims import Size, SizeLike, bounds, maximum, minimum
from fusible.lazy.dtypes import FLOATS, dtype
from fusible.lazy.flat_ir import FlatIRTensor, emit
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.frontend import Tensor, TensorLike, as_shape, constrained, record
from fusible.lazy.locate import pointing
from fusible.lazy.ops.lowering.expression import Expression
from fusible.lazy.printing import Shape
from fusible.lazy.trace import TraceOp, TraceTensor

__all__ = ["Resize", "resize"]

_A = -0.75
"""The free coefficient of the cubic convolution kernel (Keys, 1981)."""
_RESIZED = FLOATS | {dtypes.int8, dtypes.uint8}


class Resize(TraceOp):
    """``[*n]`` sampled at ``shape``. ``scales`` are the factors that the user gave; without them a dimension's factor is ``shape[d] / n[d]``."""

    class Mode(enum.Enum):
        NEAREST = "nearest"
        LINEAR = "linear"
        CUBIC = "cubic"

    mode: Mode
    shape: Shape
    scales: tuple[float, ...] | None
    align_corners: bool

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtype]:
        (x,) = inputs
        if not all(holds(n, ">=", minimum(m, 1), "the input of resize") for n, m in zip(x.shape, self.shape, strict=True)):
            raise ShapeError(expected("elements to sample", of="resize", got=f"{x} for shape {self.shape}", do="keep its empty dimensions"))
        return self.shape, x.dtype

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        x, out = inputs[0], outputs[0]
        if 0 in out.shape:
            flat.BroadcastOp([flat.constant(0, out.dtype, "fill a result without elements")], [out], broadcast_dim=[])
            return
        wide = x.dtype
        if self.mode is not self.Mode.NEAREST and (wide.is_integer or wide.itemsize == 2):
            wide = dtypes.float32
            x = emit(flat.ConvertOp, [x], x.shape, wide, "interpolate in float32")
        for dim, size in enumerate(self.shape):
            if not self._is_kept(x.shape[dim], size, dim):
                x = _SAMPLERS[self.mode](x, dim, self._source(x, dim, size))
        if wide is not out.dtype:
            _round(x, out)
        else:
            flat.ReshapeOp([x], [out])

    def _is_kept(self, n: SizeLike, size: SizeLike, dim: int) -> bool:
        return n == size and (self.mode is not self.Mode.CUBIC or self.align_corners or self.scales is None or self.scales[dim] == 1)

    def _source(self, x: FlatIRTensor, dim: int, size: SizeLike) -> Expression:
        """The position in ``x`` of each of ``size`` outputs along ``dim``, a float.

        ``i / scale`` for nearest; else ``(i + 1/2) / scale - 1/2``, or ``i (n - 1) / (size - 1)`` between aligned corners.
        """
        of = x.dtype if self.mode is not self.Mode.NEAREST else dtypes.float32
        n = x.shape[dim]
        i = Expression(emit(flat.IotaOp, [], (size,), of, _WHERE, dim=0), _WHERE)
        if self.align_corners:
            return i * _quotient(n - 1, maximum(size - 1, 1), of)
        ratio = _quotient(n, size, of) if self.scales is None else float(of.numpy.type(1 / self.scales[dim]))
        if self.mode is self.Mode.NEAREST:
            return i * ratio
        source = (i + 0.5) * ratio - 0.5
        return source if self.mode is self.Mode.CUBIC else source.maximum(0.0)


_WHERE = "find where each output samples its input"
_WEIGH = "weigh the samples of an interpolation"


def _quotient(a: SizeLike, b: SizeLike, of: dtype) -> float | FlatIRTensor:
    """The quotient of two sizes in ``of``: a literal, or what computes it at each call."""
    if not isinstance(a, Size) and not isinstance(b, Size):
        return float(of.numpy.type(a) / of.numpy.type(b))
    parts = [flat.constant(n, of, _WHERE) for n in (a, b)]  # type: ignore[arg-type] - sizes, of which literals may be made
    return emit(flat.DivideOp, parts, (), of, _WHERE)


def _read(x: FlatIRTensor, dim: int, position: Expression, offset: int = 0) -> FlatIRTensor:
    """``x`` at ``floor(position) + offset`` along ``dim``; the nearest element where that is outside."""
    index = position.to(dtypes.int32)
    index = (index + offset if offset else index).tensor
    shape = (*x.shape[:dim], *index.shape, *x.shape[dim + 1 :])
    return emit(flat.GatherOp, [x, index], shape, x.dtype, "sample an input", dim=dim)


def _weighted(samples: Sequence[FlatIRTensor], weights: Sequence[Expression], dim: int) -> FlatIRTensor:
    """The sum of ``samples``, each times its weights along ``dim``."""
    terms = []
    for sample, weight in zip(samples, weights, strict=True):
        spread = emit(flat.BroadcastOp, [weight.tensor], sample.shape, sample.dtype, _WEIGH, broadcast_dim=[dim])
        terms.append(Expression(sample, _WEIGH) * spread)
    return functools.reduce(operator.add, terms).tensor


def _nearest(x: FlatIRTensor, dim: int, source: Expression) -> FlatIRTensor:
    return _read(x, dim, source.floor())


def _linear(x: FlatIRTensor, dim: int, source: Expression) -> FlatIRTensor:
    base = source.floor()
    after = source.because(_WEIGH) - base
    return _weighted([_read(x, dim, base), _read(x, dim, base, 1)], [-after + 1.0, after], dim)


def _cubic(x: FlatIRTensor, dim: int, source: Expression) -> FlatIRTensor:
    base = source.floor()
    after = source.because(_WEIGH) - base
    before = -after + 1.0
    far = (_A, -5 * _A, 8 * _A, -4 * _A)
    near = (_A + 2, -(_A + 3), 0.0, 1.0)
    weights = [_polynomial(after + 1.0, far), _polynomial(after, near), _polynomial(before, near), _polynomial(before + 1.0, far)]
    return _weighted([_read(x, dim, base, offset) for offset in (-1, 0, 1, 2)], weights, dim)


def _polynomial(t: Expression, coefficients: Sequence[float]) -> Expression:
    """The polynomial of ``t`` with the coefficient of its highest power first, by Horner's rule."""
    value = t * coefficients[0]
    for coefficient in coefficients[1:-1]:
        value = (value + coefficient) * t
    return value + coefficients[-1]


_SAMPLERS: dict[Resize.Mode, Callable[[FlatIRTensor, int, Expression], FlatIRTensor]] = {
    Resize.Mode.NEAREST: _nearest,
    Resize.Mode.LINEAR: _linear,
    Resize.Mode.CUBIC: _cubic,
}


def _round(x: FlatIRTensor, out: FlatIRTensor) -> None:
    """Bind ``out``: a float rounded once; an integer rounded to the nearest, halves up, within its range (cubic weights overshoot)."""
    if not out.dtype.is_integer:
        flat.ConvertOp([x], [out])
        return
    nearest = (Expression(x, "round to an integer") + 0.5).floor()
    nearest.clamp(out.dtype.min, out.dtype.max).to(out.dtype).bind(out)


@constrained("resize", input="T1", returns="T1", T1=_RESIZED)
def resize(
    input: TensorLike,
    output_shape: Sequence[int] | Sequence[float] | None = None,
    mode: str = "linear",
    align_corners: bool = False,
    scales: Sequence[float] | None = None,
) -> Tensor:
    """``input`` sampled at ``output_shape``, or at ``scales`` times its shape (rounded down): one number for every dimension.
    Those of dynamic dimensions are fractions with small numbers (0.5, 1.7).

    Two overloads: ``resize(input, output_shape, mode, align_corners)`` and ``resize(input, scales, mode, align_corners)``; by position,
    numbers that are not all ints are scales. Output ``i`` of a dimension of ``n`` elements lies at ``(i + 1/2) / scale - 1/2``, or with
    ``align_corners`` at ``i (n - 1) / (size - 1)``; ``"linear"`` weighs its two neighbours, ``"cubic"`` four (with the coefficient -0.75);
    what is outside is the nearest element. ``"nearest"`` reads element ``floor(i / scale)``. A dimension that keeps its size is read as it is
    (by ``"cubic"`` only where its scale is 1). As ``torch.nn.functional.interpolate`` without antialiasing. 16-bit floats and integers are computed
    in float32 and rounded once.

    Raises ``ArgumentError`` unless one of ``output_shape`` and ``scales`` is given, for an unknown mode, and for aligned corners of
    ``"nearest"``; ``ShapeError`` for a wrong number of sizes.
    """
    if output_shape is not None and scales is None and not all(isinstance(n, numbers.Integral) or hasattr(n, "__index__") for n in output_shape):
        output_shape, scales = None, output_shape
    if (output_shape is None) == (scales is None):
        got = "neither" if scales is None else "both"
        raise ArgumentError(expected("either output_shape or scales", of="resize", got=got, do="pass one of them"))
    if mode not in _MODES:
        raise _wrong(f"one of {', '.join(map(repr, _MODES))}", "mode", mode)
    if align_corners and mode == "nearest":
        raise _wrong("False where mode is 'nearest'", "align_corners", align_corners)
    factors = None if scales is None else _factors(scales, input.ndim)
    if factors is not None:
        sizes = tuple(_times(n, f) for n, f in zip(input.trace_tensor.shape, factors, strict=True))
    else:
        sizes = as_shape(output_shape)
        if len(sizes) != input.ndim:
            error = ShapeError(expected(f"{input.ndim} sizes", of="output_shape of resize", got=sizes, do="pass one for every dimension"))
            raise pointing(error, "output_shape")
    return record(Resize(_MODES[mode], sizes, factors, bool(align_corners)), input)


_MODES = {mode.value: mode for mode in (Resize.Mode.LINEAR, Resize.Mode.NEAREST, Resize.Mode.CUBIC)}


def _factors(scales: Any, ndim: int) -> tuple[float, ...]:
    """Scales as floats; raises ``ArgumentError`` unless they are one positive finite number per dimension."""
    factors = list(scales) if isinstance(scales, Sequence | np.ndarray) else [scales]
    if len(factors) != ndim or not all(isinstance(f, numbers.Real) and 0 < float(f) < float("inf") for f in factors):
        raise _wrong(f"{ndim} finite numbers above 0", "scales", scales)
    return tuple(float(f) for f in factors)


def _times(size: SizeLike, factor: float) -> SizeLike:
    """``size * factor`` rounded down. Raises ``ArgumentError`` where no fraction of int32 gives that for every size that a call may give."""
    if not isinstance(size, Size):
        return int(size * factor)
    low, high = bounds(size)
    for fraction in (Fraction(factor), Fraction(factor).limit_denominator(1000)):
        if high * fraction.numerator < 2**31 and (fraction == factor or _agrees(fraction, factor, low, high)):
            return size * fraction.numerator // fraction.denominator
    error = expected("a fraction such as 3 / 2", of=f"the scale of a dimension of {size} elements", got=factor, do="pass output_shape, made of sizes")
    raise pointing(ArgumentError(error), "scales")


def _agrees(fraction: Fraction, factor: float, low: int, high: int) -> bool:
    """Whether both give the same for every size of a range that is short enough to try."""
    sizes = np.arange(low, min(high, low + 2**20) + 1)
    return high - low <= 2**20 and np.array_equal(sizes * fraction.numerator // fraction.denominator, (sizes * factor).astype(np.int64))


def _wrong(wanted: str, argument: str, got: object) -> ArgumentError:
    return pointing(ArgumentError(expected(wanted, of=f"{argument} of resize", got=repr(got), do="pass that")), argument)
