"""Evaluations that differ in literals and indices alone share a program, and have the bits of one compiled for their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fusible import lazy
from fusible.lazy.evaluation.executor import CACHE
from fusible.lazy.evaluation.program_cache import ProgramCache, _readable
from fusible.lazy.flat_ir.literals import is_special
from fusible.lazy.flat_ir.ops.constant import rounded
from fusible.lazy.trace.trace import Trace

_EDGES = [0.0, -0.0, 1e-40, -1e-40, 1.2e-38, 3e38, -3e38, float("inf"), float("nan")]
_VALUES = np.concatenate([np.random.default_rng(0).standard_normal(71) * 10, _EDGES]).astype(np.float32)
_X = lazy.Tensor(_VALUES.reshape(8, 10))
_Y = lazy.Tensor(_VALUES[::-1].reshape(8, 10))
_I = lazy.Tensor(np.array([[0, 1, -1, 7, -7, 2**31 - 1, -(2**31), 100]], np.int32))

Program = Callable[[Any], lazy.Tensor]

_FLOATS = (0.3, -2.5, 123.5)
_INTEGERS = (3, -5, 100)
_STARTS = (0, 3, 5)

_SHARED: dict[str, tuple[Program, Sequence[Any]]] = {
    "x * s": (lambda s: _X * s, _FLOATS),
    "s - x": (lambda s: s - _X, _FLOATS),
    "x / s": (lambda s: _X / s, _FLOATS),
    "s / x": (lambda s: s / _X, _FLOATS),
    "x > s": (lambda s: _X > s, _FLOATS),
    "maximum": (lambda s: lazy.maximum(_X, s), _FLOATS),
    "where": (lambda s: lazy.where(_X > _Y, s, _X), _FLOATS),
    "where of sums": (lambda s: lazy.where(_X > _Y, s, _X * _Y) + _Y, _FLOATS),
    "masked_fill": (lambda s: _X.masked_fill(_X > _Y, s), _FLOATS),
    "full": (lambda s: lazy.full((2, 3), s), _FLOATS),
    "full * x": (lambda s: lazy.full((10,), s) * _X, _FLOATS),
    "scalar full": (lambda s: lazy.full((), s), _FLOATS),
    "two": (lambda s: lazy.tanh(_X * s + (s + 1.25)), _FLOATS),
    "between functions": (lambda s: lazy.exp(lazy.relu(_X * s)).sum(0), _FLOATS),
    "a literal that stays": (lambda s: (_X + s) * 0.1, _FLOATS),
    "float16": (lambda s: _X.cast(lazy.float16) * s, _FLOATS),
    "bfloat16": (lambda s: _X.cast(lazy.bfloat16) + s, _FLOATS),
    "float64": (lambda s: _X.cast(lazy.float64) / s, _FLOATS),
    "float8": (lambda s: lazy.where(_X > _Y, s, _X.cast(lazy.float8)), (0.3, -2.5, 7.0, 123.5, 1000.0)),
    "int4": (lambda s: lazy.full((3,), s, lazy.int4), (1, 2, -3, 4)),
    "i + n": (lambda s: _I + s, (2**31 - 1, 0, *_INTEGERS)),
    "i * n": (lambda s: _I * s, (-1, 0, *_INTEGERS)),
    "i / n": (lambda s: _I / s, (-1, 0, *_INTEGERS)),
    "i // n": (lambda s: _I // s, (-1, 0, *_INTEGERS)),
    "i % n": (lambda s: _I % s, (-1, 0, *_INTEGERS)),
    "i << n": (lambda s: _I << s, (0, 31, 32, 40, 3)),
    "i == n": (lambda s: _I == s, _INTEGERS),
    "bool": (lambda s: (_X > _Y) ^ s, (False, True, False)),
    "x[i]": (lambda s: _X[s], _STARTS),
    "x[-i]": (lambda s: _X[-1 - s], _STARTS),
    "x[i, j]": (lambda s: _X[s, s + 2], _STARTS),
    "x[:, i]": (lambda s: _X[:, s], _STARTS),
    "x[i:i+3]": (lambda s: _X[s : s + 3], _STARTS),
    "x[i:i+4:2, j]": (lambda s: _X[s : s + 4 : 2, s + 1], _STARTS),
    "x[i:i-3:-1]": (lambda s: _X[s + 3 : s : -1], (0, 1, 4)),
    "x[i] computed with": (lambda s: lazy.tanh((_X * 2.0)[s] + _Y[0]), _STARTS),
}

_OWN: dict[str, tuple[Program, Sequence[Any]]] = {
    "two in a product": (lambda s: (_X * s) * 0.1, _FLOATS),
    "two in a sum": (lambda s: 0.3 - (_X + s).reshape((80,)), _FLOATS),
    "two in a product of products": (lambda s: (_X * s) * (_Y * 3.0), _FLOATS),
    "the count of a mean": (lambda s: _X.mean() * s, _FLOATS),
    "a choice, then a sum": (lambda s: lazy.where(_X > 0.25, s, _Y * 0.3) - 0.7, _FLOATS),
    "a sum of products": (lambda s: _X * s + _Y * (1.75 - s), _FLOATS),
    "a sigmoid in a product": (lambda s: lazy.sigmoid(_X.cast(lazy.float64)) * s + 0.1, _FLOATS),
    "two of which one is special": (lambda s: (_X + 1.0) - s, _FLOATS),
    "two around what is dropped": (lambda s: ((_X * s) + 0.0) * 0.1, _FLOATS),
    "two around a power that is dropped": (lambda s: (_X / s) ** 1.0 * 0.1, _FLOATS),
    "an exponent": (lambda s: _X**s, (2.0, 0.5, 3.0, -2.0)),
    "a remainder": (lambda s: _X // s, _FLOATS),
    "a function of a literal": (lambda s: lazy.tanh(lazy.full((2, 3), s)), _FLOATS),
    "special values": (lambda s: _X * s, (0.0, -0.0, 1.0, -1.0, 1e-40, float("inf"), float("nan"))),
    "special addends": (lambda s: _X + s, (0.0, -0.0, 1e-40, float("inf"), float("nan"))),
    "a shape": (lambda s: lazy.ones((s + 1,)) * _X[0, 0], _STARTS),
}


def _bits(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The bits, those of every NaN alike."""
    array = np.ascontiguousarray(array)
    if array.dtype == lazy.int4.numpy:
        array = array.astype(np.int8)
    plain = array if array.dtype.kind in "biu" else np.where(np.isnan(array.astype(np.float64)), np.asarray(np.nan, array.dtype), array)
    return np.ascontiguousarray(plain).view(np.uint8)


