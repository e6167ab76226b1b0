"""One record per operation of the lazy compiler: how to sample operands, a float64 reference in numpy, the dtypes, the error allowed."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fusible import lazy

FLOATS = (lazy.float32, lazy.float16, lazy.bfloat16, lazy.float64)
INTS = (lazy.int8, lazy.int32, lazy.int64, lazy.uint8, lazy.uint32, lazy.uint64)
SIGNED = (lazy.float32, lazy.bfloat16, lazy.float64, lazy.int8, lazy.int32, lazy.int64)
BOOL = (lazy.bool,)
ALL = FLOATS + INTS + BOOL
STORED = (lazy.float8, lazy.float8e5m2, lazy.int4)
MOVED = (*ALL, *STORED)

SHAPES = ((), (1,), (7,), (3, 5), (0, 4), (2, 1, 9))
PAIRS = (((), ()), ((7,), (7,)), ((3, 5), (5,)), ((3, 1), (1, 4)), ((0, 4), (4,)), ((2, 1, 3), (4, 1)))
SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 0.5, -2.5])

Operands = list[np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Op:
    """``call`` on lazy tensors against ``reference`` on the same values (floats as float64), for every sample and dtype.

    The error allowed is ``ulps`` epsilons of the dtype (never below those of ``floor``), relative to the larger of the reference and
    ``scale(operands)``: a reduction of n elements passes n epsilons of the sum of magnitudes. 0 ulps means equal.
    """

    name: str
    call: Callable[..., Any]
    reference: Callable[..., Any]
    samples: Callable[[lazy.dtype, np.random.Generator], Sequence[Operands]]
    dtypes: tuple[lazy.dtype, ...] = FLOATS
    ulps: float = 0.0
    scale: Callable[..., Any] | None = None


def values(of: lazy.dtype, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray[Any, Any]:
    if of.kind == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if of.is_integer:
        return rng.integers(0 if of.kind == "uint" else -9, 10, shape).astype(of.numpy)
    return (rng.standard_normal(shape) * 2).astype(of.numpy)


def unary(of: lazy.dtype, rng: np.random.Generator) -> list[Operands]:
    samples = [[values(of, shape, rng)] for shape in SHAPES]
    return [*samples, [SPECIAL.astype(of.numpy)]] if of.is_floating else samples


def positive(of: lazy.dtype, rng: np.random.Generator) -> list[Operands]:
    return [[np.abs(x)] for (x,) in unary(of, rng)]


def binary(of: lazy.dtype, rng: np.random.Generator) -> list[Operands]:
    samples = [[values(of, a, rng), values(of, b, rng)] for a, b in PAIRS]
    if of.is_floating:
        grid = np.meshgrid(SPECIAL, SPECIAL)
        samples.append([g.ravel().astype(of.numpy) for g in grid])
    return samples


def some(of: lazy.dtype, rng: np.random.Generator) -> list[Operands]:
    """One tensor with values of either sign, and the special ones of a float."""
    return [[values(of, (3, 1, 5), rng)], *([[SPECIAL.astype(of.numpy)]] if of.is_floating else [])]


def some_pairs(of: lazy.dtype, rng: np.random.Generator) -> list[Operands]:
    """Operands of either sign that broadcast, and the special values: the ends of the range of an integer or a float8."""
    edges = SPECIAL if of.is_floating else np.array([0.5, -2.5, of.max, of.min, np.nan])
    if of.is_integer:
        edges = np.array([of.min, of.max, 0, 1, 3, of.max - 1, *((-1, -2, -3) if of.kind == "int" else ())], object)
    grid = np.meshgrid(edges.astype(of.numpy), edges.astype(of.numpy))
    return [[values(of, (2, 1, 3), rng), values(of, (4, 1), rng)], [g.ravel() for g in grid]]


def shifts(of: lazy.dtype, rng: np.random.Generator) -> list[Operands]:
    return [[values(of, a, rng), rng.integers(0, 8 * of.itemsize, b).astype(of.numpy)] for a, b in PAIRS]


def powers(of: lazy.dtype, rng: np.random.Generator) -> list[Operands]:
    if of.is_integer:
        return [[values(of, a, rng) % of.numpy.type(4), rng.integers(0, 3, b).astype(of.numpy)] for a, b in PAIRS]
    return [[np.abs(values(of, a, rng)), values(of, b, rng)] for a, b in PAIRS]


def wheres(of: lazy.dtype, rng: np.random.Generator) -> list[Operands]:
    return [[rng.integers(0, 2, a).astype(bool), values(of, a, rng), values(of, b, rng)] for a, b in PAIRS]


def of_shapes(*shapes: tuple[tuple[int, ...], ...]) -> Callable[[lazy.dtype, np.random.Generator], list[Operands]]:
    return lambda of, rng: [[values(of, shape, rng) for shape in group] for group in shapes]


def _logical_shift_right(a: Any, b: Any) -> Any:
    unsigned = f"u{a.dtype.itemsize}"
    return (a.view(unsigned) >> b.view(unsigned)).view(a.dtype)


def _magnitude(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *operands: function(*(np.abs(x.astype(np.float64)) for x in operands))


def _softmax(x: Any) -> Any:
    if not x.size:
        return x
    grown = np.exp(x - x.max(-1, keepdims=True))
    return grown / grown.sum(-1, keepdims=True)


def _wrapped(value: int, of: np.dtype[Any]) -> int:
    bits = 8 * of.itemsize
    low = value % (1 << bits)
    return low - (1 << bits) if of.kind == "i" and low >> (bits - 1) else low


def _truncated(a: Any, b: Any) -> Any:
    """Integer division toward zero, by Python's integers; 0 where it is by 0."""
    of = np.asarray(a).dtype
    quotients = [
        0 if not y else _wrapped(abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1), of)
        for x, y in zip(*(part.ravel().tolist() for part in np.broadcast_arrays(a, b)), strict=True)
    ]
    return np.array(quotients, of).reshape(np.broadcast_shapes(np.shape(a), np.shape(b)))


