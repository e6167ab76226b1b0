"""Random tensors: a function of their seed and of each element's position, the same on every engine and in any order of evaluation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from fusible.errors import ArgumentError, expected
from fusible.lazy import dtypes
from fusible.lazy.flat_ir import FlatIRTensor
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.frontend import Tensor, TensorLike, constrained, record
from fusible.lazy.ops.lowering.convert import convert, lower_cast, single
from fusible.lazy.ops.lowering.counter import digits, key_of, words
from fusible.lazy.ops.lowering.expression import Expression, splat
from fusible.lazy.printing import Shape
from fusible.lazy.trace import TraceOp, TraceTensor, broadcast_shapes

__all__ = ["RandomNormal", "RandomUniform", "RandomWords", "random_words"]


class RandomUniform(TraceOp):
    """``low + (high - low) * u`` below ``high``, under the seed that is the operand. ``u`` has as many binary digits as ``dtype``."""

    shape: Shape
    dtype: dtypes.dtype
    low: float
    high: float

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtypes.dtype]:
        return self.shape, self.dtype

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        (out,) = outputs
        wide = single(self.dtype)
        count = ml_dtypes.finfo(self.dtype.numpy).nmant + 1
        reason = "scale random bits to an interval"
        (bits,) = digits(inputs[0], self.shape, wide, count)
        u = _scaled(Expression(convert(bits, wide, reason), reason), 2.0**-count)
        if (self.low, self.high) == (0.0, 1.0):
            _round(u, out)
            return
        value = convert(_scaled(u, self.high - self.low, self.low).tensor, self.dtype, reason)
        flat.MinOp([value, splat(self._below(), value, "keep a rounded number below the upper end")], [out])

    def _below(self) -> float:
        """The largest number of the dtype that is below ``high``, or ``low`` where the interval has none."""
        kind = self.dtype.numpy.type
        top = kind(self.high)
        below = np.nextafter(top, kind(-math.inf)) if float(top) >= self.high else top
        return max(float(below), self.low)


class RandomNormal(TraceOp):
    """``mean + std * z`` under the seed that is the operand, ``z`` by Box and Muller (1958): ``sqrt(-2 log u1) * cos(2 pi u2)``, ``0 < u1 <= 1``."""

    shape: Shape
    dtype: dtypes.dtype
    mean: float
    std: float

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtypes.dtype]:
        return self.shape, self.dtype

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        wide = single(self.dtype)
        count = 53 if wide is dtypes.float64 else 32
        reason = "make two uniform numbers a normal one"
        first, second = (Expression(bits, reason) for bits in digits(inputs[0], self.shape, wide, count, draws=2))
        u1, u2 = (Expression(convert(bits.tensor, wide, reason), reason) for bits in (first + 1, second))
        radius = _scaled(_scaled(u1, 2.0**-count).log(), -2.0).sqrt()
        z = radius * _scaled(u2, math.tau * 2.0**-count).cos()
        _round(_scaled(z, self.std, self.mean), outputs[0])


class RandomWords(TraceOp):
    """The word of each counter (the second operand) under its seed (the first), with numpy's broadcasting."""

    bits: int = 32

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtypes.dtype]:
        return broadcast_shapes("random_words", *inputs), dtypes.uint64

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        shape, reason = outputs[0].shape, "give every counter its seed"
        key, counter = (flat.broadcast(x, shape, reason) for x in (key_of(inputs[0]), inputs[1]))
        flat.ReshapeOp([words(key, Expression(counter, "draw random bits"), self.bits).tensor], list(outputs))


@constrained(seed="T1", counter="T1", returns="T1", T1={dtypes.uint64})
def random_words(seed: TensorLike, counter: TensorLike, bits: int = 32) -> Tensor:
    """The random word of each counter under its seed: values below ``2**bits``, by Squares32 where ``bits`` is 32, by Squares64 where it is 64
    (Widynski 2020, arXiv:2004.06278). Raises ``ArgumentError`` for another number."""
    if bits not in (32, 64):
        raise ArgumentError(expected("32 or 64", of="bits of random_words", got=repr(bits), do="pass one of them"))
    return record(RandomWords(bits), seed, counter)


def _scaled(x: Expression, factor: float, shift: float = 0.0) -> Expression:
    """``x * factor + shift``, without what changes nothing."""
    scaled = x.because("scale random numbers")
    scaled = scaled * factor if factor != 1 else scaled
    scaled = scaled + shift if shift else scaled
    return scaled.because(x.reason)


def _round(x: Expression, out: FlatIRTensor) -> None:
    """Bind ``out`` to the values of ``x``, rounded to its dtype where that is narrower."""
    if x.tensor.dtype is out.dtype:
        flat.ReshapeOp([x.tensor], [out])
    else:
        lower_cast(x.tensor, out)
