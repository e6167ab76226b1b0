"""The largest or the mean element of every window."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

from fusible.errors import ShapeError, expected
from fusible.lazy import dtypes
from fusible.lazy.assumptions import holds
from fusible.lazy.dtypes import FLOATS, NUMBERS, dtype
from fusible.lazy.flat_ir import FlatIRTensor, emit
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.frontend import Padding, Tensor, TensorLike, constrained, padding_of, record, steps
from fusible.lazy.locate import pointing
from fusible.lazy.ops.lowering.convert import bind, convert
from fusible.lazy.printing import Shape
from fusible.lazy.trace import TraceOp, TraceTensor

__all__ = ["Pooling", "avgpool", "maxpool"]


class Pooling(TraceOp):
    """One value per window of ``[N, C, *spatial]``. ``count_include_pad`` says whether a mean counts padding among its elements."""

    class Kind(enum.Enum):
        MAX = "max"
        AVG = "sum"

    kind: Kind
    kernel_dims: tuple[int, ...]
    stride: tuple[int, ...]
    padding: Padding
    count_include_pad: bool

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtype]:
        (x,) = inputs
        what = f"{self.kind.name.lower()}pool"
        spatial = []
        for n, k, stride, (before, after) in zip(x.shape[2:], self.kernel_dims, self.stride, self.padding, strict=True):
            room = n + before + after - k
            if not holds(room, ">=", 0, f"the padded input of {what}"):
                of = f"{what} of {x}"
                raise ShapeError(expected("a padded input at least as large as the window", of=of, got=f"window {self.kernel_dims}", do="pad it"))
            spatial.append(room // stride + 1)
        return (*x.shape[:2], *spatial), x.dtype

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        x, out = inputs[0], outputs[0]
        window = {"window": [1, 1, *self.kernel_dims], "padding": [(0, 0), (0, 0), *self.padding], "stride": [1, 1, *self.stride]}
        if self.kind is self.Kind.MAX:
            least = flat.constant(float("-inf") if x.dtype.is_floating else x.dtype.min, x.dtype, "pad with what is larger than nothing")
            flat.ReduceWindowOp([x, least], [out], kind="max", **window)
            return
        reason = "take the mean of every window"
        wide = dtypes.float32 if x.dtype.itemsize < 4 else x.dtype
        x = convert(x, wide, reason)
        zero = flat.constant(0, wide, reason)
        total = emit(flat.ReduceWindowOp, [x, zero], out.shape, wide, reason, kind="sum", **window)
        counts = self._counts(x, out, window)
        bind(emit(flat.DivideOp, [total, counts], out.shape, wide, reason), out)

    def _counts(self, x: FlatIRTensor, out: FlatIRTensor, window: dict[str, list[int]]) -> FlatIRTensor:
        """The number of elements in every window: with padding the window's size, else as many ones as it covers."""
        reason = "count the elements of every window"
        if self.count_include_pad or not any(map(any, self.padding)):
            return flat.broadcast(flat.constant(math.prod(self.kernel_dims), x.dtype, reason), out.shape, reason)
        alike = (1, 1, *x.shape[2:])
        ones = flat.broadcast(flat.constant(1, x.dtype, reason), alike, reason)
        zero = flat.constant(0, x.dtype, reason)
        counted = emit(flat.ReduceWindowOp, [ones, zero], (1, 1, *out.shape[2:]), x.dtype, reason, kind="sum", **window)
        return flat.broadcast(counted, out.shape, reason)


_Window = tuple[Sequence[int], Sequence[int] | None, Sequence[Sequence[int]] | None]


def _pool(kind: Pooling.Kind, input: Tensor, window: _Window, inclusive: bool) -> Tensor:
    kernel_dims, stride, padding = window
    what = f"{kind.name.lower()}pool"
    if input.ndim < 3:
        raise pointing(ShapeError(expected("shape [N, C, *spatial]", of=f"input of {what}", got=input.trace_tensor, do="reshape it")), "input")
    rank = input.ndim - 2
    sizes = (steps(kernel_dims, rank, "kernel_dims", what), steps(stride, rank, "stride", what), padding_of(padding, rank, "padding", what))
    return record(Pooling(kind, *sizes, inclusive), input)


@constrained("maxpool", input="T1", returns="T1", T1=NUMBERS)
def maxpool(
    input: TensorLike, kernel_dims: Sequence[int], stride: Sequence[int] | None = None, padding: Sequence[Sequence[int]] | None = None
) -> Tensor:
    """The largest element of every window of ``input`` ``[N, C, *spatial]``; NaN where one is NaN.

    ``kernel_dims`` and ``stride`` (1 by default) are one int, ``padding`` (none by default) is one pair ``(before, after)`` for each spatial
    dimension; ``out = (spatial + before + after - kernel) // stride + 1``. Padding is smaller than every number: a window of nothing else
    gives minus infinity, or the smallest integer. Raises ``ShapeError`` for a window larger than the padded input, ``ArgumentError`` for an
    illegal one.
    """
    return _pool(Pooling.Kind.MAX, input, (kernel_dims, stride, padding), True)


@constrained("avgpool", input="T1", returns="T1", T1=FLOATS | {dtypes.int8})
def avgpool(
    input: TensorLike,
    kernel_dims: Sequence[int],
    stride: Sequence[int] | None = None,
    padding: Sequence[Sequence[int]] | None = None,
    count_include_pad: bool = True,
) -> Tensor:
    """The mean of every window of ``input`` ``[N, C, *spatial]``, whose zero padding counts as elements with ``count_include_pad``.

    Windows and errors are those of ``maxpool``. Without ``count_include_pad`` a window of padding alone gives NaN. 16-bit floats are computed
    in float32, rounded once; int8 too, truncated toward zero (0 for NaN).
    """
    return _pool(Pooling.Kind.AVG, input, (kernel_dims, stride, padding), bool(count_include_pad))
