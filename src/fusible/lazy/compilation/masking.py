"""A program of symbolic sizes as one that computes the same on padded tensors: what stands beyond the true sizes reaches no result.

Every tensor of the new program has the symbolic shape that it had, whose padded sizes now stand for buckets; its first elements along each dimension,
as many as its true size, are those of the first program, and the rest is of no meaning. True sizes are int32 scalars that the program reads.
An operation that works place by place keeps that; one that mixes places (a sum, a product of matrices) is given its neutral element in place of what
is beyond; one that counts from the end picks its elements by the true size. Whatever is none of these is refused: no result depends on padding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from fusible.errors import CompileError, expected
from fusible.lazy import dtypes
from fusible.lazy.device import DEFAULT
from fusible.lazy.dims import Atom, Call, Size, SizeLike, Symbol, assembled, evaluate, product, symbols
from fusible.lazy.frontend.record import record
from fusible.lazy.frontend.tensor import Tensor
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
from fusible.lazy.source import describe
from fusible.lazy.trace.dimension import DimensionValue
from fusible.lazy.trace.fill import Fill
from fusible.lazy.trace.op import TraceOp
from fusible.lazy.trace.storage import Input
from fusible.lazy.trace.tensor import TraceTensor
from fusible.lazy.trace.trace import Trace

__all__ = ["masked"]

_BY_PLACE = (BinaryElementwise, UnaryElementwise, Comparison, Cast, Where, Copy, Expand, Permute, Fill, Iota, Triangle, CumSum)
"""Operations of which each element depends on its place, and on the elements there or before: on no size, and on nothing beyond the true one."""

_TRIED = 4096
"""For how many values of one size an expression is tried out."""

_FUNCTIONS: Mapping[str, Callable[[Any, Any], Tensor]] = {
    "//": binary.floor_div,
    "%": binary.mod,
    "min": binary.minimum,
    "max": binary.maximum,
}


def masked(trace: Trace, padded: Sequence[Symbol]) -> Trace:
    """``trace`` on tensors that are padded where their sizes depend on the symbols ``padded``, whose true values it reads after its other inputs.

    Raises ``CompileError`` for an operation whose results would depend on what is beyond the true sizes, or for a size that may shrink as they grow.
    """
    return _Masking(trace, padded).trace


class _Masking:
    """The new program in the making. ``now`` holds for each tensor of the first what stands for it."""

    def __init__(self, trace: Trace, padded: Sequence[Symbol]) -> None:
        self.padded = frozenset(padded)
        self.now: dict[TraceTensor, Tensor] = {t: Tensor.from_trace_tensor(t) for t in trace.inputs}
        self.true: dict[Symbol, Tensor] = {}
        for i, size in enumerate(padded):
            op = Input(len(trace.inputs) + i, (), dtypes.int32)
            tensor = TraceTensor((), dtypes.int32, DEFAULT, op, (None, 0))
            tensor.name = f"true_{size.name}"
            op.bind((), (tensor,))
            self.true[size] = Tensor.from_trace_tensor(tensor)
        for op in trace.ops:
            if not all(out in self.now for out in op.outputs):
                self._rewrite(op)
        inputs = [*trace.inputs, *(t.trace_tensor for t in self.true.values())]
        self.trace = Trace([self.now[t].trace_tensor for t in trace.outputs], inputs)

    def _rewrite(self, op: TraceOp) -> None:
        if op.is_input:  # a stored tensor
            self.now[op.outputs[0]] = Tensor.from_trace_tensor(op.outputs[0])
            return
        inputs = [self.now[t] for t in op.inputs]
        touched = self.pads([t.shape for t in (*op.inputs, *op.outputs)]) or self.pads([getattr(op, f.name) for f in fields(op)])  # type: ignore[arg-type]
        if not touched:
            self.now.update(zip(op.outputs, again(op, inputs), strict=True))
            return
        for t in op.outputs:
            if not all(self._grows(n) for n in t.shape):
                raise self.refusal(op, f"sizes {list(t.shape)}, of which one may shrink as the dimension grows")
        rule = next((rule for kinds, rule in _RULES if isinstance(op, kinds)), None)
        if rule is None:
            raise self.refusal(op, "one that cannot tell padding from elements")
        made = rule(self, op, inputs)
        for old, new in zip(op.outputs, made if isinstance(made, list) else [made], strict=True):
            self.now[old] = new
            new.trace_tensor.name = new.trace_tensor.name or old.name

    def refusal(self, op: TraceOp, got: str) -> CompileError:
        names = " and ".join(repr(s.name) for s in self.padded)
        of = f"{type(op).__name__.lower()} at {describe(op.outputs[0].source)}, in a function with buckets for {names}"
        do = "compile without buckets, or pad and mask yourself"
        return CompileError(expected("an operation that is right on padded tensors", of=of, got=got, do=do))

    def pads(self, sizes: Any) -> bool:
        """Whether a size, or one in nested lists, depends on a padded one."""
        return not self.padded.isdisjoint(symbols(list(sizes) if isinstance(sizes, Iterable) else sizes))

    def _grows(self, n: SizeLike) -> bool:
        """Whether a size is known not to shrink where padded ones grow: by its signs, or tried out where it depends on one size alone."""
        if not self.pads(n):
            return True
        if len(found := symbols(n)) == 1 and (one := next(iter(found))).max - one.min < _TRIED:
            tried = [evaluate(n, {one: value}) for value in range(one.min, one.max + 1)]
            return tried == sorted(tried)
        return all(factor > 0 and all(self._atom_grows(atom) for atom in monomial) for monomial, factor in n.terms if self._in(monomial))

    def _in(self, monomial: tuple[Atom, ...]) -> bool:
        return any(self.pads(assembled({(atom,): 1})) for atom in monomial)

    def _atom_grows(self, atom: Atom) -> bool:
        if isinstance(atom, Symbol):
            return True
        whole, *rest = atom.operands
        if atom.kind == "//":
            return self._grows(whole) and not self.pads(rest)
        return all(map(self._grows, atom.operands)) if atom.kind in ("min", "max") else not self.pads(atom.operands)

    def count(self, n: SizeLike) -> Tensor:
        """The true value of a size, an int32 scalar."""
        if not isinstance(n, Size) or not self.pads(n):
            return record(DimensionValue(n, dtypes.int32))
        total: Any = 0
        for monomial, factor in n.terms:
            term: Any = factor
            for atom in monomial:
                term = self._atom(atom) * term
            total = term + total
        return total

    def _atom(self, atom: Atom) -> Tensor:
        if isinstance(atom, Call):
            first, *rest = [self.count(n) for n in atom.operands]
            for value in rest:
                first = _FUNCTIONS[atom.kind](first, value)
            return first
        return self.true[atom] if atom in self.true else self.count(assembled({(atom,): 1}))

    def kept(self, x: Tensor, dims: Iterable[int], value: float | int | bool) -> Tensor:
        """``x`` with ``value`` in place of what is beyond its true sizes along ``dims``."""
        shape = x.trace_tensor.shape
        for d in dims:
            if self.pads(shape[d]):
                places = iota(tuple([n if e == d else 1 for e, n in enumerate(shape)]), d, dtypes.int32)
                x = where(places < self.count(shape[d]), x, full((), value, x.dtype))
        return x

    def picked(self, x: Tensor, dim: int, index: Tensor) -> Tensor:
        """Elements of ``x`` along ``dim``. An index that is none (of what is beyond the true size of the result) picks any element."""
        last = self.padded_size(x.trace_tensor.shape[dim]) - 1
        return gather(x, dim, binary.maximum(binary.minimum(index, last), 0))

    def padded_size(self, n: SizeLike) -> Tensor:
        """The value of a size that is a bucket's."""
        return record(DimensionValue(n, dtypes.int32))


