"""Reductions over dimensions."""

from __future__ import annotations

import builtins
import enum
from collections.abc import Sequence

from fusible.errors import ShapeError, expected
from fusible.lazy import dtypes
from fusible.lazy.assumptions import holds
from fusible.lazy.dtypes import NUMBERS, dtype
from fusible.lazy.flat_ir import FlatIRTensor, emit
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.frontend import Tensor, TensorLike, constrained, normalize_dims, record
from fusible.lazy.ops.lowering.convert import bind, convert
from fusible.lazy.printing import Shape
from fusible.lazy.trace import TraceOp, TraceTensor

__all__ = ["Reduce", "all", "any", "max", "min", "neutral", "prod", "reduced", "sum"]


class Reduce(TraceOp):
    """One reduction over ``dims``, which stay as size 1 with ``keepdim``."""

    class Kind(enum.Enum):
        SUM = "sum"
        PROD = "prod"
        MAX = "max"
        MIN = "min"
        ALL = "and"
        ANY = "or"

    kind: Kind
    dims: tuple[int, ...]
    keepdim: bool

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtype]:
        (x,) = inputs
        if self.keepdim:
            return tuple([1 if d in self.dims else n for d, n in enumerate(x.shape)]), x.dtype
        return tuple([n for d, n in enumerate(x.shape) if d not in self.dims]), x.dtype

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        x, out = inputs[0], outputs[0]
        wide = x.dtype
        if x.dtype in (dtypes.float16, dtypes.bfloat16) and self.kind in (self.Kind.SUM, self.Kind.PROD):
            wide = dtypes.float32
            x = convert(x, wide, "accumulate in float32")
        start = flat.constant(neutral(self.kind, wide), wide, "start a reduction")
        shape = tuple(n for d, n in enumerate(x.shape) if d not in self.dims)
        reason = "reduce before rounding or reshaping"
        result = emit(flat.ReduceOp, [x, start], shape, wide, reason, kind=self.kind.value, dims=list(self.dims))
        if self.keepdim:
            flat.ReshapeOp([convert(result, out.dtype, "round a reduction once")], [out])
        else:
            bind(result, out)


def neutral(kind: Reduce.Kind, of: dtype) -> float | int | bool:
    """The neutral element of a reduction of elements of dtype ``of``: combined with any element it gives that element."""
    infinite = float("inf") if of.is_floating else None
    return {
        Reduce.Kind.SUM: 0,
        Reduce.Kind.PROD: 1,
        Reduce.Kind.MAX: of.min if infinite is None else -infinite,
        Reduce.Kind.MIN: of.max if infinite is None else infinite,
        Reduce.Kind.ALL: True,
        Reduce.Kind.ANY: False,
    }[kind]


def _extreme(kind: Reduce.Kind, input: Tensor, dim: int | Sequence[int] | None, keepdim: bool) -> Tensor:
    of, x = f"the dimensions of {kind.name.lower()}", input.trace_tensor
    if not builtins.all(holds(x.shape[d], ">=", 1, of) for d in normalize_dims(dim, input.ndim, kind.name.lower())):
        raise ShapeError(expected("at least one element", of=of, got=x, do="reduce another dimension"))
    return reduced(kind, input, dim, keepdim)


def reduced(kind: Reduce.Kind, input: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """A reduction over dimensions that may be empty. The result over no elements is the neutral element: minus infinity for the maximum."""
    return record(Reduce(kind, normalize_dims(dim, input.ndim, kind.name.lower()), keepdim), input)


@constrained("sum", input="T1", returns="T1", T1=NUMBERS)
def sum(input: TensorLike, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """The sum over ``dim`` (an int, a sequence, or all dimensions), in the dtype of ``input``.

    16-bit floats accumulate in float32 and round once; integers wrap around (cast to a wider one first).
    """
    return reduced(Reduce.Kind.SUM, input, dim, keepdim)


@constrained("prod", input="T1", returns="T1", T1=NUMBERS)
def prod(input: TensorLike, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """The product over ``dim``, accumulated as ``sum`` is."""
    return reduced(Reduce.Kind.PROD, input, dim, keepdim)


@constrained("max", input="T1", returns="T1", T1=NUMBERS)
def max(input: TensorLike, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """The largest element over ``dim``; NaN where one is NaN. Raises ``ShapeError`` over no elements."""
    return _extreme(Reduce.Kind.MAX, input, dim, keepdim)


@constrained("min", input="T1", returns="T1", T1=NUMBERS)
def min(input: TensorLike, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """The smallest element over ``dim``; NaN where one is NaN. Raises ``ShapeError`` over no elements."""
    return _extreme(Reduce.Kind.MIN, input, dim, keepdim)


@constrained("all", input="T1", returns="T1", T1={dtypes.bool})
def all(input: TensorLike, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """Whether every element over ``dim`` is true."""
    return reduced(Reduce.Kind.ALL, input, dim, keepdim)


@constrained("any", input="T1", returns="T1", T1={dtypes.bool})
def any(input: TensorLike, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """Whether some element over ``dim`` is true."""
    return reduced(Reduce.Kind.ANY, input, dim, keepdim)
