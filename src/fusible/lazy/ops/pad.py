"""A border around a tensor."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np

from fusible.errors import ArgumentError, ShapeError, expected
from fusible.lazy.assumptions import holds
from fusible.lazy.dims import SizeLike
from fusible.lazy.dtypes import ALL, dtype
from fusible.lazy.flat_ir import FlatIRTensor, emit
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.frontend import Padding, Tensor, TensorLike, constrained, padding_of, record
from fusible.lazy.locate import pointing
from fusible.lazy.ops.gather import gather
from fusible.lazy.printing import Shape
from fusible.lazy.trace import TraceOp, TraceTensor, literal

__all__ = ["Pad", "pad"]


class Pad(TraceOp):
    """``low[d]`` elements before and ``high[d]`` after the operand in every dimension: ``value``, or its own elements mirrored at the edge."""

    class Mode(enum.Enum):
        CONSTANT = "constant"
        REFLECT = "reflect"

    low: tuple[int, ...]
    high: tuple[int, ...]
    mode: Mode
    value: float | int | bool

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtype]:
        (x,) = inputs
        if self.mode is self.Mode.REFLECT and not all(_has_room(a, n, b) for a, n, b in zip(self.low, x.shape, self.high, strict=True)):
            got = f"{list(zip(self.low, self.high, strict=True))} for {x}"
            raise pointing(ShapeError(expected("fewer elements than the dimension has", of="a reflecting pad", got=got, do="pad less")), "pad")
        return tuple([a + n + b for a, n, b in zip(self.low, x.shape, self.high, strict=True)]), x.dtype

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        x, out = inputs[0], outputs[0]
        if self.mode is self.Mode.CONSTANT:
            value = flat.constant(self.value, x.dtype, "hold the value that pads")
            flat.PadOp([x, value], [out], low=list(self.low), high=list(self.high))
            return
        for dim, (before, after) in enumerate(zip(self.low, self.high, strict=True)):
            if before or after:
                n = x.shape[dim]
                parts = [_mirrored(x, dim, 1, before), x, _mirrored(x, dim, n - 1 - after, after)]
                shape = (*x.shape[:dim], before + n + after, *x.shape[dim + 1 :])
                x = emit(flat.ConcatenateOp, parts, shape, x.dtype, "join a dimension with its reflections", dim=dim)
        flat.ReshapeOp([x], [out])


def _has_room(before: SizeLike, size: SizeLike, after: SizeLike) -> bool:
    """Whether a dimension has enough elements for the reflections at its ends. A dimension that is not padded may be empty."""
    return all(n == 0 or holds(size - 1, ">=", n, "a reflecting pad") for n in (before, after))


def _mirrored(x: FlatIRTensor, dim: int, start: int, count: int) -> FlatIRTensor:
    """``count`` elements from ``start`` on along ``dim``, in reverse order."""
    reason = "reflect the elements at an edge"
    shape = (*x.shape[:dim], count, *x.shape[dim + 1 :])
    low = [start if d == dim else 0 for d in range(len(shape))]
    limit = [a + n for a, n in zip(low, shape, strict=True)]
    part = emit(flat.SliceOp, [x], shape, x.dtype, reason, start=low, limit=limit, stride=[1] * len(shape))
    return emit(flat.FlipOp, [part], shape, x.dtype, reason, dims=[dim])


def _reflected_widely(input: Tensor, pairs: Padding) -> tuple[Tensor, Padding]:
    """``input`` after reflecting each dimension that is shorter than its reflection, by a gather; and the pairs that remain to be padded."""
    left = list(pairs)
    for d, (before, after) in enumerate(pairs):
        n = input.trace_tensor.shape[d]
        if type(n) is type(before) is type(after) is int and 0 < n <= max(before, after):
            position = np.arange(-before, n + after) % max(2 * (n - 1), 1)
            input = gather(input, d, Tensor(np.minimum(position, 2 * (n - 1) - position).astype(np.int32)))
            left[d] = (0, 0)
    return input, tuple(left)


_MODES = {mode.value: mode for mode in Pad.Mode}


@constrained("pad", input="T1", returns="T1", T1=ALL)
def pad(input: TensorLike, pad: Sequence[Sequence[int]], mode: str = "constant", value: float | bool = 0) -> Tensor:
    """``input`` with ``pad[d] = (before, after)`` elements added to dimension ``d``: ``value``, or with the mode ``"reflect"`` those of ``input``
    mirrored at the first and the last, which are not repeated. A reflection longer than the dimension goes back and forth, as in numpy's ``pad``.

    Raises ``ArgumentError`` for an unknown mode and unless there is one pair of counts of at least 0 for every dimension, ``ShapeError`` where
    a dimension without elements is reflected, or one whose size a call tells is shorter than its reflection.
    """
    pairs = padding_of(pad, input.ndim, "pad", "pad")
    if mode not in _MODES:
        raise pointing(ArgumentError(expected("'constant' or 'reflect'", of="mode of pad", got=repr(mode), do="pass one of these")), "mode")
    if mode == Pad.Mode.REFLECT.value:
        input, pairs = _reflected_widely(input, pairs)
    fill = literal(bool(value) if input.dtype.kind == "bool" else value, input.dtype)
    return record(Pad(tuple(p[0] for p in pairs), tuple(p[1] for p in pairs), _MODES[mode], fill), input)