def _evaluate(program: Program, literals: Sequence[Any]) -> int:
    """Evaluate with each of ``literals``, compare with a program compiled for it alone, and count the compilations of the former."""
    CACHE.clear()
    before = CACHE.compiled
    for literal in literals:
        recorded = program(literal)
        trace = Trace([recorded])
        (alone,) = ProgramCache().get(trace)([storage.data for storage in trace.storages])
        got = recorded.numpy()
        assert (got.dtype, got.shape) == (alone.dtype, alone.shape)
        np.testing.assert_array_equal(_bits(got), _bits(alone), err_msg=f"literal {literal}")
    return CACHE.compiled - before


@pytest.mark.parametrize("name", _SHARED)
def test_literals_that_differ_share_a_program_from_the_second_on(name: str) -> None:
    program, literals = _SHARED[name]
    assert _evaluate(program, literals) == 2


@pytest.mark.parametrize("name", _OWN)
def test_literals_that_a_compiler_computes_with_have_programs_of_their_own(name: str) -> None:
    program, literals = _OWN[name]
    assert _evaluate(program, literals) == len(literals)


def test_a_literal_that_begins_to_differ_later_is_read_from_then_on() -> None:
    def program(pair: tuple[float, float]) -> lazy.Tensor:
        return lazy.maximum(_X * pair[0], pair[1])

    assert _evaluate(program, [(2.5, 3.0), (3.5, 3.0), (4.5, 3.0)]) == 2
    assert _evaluate(program, [(2.5, 3.0), (3.5, 3.0), (4.5, 4.0), (5.5, 5.0), (6.5, 3.0)]) == 3


def test_what_a_special_literal_joins_is_compiled_in() -> None:
    def program(three: tuple[float, float, float]) -> lazy.Tensor:
        return (_X * three[0] + three[1]) * three[2]

    assert _evaluate(program, [(2.5, 0.3, 0.1), (3.5, 0.7, 0.2), (4.5, 0.9, 0.7)]) == 2
    assert _evaluate(program, [(2.5, 0.3, 0.1), (3.5, 0.7, 0.2), (4.5, 0.0, 0.7), (5.5, 0.0, 0.7)]) == 4


@pytest.mark.parametrize("of", [lazy.float16, lazy.bfloat16, lazy.float32, lazy.float64, lazy.float8e5m2], ids=str)
def test_a_literal_is_read_unless_it_is_special_once_rounded(of: Any) -> None:
    """What is told without rounding: numbers on both sides of the borders at which a float becomes 1, a subnormal, zero or infinite."""
    facts = ml_dtypes.finfo(of.numpy)
    borders = [1.0, 1.0 + float(facts.eps), float(facts.smallest_normal), float(facts.smallest_normal) / 2, min(float(facts.max), 1e308)]
    near = [b * (1 + side * float(facts.eps) * part) for b in borders for side in (-1, 1) for part in (0.0, 0.25, 0.49, 0.5, 0.51, 0.75, 1.0, 2.0)]
    for s in [*near, *(-n for n in near)]:
        array = rounded(s, of)
        read = _readable(s, of)
        assert (read is None) == is_special(float(array), of), s
        assert read is None or rounded(read, of).tobytes() == array.tobytes(), s
        if type(read) is float:
            memory = np.zeros((), of.numpy)
            memory[()] = read
            assert memory.tobytes() == array.tobytes(), s


def test_a_thousand_literals_are_two_programs_and_the_printed_trace_keeps_each() -> None:
    CACHE.clear()
    before = CACHE.compiled
    for i in range(1000):
        y = _X[i % 8] * (i + 0.5)
        if i % 250 == 0:
            text = str(Trace([y]))
            assert f"value={i + 0.5}" in text and f"start=({i % 8}, 0)" in text
        y.eval()
    assert CACHE.compiled - before <= 4 and len(CACHE) <= 4


def test_the_caches_of_programs_and_structures_are_bounded() -> None:
    cache = ProgramCache(capacity=3)
    for shape in range(1, 6):
        for scale in (0.5, 1.5, 2.5):
            cache.evaluation(Trace([lazy.full((shape,), scale)]))
            cache.evaluation(Trace([lazy.tanh(lazy.full((shape,), scale))]))
    assert len(cache) == 3


def test_threads_that_evaluate_one_program_read_each_their_own_literals() -> None:
    x = lazy.Tensor(np.ones(4096, np.float32))
    for s in (0.25, 0.75):
        (x * s).eval()
    wrong: list[float] = []

    def evaluate(first: int) -> None:
        for i in range(first, first + 200):
            if not ((x * (i + 0.5)).numpy() == i + 0.5).all():
                wrong.append(i + 0.5)

    threads = [threading.Thread(target=evaluate, args=(1000 * k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
