"""Sizes that a call determines: arithmetic, equality, bounds, and what users see of them."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusible import lazy
from fusible.errors import ArgumentError, CompileError, DTypeError
from fusible.lazy.assumptions import collected, holds
from fusible.lazy.dims import Size, Symbol, bounds, concrete, evaluate, maximum, minimum, product, symbol, symbols
from fusible.lazy.dims_json import from_json, to_json

_SYMBOLS = {name: Symbol(name, low, low + 2, high) for name, low, high in (("n", 1, 6), ("m", 2, 9), ("k", 0, 4))}
_N, _M, _K = (symbol(s.name, s.min, s.opt, s.max) for s in _SYMBOLS.values())

_LEAVES = st.one_of(st.integers(-3, 8), st.sampled_from([_N, _M, _K]))


def _join(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Two expressions by an operator, as ``(operator, a, b)``."""
    names = st.sampled_from(["+", "-", "*", "//", "%", "min", "max"])
    return st.tuples(names, children, children)


_TREES = st.recursive(_LEAVES, _join, max_leaves=7)
_OPERATORS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "min": minimum,
    "max": maximum,
}


def _build(tree: Any) -> Any:
    """The size that a tree stands for; divisors are made positive."""
    if not isinstance(tree, tuple):
        return tree
    kind, a, b = tree[0], _build(tree[1]), _build(tree[2])
    return _OPERATORS[kind](a, maximum(b, 1) if kind in ("//", "%") else b)


def _compute(tree: Any, values: dict[Symbol, int]) -> int:
    """The same on ints."""
    if isinstance(tree, Size):
        return values[next(iter(symbols(tree)))]
    if not isinstance(tree, tuple):
        return tree
    kind, a, b = tree[0], _compute(tree[1], values), _compute(tree[2], values)
    plain = {**_OPERATORS, "min": min, "max": max}
    return plain[kind](a, max(b, 1) if kind in ("//", "%") else b)


_VALUES = st.fixed_dictionaries({s: st.integers(s.min, s.max) for s in _SYMBOLS.values()})


@given(_TREES, _VALUES)
def test_an_expression_evaluates_as_ints_do_within_its_bounds_and_through_json(tree: Any, values: dict[Symbol, int]) -> None:
    size, want = _build(tree), _compute(tree, values)
    assert evaluate(size, values) == want and concrete((size, [size]), values) == (want, [want])
    low, high = bounds(size)
    assert low <= want <= high
    assert from_json(to_json(size), _SYMBOLS) == size


@given(_TREES, _TREES, _VALUES)
def test_equal_expressions_have_equal_values_and_hashes(left: Any, right: Any, values: dict[Symbol, int]) -> None:
    a, b = _build(left), _build(right)
    assert a + b == b + a and hash(a * b) == hash(b * a) and (a - b) + b == a
    if a == b:
        assert evaluate(a, values) == evaluate(b, values)


@given(st.lists(_LEAVES, min_size=1, max_size=4), st.lists(st.sampled_from([2, 3, _N, _M]), min_size=1, max_size=3))
def test_an_exact_quotient_is_found(factors: list[Any], divisors: list[Any]) -> None:
    divisor = product(divisors)
    assert product([*factors, divisor]) // divisor == product(factors) and product([*factors, divisor]) % divisor == 0


def test_what_is_one_number_is_an_int() -> None:
    assert _N - _N == 0 and type(_N - _N) is int and (4 * _N) // 4 == _N and (4 * _N + 3) // 4 == _N
    assert (_N + 1) * 2 == 2 * _N + 2 and (_N * _N - 1) // (_N + 1) == _N - 1
    assert symbol("fixed", 3, 3, 3) == 3 and maximum(_N, 1) == _N and minimum(_N, 6) == _N and maximum(_N, 7) == 7
    assert maximum(_N, maximum(_M, _N)) == maximum(_M, _N) and str(maximum(_M, _N)) == "max(m, n)"
    assert str(2 * _N - _M * _N + 1) == "-m*n + 2*n + 1" and str(_N % 2 + _M // 2) in ("(m // 2) + (n % 2)", "(n % 2) + (m // 2)")
    assert _N != 1 and _N not in (1, 2) and _N


def test_order_is_decided_by_bounds_or_refused() -> None:
    assert _N < 7 and _N >= 1 and not _N > 6 and _N <= 6 and _N < _M + 5
    for undecided in (lambda: _N < 3, lambda: _N > _M, lambda: int(_N), lambda: range(_N)):
        with pytest.raises(CompileError, match="known when the function is compiled"):
            undecided()
    with pytest.raises(ArgumentError, match="a divisor that is positive"):
        _N // _K


def test_assumptions_are_noted_where_only_a_call_can_tell() -> None:
    with collected() as noted:
        assert holds(_N, "==", _N, "x") and holds(_N, ">=", 1, "x") and holds(3, "==", 3, "x")
        assert not holds(_N, "==", 7, "x") and not holds(_N, ">=", 7, "x") and not holds(3, "==", 4, "x")
        assert not noted
        assert holds(_N, "==", _M, "x") and holds(_N, ">=", 2, "x") and holds(_N, "==", _M, "x")
        assert [(c.relation, c.what) for c in noted if __file__ in c.where] == [("==", "x"), (">=", "x")]
    holds(_N, "==", _M, "nobody collects")


def test_a_known_dimension_size_is_a_number_and_a_tensor() -> None:
    four = lazy.DimensionSize(4, name="width")
    assert four == 4 and int(four) == 4 and [10, 20, 30, 40, 50][four] == 50 and float(four) == 4.0 and bool(four) and hash(four) == hash(4)
    assert (four.dtype, four.shape, four.name, repr(four)) == (lazy.int32, (), "width", "DimensionSize(4)")
    assert four + 1 == 5 and type(four + 1) is int and 9 // four == 2 and 9 % four == 1 and 1 - four == -3 and four.maximum(6) == 6
    assert four.tolist() == 4 and isinstance(four, lazy.Tensor) and four.eval() is four
    assert lazy.zeros((four, 2)).shape == (4, 2) and lazy.zeros(four).shape == (4,)
    got = lazy.Tensor([1.0, 2.0]) * four
    assert got.dtype is lazy.float32 and got.tolist() == [4.0, 8.0] and (four * lazy.Tensor([2])).tolist() == [8]
    assert np.asarray(four.numpy()).tolist() == 4
    for data in (1.5, True, "4"):
        with pytest.raises(DTypeError, match="a whole number"):
            lazy.DimensionSize(data)
    with pytest.raises(DTypeError, match="no assignment"):
        four.trace_tensor = lazy.zeros(()).trace_tensor
    with pytest.raises(ArgumentError, match="a size from -128 to 127"):
        lazy.zeros((2,), lazy.int8) + lazy.DimensionSize(300)
    with pytest.raises(DTypeError, match="bool"):
        lazy.ones((2,), lazy.bool) + four