def again(op: TraceOp, inputs: Sequence[Tensor], **attributes: Any) -> list[Tensor]:
    """``op`` on other operands of the same shapes, recorded at the same line; ``attributes`` replace its own."""
    made = copy.copy(op)
    for name, value in attributes.items():
        setattr(made, name, value)
    types = made.infer_all(*[t.trace_tensor for t in inputs])
    outputs = []
    for old, (shape, of) in zip(op.outputs, types, strict=True):
        new = TraceTensor(shape if attributes else old.shape, of, old.device, made, old.source)
        new.name = old.name
        outputs.append(new)
    made.bind(tuple([t.trace_tensor for t in inputs]), tuple(outputs))
    return [Tensor.from_trace_tensor(t) for t in outputs]


def _by_place(to: _Masking, op: TraceOp, inputs: list[Tensor]) -> Tensor:
    if to.pads([getattr(op, f.name) for f in fields(op) if f.name != "shape"]):  # type: ignore[arg-type] - every operation is a dataclass
        raise to.refusal(op, "one whose attributes depend on it")
    return again(op, inputs)[0]


def _size(to: _Masking, op: DimensionValue, inputs: list[Tensor]) -> Tensor:
    return cast(to.count(op.expression), op.dtype)


def _reduce(to: _Masking, op: Reduce, inputs: list[Tensor]) -> Tensor:
    return again(op, [to.kept(inputs[0], op.dims, neutral(op.kind, inputs[0].dtype))])[0]


def _argreduce(to: _Masking, op: ArgReduce, inputs: list[Tensor]) -> Tensor:
    kind = Reduce.Kind.MAX if op.kind is ArgReduce.Kind.ARGMAX else Reduce.Kind.MIN
    return again(op, [to.kept(inputs[0], [op.dim], neutral(kind, inputs[0].dtype))])[0]


def _matmul(to: _Masking, op: MatrixMultiplication, inputs: list[Tensor]) -> Tensor:
    a, b = inputs
    return again(op, [to.kept(a, [a.ndim - 1], 0), to.kept(b, [b.ndim - 2], 0)])[0]


def _dot(to: _Masking, op: DotGeneral, inputs: list[Tensor]) -> Tensor:
    return again(op, [to.kept(x, dims, 0) for x, dims in zip(inputs, op.contracting, strict=True)])[0]


