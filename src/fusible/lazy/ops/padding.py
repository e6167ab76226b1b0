"""What operations do on padded tensors: see ``fusible.lazy.compilation.masking``.

An elementwise operation stays as it is. An operation that mixes elements (a sum, a product of matrices) gets its neutral element in place of those
beyond the true sizes. An operation that counts from the end selects elements by the true size. All others are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fusible.lazy import dtypes
from fusible.lazy.compilation.masking import Masking, again, padding_rule
from fusible.lazy.dims import Atom, Call, Size, SizeLike, assembled, product
from fusible.lazy.frontend import Tensor, record
from fusible.lazy.operation import attribute_names
from fusible.lazy.ops import binary
from fusible.lazy.ops.argreduce import ArgReduce
from fusible.lazy.ops.binary import BinaryElementwise
from fusible.lazy.ops.cast import Cast, cast
from fusible.lazy.ops.comparison import Comparison
from fusible.lazy.ops.concatenate import Concatenate
from fusible.lazy.ops.convolution import Convolution, ConvolutionTranspose
from fusible.lazy.ops.copy import Copy
from fusible.lazy.ops.cumsum import CumSum
from fusible.lazy.ops.expand import Expand
from fusible.lazy.ops.fill import full
from fusible.lazy.ops.gather import Gather, gather
from fusible.lazy.ops.iota import Iota, iota
from fusible.lazy.ops.matmul import DotGeneral, MatrixMultiplication
from fusible.lazy.ops.pad import Pad
from fusible.lazy.ops.permute import Permute
from fusible.lazy.ops.pooling import Pooling
from fusible.lazy.ops.quantize import Dequantize, Quantize
from fusible.lazy.ops.reduce import Reduce, neutral
from fusible.lazy.ops.reshape import Reshape
from fusible.lazy.ops.resize import Resize
from fusible.lazy.ops.slice import Flip, Slice
from fusible.lazy.ops.topk import TopK
from fusible.lazy.ops.triangle import Triangle
from fusible.lazy.ops.unary import UnaryElementwise
from fusible.lazy.ops.where import Where, where
from fusible.lazy.trace import DimensionValue, Fill, TraceOp

_BY_PLACE = (BinaryElementwise, UnaryElementwise, Comparison, Cast, Where, Copy, Expand, Permute, Fill, Iota, Triangle, CumSum)
"""Operations whose elements depend on their position and on operand elements at that position or before: not on a size, nor on padding."""

_FUNCTIONS: Mapping[str, Callable[[Any, Any], Tensor]] = {
    "//": binary.floor_div,
    "%": binary.mod,
    "min": binary.minimum,
    "max": binary.maximum,
}


def _count(to: Masking, n: SizeLike) -> Tensor:
    """The true value of a size, an int32 scalar."""
    if not isinstance(n, Size) or not to.pads(n):
        return record(DimensionValue(n, dtypes.int32))
    total: Any = 0
    for monomial, factor in n.terms:
        term: Any = factor
        for atom in monomial:
            term = _atom(to, atom) * term
        total = term + total
    return total


def _atom(to: Masking, atom: Atom) -> Tensor:
    if isinstance(atom, Call):
        first, *rest = [_count(to, n) for n in atom.operands]
        for value in rest:
            first = _FUNCTIONS[atom.kind](first, value)
        return first
    return to.true[atom] if atom in to.true else _count(to, assembled({(atom,): 1}))


def _kept(to: Masking, x: Tensor, dims: Iterable[int], value: float | int | bool) -> Tensor:
    """``x`` with ``value`` in place of the elements beyond its true sizes along ``dims``."""
    shape = x.trace_tensor.shape
    for d in dims:
        if to.pads(shape[d]):
            places = iota(tuple([n if e == d else 1 for e, n in enumerate(shape)]), d, dtypes.int32)
            x = where(places < _count(to, shape[d]), x, full((), value, x.dtype))
    return x


def _picked(to: Masking, x: Tensor, dim: int, index: Tensor) -> Tensor:
    """Elements of ``x`` along ``dim``. An index out of range, which belongs to padding of the result, is clamped: it may pick any element."""
    last = _padded_size(x.trace_tensor.shape[dim]) - 1
    return gather(x, dim, binary.maximum(binary.minimum(index, last), 0))


def _padded_size(n: SizeLike) -> Tensor:
    """The value of a size of the padded tensors."""
    return record(DimensionValue(n, dtypes.int32))


@padding_rule(*_BY_PLACE)
def _by_place(to: Masking, op: TraceOp, inputs: list[Tensor]) -> Tensor:
    if to.pads([getattr(op, name) for name in attribute_names(type(op)) if name != "shape"]):
        raise to.refusal(op, "one whose attributes depend on it")
    return again(op, inputs)[0]


@padding_rule(DimensionValue)
def _size(to: Masking, op: DimensionValue, inputs: list[Tensor]) -> Tensor:
    return cast(_count(to, op.expression), op.dtype)


@padding_rule(Reduce)
def _reduce(to: Masking, op: Reduce, inputs: list[Tensor]) -> Tensor:
    return again(op, [_kept(to, inputs[0], op.dims, neutral(op.kind, inputs[0].dtype))])[0]


@padding_rule(ArgReduce)
def _argreduce(to: Masking, op: ArgReduce, inputs: list[Tensor]) -> Tensor:
    kind = Reduce.Kind.MAX if op.kind is ArgReduce.Kind.ARGMAX else Reduce.Kind.MIN
    return again(op, [_kept(to, inputs[0], [op.dim], neutral(kind, inputs[0].dtype))])[0]


@padding_rule(MatrixMultiplication)
def _matmul(to: Masking, op: MatrixMultiplication, inputs: list[Tensor]) -> Tensor:
    a, b = inputs
    return again(op, [_kept(to, a, [a.ndim - 1], 0), _kept(to, b, [b.ndim - 2], 0)])[0]


@padding_rule(DotGeneral)
def _dot(to: Masking, op: DotGeneral, inputs: list[Tensor]) -> Tensor:
    return again(op, [_kept(to, x, dims, 0) for x, dims in zip(inputs, op.contracting, strict=True)])[0]


@padding_rule(Convolution)
def _convolution(to: Masking, op: Convolution, inputs: list[Tensor]) -> Tensor:
    x, *rest = inputs
    if to.pads([t.trace_tensor.shape for t in rest]) or to.pads([getattr(op, name) for name in attribute_names(type(op))]):
        raise to.refusal(op, "a kernel or a window that depends on it")
    return again(op, [_kept(to, x, range(1, x.ndim), 0), *rest])[0]


@padding_rule(ConvolutionTranspose, Dequantize, Pooling, Quantize, Resize, TopK)
def _elsewhere(to: Masking, op: TraceOp, inputs: list[Tensor]) -> list[Tensor]:
    """Operations that are right where they mix no elements along padded dimensions: pooling mixes none along the batch, for instance."""
    shape = inputs[0].trace_tensor.shape
    mixed = [n for d, n in enumerate(shape) if d in _mixed(op, shape)]
    if to.pads([mixed, *[t.trace_tensor.shape for t in inputs[1:]]]):
        raise to.refusal(op, "one that mixes elements along it")
    return again(op, inputs)


def _mixed(op: TraceOp, shape: Sequence[SizeLike]) -> Iterable[int]:
    """The dimensions of the first operand along which a result element depends on several elements, or on one at another position."""
    if isinstance(op, TopK):
        return [op.dim]
    if isinstance(op, Resize):
        return [d for d, n in enumerate(shape) if op.shape[d] != n or (op.scales is not None and op.scales[d] != 1)]
    if isinstance(op, Pooling):
        return range(len(shape) - len(op.kernel_dims), len(shape))
    return range(1, len(shape)) if isinstance(op, ConvolutionTranspose) else ()


@padding_rule(Pad)
def _pad(to: Masking, op: Pad, inputs: list[Tensor]) -> Tensor:
    (x,) = inputs
    dims = [d for d, n in enumerate(x.trace_tensor.shape) if to.pads(n) and (op.low[d], op.high[d]) != (0, 0)]
    if to.pads(op.low) or (dims and op.mode is not Pad.Mode.CONSTANT):
        raise to.refusal(op, "a border that depends on it")
    return again(op, [_kept(to, x, dims, op.value)])[0]


@padding_rule(Gather)
def _gather(to: Masking, op: Gather, inputs: list[Tensor]) -> Tensor:
    x, index = inputs
    n = x.trace_tensor.shape[op.dim]
    if to.pads(n) and index.dtype is not dtypes.uint32:
        index = where(index < 0, index + cast(_count(to, n), index.dtype), index)
    return again(op, [x, index])[0]


@padding_rule(Flip)
def _flip(to: Masking, op: Flip, inputs: list[Tensor]) -> Tensor:
    (x,) = inputs
    shape = x.trace_tensor.shape
    fixed = tuple([d for d in op.dims if not to.pads(shape[d])])
    if fixed:
        x = record(Flip(fixed), x)
    for d in op.dims:
        if d not in fixed:
            x = _picked(to, x, d, _count(to, shape[d]) - 1 - iota((shape[d],), 0, dtypes.int32))
    return x


@padding_rule(Slice)
def _slice(to: Masking, op: Slice, inputs: list[Tensor]) -> Tensor:
    """Where the start of a slice does not depend on a true size the slice stays; along other dimensions its elements are gathered."""
    (x,) = inputs
    shape, out = x.trace_tensor.shape, op.outputs[0].shape
    moving = [d for d, start in enumerate(op.start) if to.pads(start)]
    whole = [(0, shape[d], 1) if d in moving else (op.start[d], op.limit[d], op.stride[d]) for d in range(len(shape))]
    start, limit, stride = (tuple([of[i] for of in whole]) for i in range(3))
    x = record(Slice(start, limit, stride), x)
    for d in moving:
        x = _picked(to, x, d, _count(to, op.start[d]) + iota((out[d],), 0, dtypes.int32) * op.stride[d])
    return x


@padding_rule(Concatenate)
def _concatenate(to: Masking, op: Concatenate, inputs: list[Tensor]) -> Tensor:
    """Operands are joined with their padding, which is then skipped: the index of an element grows by the padding before it."""
    (joined,) = again(op, inputs)
    sizes = [t.shape[op.dim] for t in op.inputs]
    if not to.pads(sizes[:-1]):
        return joined
    place = iota((sum(sizes),), 0, dtypes.int32)
    index, end = place, record(DimensionValue(0, dtypes.int32))
    for n in sizes[:-1]:
        true = _count(to, n)
        end = end + true
        if to.pads(n):
            index = index + where(place < end, full((), 0, dtypes.int32), _padded_size(n) - true)
    return _picked(to, joined, op.dim, index)


@padding_rule(Reshape)
def _reshape(to: Masking, op: Reshape, inputs: list[Tensor]) -> Tensor:
    """A reshape is right where a padded size is the slowest of the dimensions that are split or merged: padding then stays behind all elements."""
    for group in _aligned(inputs[0].trace_tensor.shape, op.outputs[0].shape):
        before, after = ([n for n in side if n != 1] for side in group)
        if before != after and (to.pads(before[1:]) or to.pads(after[1:]) or to.pads(before[:1]) != to.pads(after[:1])):
            raise to.refusal(op, f"one from {list(inputs[0].trace_tensor.shape)} to {list(op.outputs[0].shape)}, which would move padding in between")
    return again(op, inputs)[0]


def _aligned(before: Sequence[SizeLike], after: Sequence[SizeLike]) -> list[tuple[Sequence[SizeLike], Sequence[SizeLike]]]:
    """The smallest runs of dimensions on both sides of a reshape that hold equally many elements."""
    groups, i, j = [], 0, 0
    while i < len(before) or j < len(after):
        ends = ((a, b) for a in range(i, len(before) + 1) for b in range(j, len(after) + 1) if (a, b) != (i, j))
        ends = sorted(ends, key=sum)
        k, m = next(((a, b) for a, b in ends if product(before[i:a]) == product(after[j:b])), (len(before), len(after)))
        groups.append((before[i:k], after[j:m]))
        i, j = k, m
    return groups