def _by_float32(function: Callable[..., Any]) -> Callable[..., Any]:
    """What ``function`` of storage types is: computed in float32, saturating in the same type."""

    def reference(*operands: Any) -> Any:
        of = lazy.dtypes.from_numpy(operands[0].dtype)
        result = function(*(x.astype(np.float32) for x in operands))
        return result if result.dtype == np.bool_ else np.clip(result, of.min, of.max).astype(of.numpy)

    return reference


def _gelu(x: Any) -> Any:
    return 0.5 * x * (1 + np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2)))


def _integer_mean(x: Any) -> Any:
    total = x.sum(-1, dtype=np.uint64 if x.dtype.kind == "u" else np.int64)
    return _truncated(total, total.dtype.type(x.shape[-1])).astype(x.dtype)


_BLOCKS = of_shapes(((6,),), ((3, 5),), ((4, 1, 6),), ((3, 65),))
_FULL = of_shapes(((),), ((7,),), ((3, 5),), ((0, 4),), ((5, 64),))
_NONE_EMPTY = of_shapes(((7,),), ((3, 5),), ((5, 64),))
_MATMUL = (
    ((3, 4), (4, 5)),
    ((1, 1), (1, 1)),
    ((4,), (4, 5)),
    ((3, 4), (4,)),
    ((4,), (4,)),
    ((2, 3, 4), (4, 5)),
    ((2, 1, 3, 4), (5, 4, 2)),
    ((3, 0), (0, 2)),
    ((0, 3), (3, 2)),
)
_NUMBERS = FLOATS + INTS