def _convolution(to: _Masking, op: Convolution, inputs: list[Tensor]) -> Tensor:
    x, *rest = inputs
    if to.pads([t.trace_tensor.shape for t in rest]) or to.pads([getattr(op, f.name) for f in fields(op)]):
        raise to.refusal(op, "a kernel or a window that depends on it")
    return again(op, [to.kept(x, range(1, x.ndim), 0), *rest])[0]


def _elsewhere(to: _Masking, op: TraceOp, inputs: list[Tensor]) -> list[Tensor]:
    """What mixes no places along padded dimensions, as pooling does none of the batch."""
    shape = inputs[0].trace_tensor.shape
    mixed = [n for d, n in enumerate(shape) if d in _mixed(op, shape)]
    if to.pads([mixed, *[t.trace_tensor.shape for t in inputs[1:]]]):
        raise to.refusal(op, "one that mixes elements along it")
    return again(op, inputs)


def _mixed(op: TraceOp, shape: Sequence[SizeLike]) -> Iterable[int]:
    """The dimensions of its first operand along which elements of the result depend on several places, or on another."""
    if isinstance(op, TopK):
        return [op.dim]
    if isinstance(op, Resize):
        return [d for d, n in enumerate(shape) if op.shape[d] != n or (op.scales is not None and op.scales[d] != 1)]
    if isinstance(op, Pooling):
        return range(len(shape) - len(op.kernel_dims), len(shape))
    return range(1, len(shape)) if isinstance(op, ConvolutionTranspose) else ()


def _pad(to: _Masking, op: Pad, inputs: list[Tensor]) -> Tensor:
    (x,) = inputs
    dims = [d for d, n in enumerate(x.trace_tensor.shape) if to.pads(n) and (op.low[d], op.high[d]) != (0, 0)]
    if to.pads(op.low) or (dims and op.mode is not Pad.Mode.CONSTANT):
        raise to.refusal(op, "a border that depends on it")
    return again(op, [to.kept(x, dims, op.value)])[0]


def _gather(to: _Masking, op: Gather, inputs: list[Tensor]) -> Tensor:
    x, index = inputs
    n = x.trace_tensor.shape[op.dim]
    if to.pads(n) and index.dtype is not dtypes.uint32:
        index = where(index < 0, index + cast(to.count(n), index.dtype), index)
    return again(op, [x, index])[0]


def _flip(to: _Masking, op: Flip, inputs: list[Tensor]) -> Tensor:
    (x,) = inputs
    shape = x.trace_tensor.shape
    fixed = tuple([d for d in op.dims if not to.pads(shape[d])])
    if fixed:
        x = record(Flip(fixed), x)
    for d in op.dims:
        if d not in fixed:
            x = to.picked(x, d, to.count(shape[d]) - 1 - iota((shape[d],), 0, dtypes.int32))
    return x


def _slice(to: _Masking, op: Slice, inputs: list[Tensor]) -> Tensor:
    """A slice from a place that does not depend on true sizes is the slice itself; others are picked."""
    (x,) = inputs
    shape, out = x.trace_tensor.shape, op.outputs[0].shape
    moving = [d for d, start in enumerate(op.start) if to.pads(start)]
    whole = [(0, shape[d], 1) if d in moving else (op.start[d], op.limit[d], op.stride[d]) for d in range(len(shape))]
    start, limit, stride = (tuple([of[i] for of in whole]) for i in range(3))
    x = record(Slice(start, limit, stride), x)
    for d in moving:
        x = to.picked(x, d, to.count(op.start[d]) + iota((out[d],), 0, dtypes.int32) * op.stride[d])
    return x


def _concatenate(to: _Masking, op: Concatenate, inputs: list[Tensor]) -> Tensor:
    """Operands are joined with their padding, which is then skipped: an element after it stands as much further as that is long."""
    (joined,) = again(op, inputs)
    sizes = [t.shape[op.dim] for t in op.inputs]
    if not to.pads(sizes[:-1]):
        return joined
    place = iota((sum(sizes),), 0, dtypes.int32)
    index, end = place, record(DimensionValue(0, dtypes.int32))
    for n in sizes[:-1]:
        true = to.count(n)
        end = end + true
        if to.pads(n):
            index = index + where(place < end, full((), 0, dtypes.int32), to.padded_size(n) - true)
    return to.picked(joined, op.dim, index)


def _reshape(to: _Masking, op: Reshape, inputs: list[Tensor]) -> Tensor:
    """Right where a padded size is the slowest of the dimensions that are split or merged with it: padding then stays behind all elements."""
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


_RULES: tuple[tuple[Any, Callable[[_Masking, Any, list[Tensor]], Tensor | list[Tensor]]], ...] = (
    (_BY_PLACE, _by_place),
    ((ConvolutionTranspose, Dequantize, Pooling, Quantize, Resize, TopK), _elsewhere),
    (DimensionValue, _size),
    (Reduce, _reduce),
    (ArgReduce, _argreduce),
    (MatrixMultiplication, _matmul),
    (DotGeneral, _dot),
    (Convolution, _convolution),
    (Pad, _pad),
    (Gather, _gather),
    (Flip, _flip),
    (Slice, _slice),
    (Concatenate, _concatenate),
    (Reshape, _reshape),
)
