"""Random tensors: a function of their seed and of each element's position, the same on every engine and in any order of evaluation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from fusible.lazy import dtypes
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.flat_ir.op import FlatIROp, emit
from fusible.lazy.flat_ir.tensor import FlatIRTensor
from fusible.lazy.frontend.convert import TensorLike
from fusible.lazy.frontend.interface import constrained
from fusible.lazy.frontend.record import record
from fusible.lazy.frontend.tensor import Tensor
from fusible.lazy.ops.lowering.convert import convert, lower_cast, single, splat
from fusible.lazy.ops.lowering.counter import digits, key_of, words
from fusible.lazy.printing import Shape
from fusible.lazy.trace.broadcasting import broadcast_shapes
from fusible.lazy.trace.op import TraceOp
from fusible.lazy.trace.tensor import TraceTensor

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
        u = _scaled(convert(bits, wide, reason), 2.0**-count, 0.0)
        if (self.low, self.high) == (0.0, 1.0):
            lower_cast(u, out) if wide is not self.dtype else flat.ReshapeOp([u], [out])
            return
        value = convert(_scaled(u, self.high - self.low, self.low), self.dtype, reason)
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

        def calculate(op: type[FlatIROp], *operands: FlatIRTensor) -> FlatIRTensor:
            return emit(op, operands, self.shape, operands[0].dtype, reason)

        first, second = digits(inputs[0], self.shape, wide, count, draws=2)
        positive = calculate(flat.AddOp, first, splat(1, first, reason))
        u1, u2 = (convert(bits, wide, reason) for bits in (positive, second))
        radius = calculate(flat.SqrtOp, _scaled(calculate(flat.LogOp, _scaled(u1, 2.0**-count, 0.0)), -2.0, 0.0))
        z = calculate(flat.MulOp, radius, calculate(flat.CosineOp, _scaled(u2, math.tau * 2.0**-count, 0.0)))
        scaled = _scaled(z, self.std, self.mean)
        lower_cast(scaled, outputs[0]) if wide is not self.dtype else flat.ReshapeOp([scaled], list(outputs))


class RandomWords(TraceOp):
    """The word of each counter (the second operand) under its seed (the first), with numpy's broadcasting."""

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtypes.dtype]:
        return broadcast_shapes("random_words", *inputs), dtypes.uint64

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        shape, reason = outputs[0].shape, "give every counter its seed"
        key, counter = (flat.broadcast(x, shape, reason) for x in (key_of(inputs[0]), inputs[1]))
        flat.ReshapeOp([words(key, counter)], list(outputs))


@constrained(seed="T1", counter="T1", returns="T1", T1={dtypes.uint64})
def random_words(seed: TensorLike, counter: TensorLike) -> Tensor:
    """The random word of each counter under its seed: values below 2**32 (Squares32, Widynski 2020, arXiv:2004.06278)."""
    return record(RandomWords(), seed, counter)


def _scaled(x: FlatIRTensor, factor: float, shift: float) -> FlatIRTensor:
    """``x * factor + shift``, without what changes nothing."""
    reason = "scale random numbers"
    if factor != 1:
        x = emit(flat.MulOp, [x, splat(factor, x, reason)], x.shape, x.dtype, reason)
    return emit(flat.AddOp, [x, splat(shift, x, reason)], x.shape, x.dtype, reason) if shift else x
