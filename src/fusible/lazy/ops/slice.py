"""Regular sub-blocks of a tensor, and reversal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from fusible.lazy.dtypes import ALL, dtype, int32
from fusible.lazy.flat_ir import FlatIRTensor, emit
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.frontend import Tensor, TensorLike, constrained, normalize_dims, record
from fusible.lazy.printing import Shape
from fusible.lazy.trace import Literal, TraceOp, TraceTensor

__all__ = ["Flip", "Slice", "flip"]


class Slice(TraceOp):
    """Elements ``start, start + stride, ...`` below ``limit`` of every dimension; the frontend keeps them within bounds.

    Where a dimension is not taken whole, its start is a literal.
    """

    has_literals: ClassVar[bool] = True

    start: tuple[int, ...]
    limit: tuple[int, ...]
    stride: tuple[int, ...]

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtype]:
        bounds = zip(self.start, self.limit, self.stride, strict=True)
        return tuple([len(range(a, b, s)) if type(a) is type(b) is int else -((a - b) // s) for a, b, s in bounds]), inputs[0].dtype

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        flat.SliceOp(list(inputs), list(outputs), start=list(self.start), limit=list(self.limit), stride=list(self.stride))

    def parts(self) -> tuple[tuple[object, ...], tuple[Literal, ...]]:
        partial = self._partial()
        rest = [n if d in partial else (n, self.limit[d]) for d, n in enumerate(self._sizes())]
        return (*rest, self.stride), tuple([(self.start[d], int32) for d in partial])

    def _sizes(self) -> list[int]:
        """How far the elements that are taken reach."""
        return [b - a for a, b in zip(self.start, self.limit, strict=True)]

    def _partial(self) -> list[int]:
        """The dimensions of known size, within int32, that are not taken whole."""
        found = []
        for d, (size, reach) in enumerate(zip(self.inputs[0].shape, self._sizes(), strict=True)):
            if type(size) is type(reach) is type(self.start[d]) is int and reach != size <= int32.max:
                found.append(d)
        return found

    def to_flat_ir_reading(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor], literals: Mapping[int, FlatIRTensor]) -> None:
        (x,), sizes = inputs, self._sizes()
        read = {d: literals[i] for i, d in enumerate(self._partial()) if i in literals}
        start = [read.get(d) or flat.constant(n, int32, "hold where a slice begins") for d, n in enumerate(self.start)]
        if all(n == 1 for n in self.stride):
            flat.SliceAtOp([x, *start], list(outputs), sizes=sizes)
            return
        block = emit(flat.SliceAtOp, [x, *start], tuple(sizes), x.dtype, "hold the elements that a slice steps through", sizes=sizes)
        flat.SliceOp([block], list(outputs), start=[0] * len(sizes), limit=sizes, stride=list(self.stride))


class Flip(TraceOp):
    """Elements in reverse order along ``dims``."""

    dims: tuple[int, ...]

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        flat.FlipOp(list(inputs), list(outputs), dims=list(self.dims))


@constrained("flip", input="T1", returns="T1", T1=ALL)
def flip(input: TensorLike, dim: int | Sequence[int] | None = None) -> Tensor:
    """``input`` reversed along ``dim`` (an int, a sequence, or all of them)."""
    return record(Flip(normalize_dims(dim, input.ndim, "flip")), input)