TABLE: tuple[Op, ...] = (
    Op("abs", lazy.abs, np.abs, unary, SIGNED),
    Op("neg", lazy.neg, np.negative, unary, SIGNED),
    Op("sign", lazy.sign, np.sign, unary, SIGNED),
    Op("floor", lazy.floor, np.floor, unary),
    Op("is_finite", lazy.is_finite, np.isfinite, unary),
    Op("exp", lazy.exp, np.exp, unary, ulps=4),
    Op("log", lazy.log, np.log, positive, ulps=4),
    Op("sin", lazy.sin, np.sin, unary, ulps=4),
    Op("cos", lazy.cos, np.cos, unary, ulps=4),
    Op("erfc", lazy.erfc, np.vectorize(math.erfc, otypes="d"), unary, ulps=4, scale=np.ones_like),
    Op("tanh", lazy.tanh, np.tanh, unary, ulps=6),
    Op("sqrt", lazy.sqrt, np.sqrt, positive, ulps=1),
    Op("rsqrt", lazy.rsqrt, lambda x: 1 / np.sqrt(x), positive, ulps=2),
    Op("sigmoid", lazy.sigmoid, lambda x: 1 / (1 + np.exp(-x)), unary, ulps=6),
    Op("logical_not", lazy.logical_not, np.logical_not, unary, BOOL),
    Op("bitwise_not", lazy.bitwise_not, np.bitwise_not, unary, INTS + BOOL),
    Op("add", lazy.add, np.add, binary, _NUMBERS, ulps=0.5),
    Op("sub", lazy.sub, np.subtract, binary, _NUMBERS, ulps=0.5),
    Op("mul", lazy.mul, np.multiply, binary, _NUMBERS, ulps=0.5),
    Op("div", lazy.div, np.divide, binary, ulps=1),
    Op("pow", lazy.pow, np.power, powers, _NUMBERS, ulps=16),
    Op("maximum", lazy.maximum, np.maximum, binary, ALL),
    Op("minimum", lazy.minimum, np.minimum, binary, ALL),
    Op("equal", operator.eq, np.equal, binary, ALL),
    Op("not_equal", operator.ne, np.not_equal, binary, ALL),
    Op("less", operator.lt, np.less, binary, ALL),
    Op("less_equal", operator.le, np.less_equal, binary, ALL),
    Op("greater", operator.gt, np.greater, binary, ALL),
    Op("greater_equal", operator.ge, np.greater_equal, binary, ALL),
    Op("logical_and", lazy.logical_and, np.logical_and, binary, BOOL),
    Op("logical_or", lazy.logical_or, np.logical_or, binary, BOOL),
    Op("logical_xor", lazy.logical_xor, np.logical_xor, binary, BOOL),
    Op("bitwise_and", lazy.bitwise_and, np.bitwise_and, binary, INTS + BOOL),
    Op("bitwise_or", lazy.bitwise_or, np.bitwise_or, binary, INTS + BOOL),
    Op("bitwise_xor", lazy.bitwise_xor, np.bitwise_xor, binary, INTS + BOOL),
    Op("shift_left", lazy.shift_left, np.left_shift, shifts, INTS),
    Op("shift_right_logical", lazy.shift_right_logical, _logical_shift_right, shifts, INTS),
    Op("where", lazy.where, np.where, wheres, MOVED),
    Op("sum", lazy.sum, np.sum, _FULL, FLOATS, ulps=64, scale=_magnitude(np.sum)),
    Op("sum of rows", lambda x: x.sum(-1, keepdim=True), lambda x: x.sum(-1, keepdims=True), _BLOCKS, FLOATS, ulps=65,
       scale=_magnitude(lambda x: x.sum(-1, keepdims=True))),
    Op("sum of integers", lambda x: x.sum(0), lambda x: x.sum(0, dtype=x.dtype), _BLOCKS, INTS),
    Op("prod", lambda x: lazy.prod(x, -1), lambda x: np.prod(x, -1, dtype=x.dtype), of_shapes(((6,),), ((3, 5),), ((3, 0),)), _NUMBERS, ulps=6),
    Op("max", lambda x: x.max((0, -1)), lambda x: x.max((0, -1)), of_shapes(((3, 5),), ((4, 1, 6),)), _NUMBERS),
    Op("min", lambda x: x.min(-1, True), lambda x: x.min(-1, keepdims=True), _BLOCKS, _NUMBERS),
    Op("max with NaN", lazy.max, np.max, lambda of, rng: [[SPECIAL.astype(of.numpy)]], FLOATS),
    Op("mean", lambda x: x.mean(-1), lambda x: x.mean(-1), _NONE_EMPTY, ulps=64, scale=_magnitude(lambda x: x.mean(-1))),
    Op("all", lambda x: x.all(-1), lambda x: x.all(-1), _BLOCKS, BOOL),
    Op("any", lambda x: x.any(), lambda x: x.any(), _FULL, BOOL),
    Op("argmax", lambda x: x.argmax(-1), lambda x: x.argmax(-1).astype(np.int32), _BLOCKS, _NUMBERS),
    Op("argmin", lazy.argmin, lambda x: x.argmin().astype(np.int32), _BLOCKS, _NUMBERS),
    Op("argmax with NaN", lazy.argmax, lambda x: x.argmax().astype(np.int32), lambda of, rng: [[SPECIAL.astype(of.numpy)]], FLOATS),
    Op("cumsum", lambda x: x.cumsum(0), lambda x: x.cumsum(0, dtype=x.dtype), of_shapes(((7,),), ((5, 3),), ((0, 4),), ((300, 2),)), _NUMBERS,
       ulps=300, scale=_magnitude(lambda x: x.cumsum(0))),
    Op("softmax", lambda x: lazy.softmax(x, -1), _softmax, of_shapes(((7,),), ((3, 65),), ((0, 4),)), ulps=65),
    Op("matmul", lazy.matmul, np.matmul, of_shapes(*_MATMUL), _NUMBERS, ulps=6, scale=_magnitude(np.matmul)),
    Op("dot_general", lambda a, b: lazy.dot_general(a, b, ((2,), (2,)), ((0,), (0,))), lambda a, b: np.einsum("bmk,bnk->bmn", a, b),
       of_shapes(((2, 3, 17), (2, 5, 17))), ulps=17, scale=_magnitude(lambda a, b: np.einsum("bmk,bnk->bmn", a, b))),
    Op("reshape", lambda x: x.reshape((-1, 2)), lambda x: x.reshape(-1, 2), of_shapes(((6,),), ((4, 3),)), MOVED),
    Op("flatten", lambda x: x.flatten(1), lambda x: x.reshape(x.shape[0], -1), of_shapes(((2, 3, 4),), ((5, 1),)), MOVED),
    Op("transpose", lambda x: x.transpose(0, -1), lambda x: x.swapaxes(0, -1), of_shapes(((2, 3, 4),), ((0, 4),)), MOVED),
    Op("permute", lambda x: x.permute((2, 0, 1)), lambda x: x.transpose(2, 0, 1), of_shapes(((2, 3, 4),)), MOVED),
    Op("expand", lambda x: x.expand((2, -1, 5)), lambda x: np.broadcast_to(x, (2, 3, 5)), of_shapes(((3, 1),), ((1, 3, 5),)), MOVED),
    Op("squeeze", lambda x: x.squeeze(1), lambda x: x.squeeze(1), of_shapes(((2, 1, 4),)), MOVED),
    Op("unsqueeze", lambda x: x.unsqueeze(-1), lambda x: x[..., None], _FULL, MOVED),
    Op("flip", lambda x: x.flip(0), lambda x: x[::-1], _BLOCKS, MOVED),
    Op("index", lambda x: x[1, ..., None, ::-2], lambda x: x[1, ..., None, ::-2], of_shapes(((3, 5),), ((2, 4, 7),)), MOVED),
    Op("slice", lambda x: x[-3:, 1:9:2], lambda x: x[-3:, 1:9:2], of_shapes(((5, 8),), ((2, 3, 2),)), MOVED),
    Op("empty slice", lambda x: x[2:1, 0], lambda x: x[2:1, 0], of_shapes(((5, 8),)), MOVED),
    Op("concatenate", lambda a, b: lazy.concatenate([a, b, a], 1), lambda a, b: np.concatenate([a, b, a], 1),
       of_shapes(((2, 3), (2, 4)), ((2, 0), (2, 1))), MOVED),
    Op("stack", lambda a, b: lazy.stack([a, b], -1), lambda a, b: np.stack([a, b], -1), of_shapes(((2, 3), (2, 3))), MOVED),
    Op("split", lambda x: lazy.split(x, [1, 0, 3], 1)[2], lambda x: x[:, 1:], of_shapes(((3, 4),)), MOVED),
    Op("pad", lambda x: x.pad([(1, 0), (0, 2)]), lambda x: np.pad(x, [(1, 0), (0, 2)]), of_shapes(((3, 4),), ((0, 2),)), ALL),
    Op("gather", lambda x: x.gather(1, lazy.Tensor([[0, -1], [3, 2]])), lambda x: np.take(x, [[0, -1], [3, 2]], 1),
       of_shapes(((3, 4),), ((2, 4, 3),)), MOVED),
    Op("relu", lazy.relu, lambda x: np.maximum(x, x.dtype.type(0)), some, ALL),
    Op("relu of storage types", lazy.relu, _by_float32(lambda x: np.maximum(x, 0)), some, STORED),
    Op("gelu", lazy.gelu, _gelu, some, ulps=4, scale=np.abs),
    Op("silu", lazy.silu, lambda x: x / (1 + np.exp(-x)), some, ulps=6),
    Op("floor_div of storage types", lambda x: x // lazy.full_like(x, 3), _by_float32(lambda x: x // 3), some, STORED),
    Op("integer division", operator.truediv, _truncated, some_pairs, INTS),
    Op("floor_div", operator.floordiv, np.floor_divide, some_pairs, _NUMBERS, ulps=0.5),
    Op("mod", operator.mod, np.mod, some_pairs, _NUMBERS, ulps=0.5),
    Op("maximum of storage types", lazy.maximum, _by_float32(np.maximum), some_pairs, STORED),
    Op("minimum of storage types", lazy.minimum, _by_float32(np.minimum), some_pairs, STORED),
    Op("less of storage types", operator.lt, _by_float32(np.less), some_pairs, STORED),
    Op("equal of storage types", operator.eq, _by_float32(np.equal), some_pairs, STORED),
    Op("sqrt of float8", lazy.sqrt, _by_float32(np.sqrt), positive, STORED[:2]),
    Op("rsqrt of float8", lazy.rsqrt, _by_float32(lambda x: 1 / np.sqrt(x)), positive, STORED[:2]),
    Op("masked_fill", lambda x: x.masked_fill(lazy.Tensor([True, False, True]), x.dtype is lazy.bool or 1),
       lambda x: np.where([True, False, True], x.dtype.type(1), x), of_shapes(((3,),), ((2, 1),), ((2, 4, 3),)), MOVED),
    Op("tril", lambda x: x.tril(-1), lambda x: np.where(np.tri(*x.shape[-2:], -1, dtype=bool), x, x.dtype.type(0)),
       of_shapes(((3, 5),), ((2, 4, 1),), ((0, 4),)), MOVED),
    Op("triu", lambda x: x.triu(2), lambda x: np.where(np.tri(*x.shape[-2:], 1, dtype=bool), x.dtype.type(0), x),
       of_shapes(((3, 5),), ((2, 4, 3),)), MOVED),
    Op("mean of integers", lambda x: x.mean(-1), _integer_mean, of_shapes(((7,),), ((3, 65),)), INTS),
    Op("var", lambda x: lazy.var(x, -1), lambda x: np.var(x, -1, ddof=1), of_shapes(((7,),), ((3, 5),), ((5, 64),)), ulps=64,
       scale=lambda x: np.square(x.astype(np.float64)).mean(-1)),
    Op("var of all, with correction", lambda x: x.var(correction=0, keepdim=True), lambda x: np.var(x, keepdims=True), _NONE_EMPTY, ulps=320,
       scale=lambda x: np.square(x.astype(np.float64)).mean(keepdims=True)),
    Op("var of one element", lazy.var, lambda x: np.array(np.nan), of_shapes(((1,),)), FLOATS),
    Op("outer", lazy.outer, np.outer, of_shapes(((3,), (5,)), ((0,), (2,)), ((1,), (1,))), ALL, ulps=0.5),
    Op("repeat", lambda x: x.repeat(3, -1), lambda x: np.repeat(x, 3, -1), of_shapes(((4,),), ((2, 3),), ((0, 2),)), MOVED),
    Op("repeat never", lambda x: x.repeat(0, 0), lambda x: np.repeat(x, 0, 0), of_shapes(((2, 3),)), FLOATS),
    Op("copy", lambda x: (x[:1] if x.ndim else x).copy(lazy.device("cpu")), lambda x: x[:1] if x.ndim else x, _FULL, MOVED),
)  # fmt: skip
