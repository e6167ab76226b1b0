"""Functions on tensors beyond what the table of operations samples: operators with numbers, initialisers, agreement, copies, accuracy in tails."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from fusible import lazy
from fusible.errors import ArgumentError, DTypeError, FusibleError, ShapeError
from fusible.lazy.dtypes import ALL, DTYPES
from fusible.lazy.ops.copy import Copy
from fusible.lazy.trace.storage import Storage

_CPU, _GPU = lazy.device("cpu"), lazy.device("gpu")
_NAMED = sorted(ALL, key=lambda of: list(DTYPES).index(of.name))


def test_operators_take_numbers_on_either_side() -> None:
    x = lazy.Tensor([7, -7, 2])
    assert (x % 3).tolist() == [1, 2, 2] and (-3 % x).tolist() == [4, -3, 1] and (x % -3).tolist() == [-2, -1, -1]
    assert (x // 3).tolist() == [2, -3, 0] and (20 // x).tolist() == [2, -3, 10]
    assert (x / 3).tolist() == [2, -2, 0] and (20 / x).tolist() == [2, -2, 10]
    assert (x | 8).tolist() == [15, -7 | 8, 10] and (8 | x).tolist() == [15, -7 | 8, 10]
    assert (-x).tolist() == [-7, 7, -2] and abs(x).tolist() == [7, 7, 2] and (~x).tolist() == [-8, 6, -3]
    y = lazy.Tensor([5.5, -5.5])
    assert (y % 2).tolist() == [1.5, 0.5] and (y // 2).tolist() == [2.0, -3.0] and (1 // lazy.Tensor(0.1)).item() == 9.0
    assert (~lazy.Tensor([True, False])).tolist() == [False, True]


def test_division_identity_holds_for_every_int8() -> None:
    a, b = (g.ravel() for g in np.meshgrid(np.arange(-128, 128), np.arange(-128, 128)))
    x, y = lazy.Tensor(a.astype(np.int8)), lazy.Tensor(b.astype(np.int8))
    quotient, rest, truncated = (t.numpy().astype(int) for t in (x // y, x % y, x / y))
    defined = b != 0
    assert not quotient[~defined].any() and not rest[~defined].any() and not truncated[~defined].any()
    np.testing.assert_array_equal((quotient * b + rest)[defined].astype(np.int8), a[defined].astype(np.int8))
    assert ((np.sign(rest) == np.sign(b)) | (rest == 0))[defined].all() and (abs(rest) < abs(b))[defined].all()
    np.testing.assert_array_equal(truncated[defined], np.trunc(a[defined] / b[defined]).astype(int).astype(np.int8))


def test_signs_of_zeros_and_infinities_in_float_division() -> None:
    edges = np.array([0.0, -0.0, 1.0, -1.0, 6.0, -6.0, 0.1, -0.3, 3e38, np.inf, -np.inf, np.nan], np.float32)
    a, b = (g.ravel() for g in np.meshgrid(edges, edges))
    with np.errstate(all="ignore"):
        for got, want in ((lazy.Tensor(a) % lazy.Tensor(b), np.mod(a, b)), (lazy.Tensor(a) // lazy.Tensor(b), np.floor_divide(a, b))):
            number = ~np.isnan(want)
            np.testing.assert_array_equal(got.numpy()[number].view(np.uint32), want[number].view(np.uint32))
            assert np.isnan(got.numpy()[~number]).all()


@pytest.mark.parametrize("of", [np.float32, np.float64], ids=lambda t: t.__name__)
def test_gelu_keeps_its_tail(of: type) -> None:
    """For negative ``x`` the relative error grows with that of ``exp(-x**2 / 2)`` alone: an epsilon of the exponent, times the exponent."""
    x = np.linspace(-12, 0, 4001)[:-1].astype(of)
    got = lazy.gelu(lazy.Tensor(x)).numpy().astype(np.float64)
    want = np.array([0.5 * v * math.erfc(-v / math.sqrt(2)) for v in x.astype(np.float64).tolist()])
    normal = np.abs(want) > np.finfo(of).tiny * 64
    error = np.abs(got - want)[normal] / np.abs(want)[normal]
    assert (error <= (4 + x[normal].astype(np.float64) ** 2) * np.finfo(of).eps * 1.5).all()


def test_activations_at_the_ends() -> None:
    x = lazy.Tensor([float("inf"), float("nan"), 0.0, 40.0, -200.0])
    np.testing.assert_array_equal(lazy.gelu(x).numpy(), [np.inf, np.nan, 0, 40, 0])
    np.testing.assert_array_equal(lazy.silu(x).numpy(), [np.inf, np.nan, 0, 40, 0])
    np.testing.assert_array_equal(lazy.relu(x).numpy(), [np.inf, np.nan, 0, 40, 0])


@pytest.mark.parametrize("name", ["gelu", "silu"])
@pytest.mark.parametrize("of", [lazy.float16, lazy.bfloat16], ids=str)
def test_a_16_bit_activation_is_that_of_float32_rounded_once(name: str, of: lazy.dtype) -> None:
    x = np.linspace(-9, 9, 5000).astype(of.numpy)
    narrow, wide = (getattr(lazy, name)(lazy.Tensor(t)).numpy() for t in (x, x.astype(np.float32)))
    np.testing.assert_array_equal(narrow, wide.astype(of.numpy))


@pytest.mark.parametrize("of", _NAMED, ids=str)
def test_counting_in_every_dtype(of: lazy.dtype) -> None:
    expected = np.arange(12) % 16 if of is not lazy.int4 else (np.arange(12) + 8) % 16 - 8
    # float8e5m2 has three binary digits, so 9 and 11 are ties, which round to even.
    want = expected.astype(of.numpy).astype(np.float32).tolist()
    assert [float(v) for v in lazy.iota((12,), dtype=of).tolist()] == want
    assert [float(v) for v in lazy.arange(12, dtype=of).tolist()] == want
    assert lazy.iota_like(lazy.ones((2, 3), of), 1).dtype is of
    assert lazy.iota_like(lazy.ones((2, 3), of), 1, lazy.int32).tolist() == [[0, 1, 2]] * 2


def test_overloads_of_arange() -> None:
    assert lazy.arange(3).tolist() == [0.0, 1.0, 2.0]
    assert lazy.arange(3, lazy.int32).tolist() == [0, 1, 2] and lazy.arange(3, dtype=lazy.int32).dtype is lazy.int32
    assert lazy.arange(4, 0, -2, lazy.int8).tolist() == [4, 2] and lazy.arange(1, 2, 0.25).tolist() == [1.0, 1.25, 1.5, 1.75]
    with pytest.raises(DTypeError, match="a literal .*: expected an integer"):
        lazy.arange(0, 1, 0.5, lazy.int32)


@pytest.mark.parametrize("of", _NAMED, ids=str)
def test_fills_in_every_dtype(of: lazy.dtype) -> None:
    like = lazy.ones((2,), of)
    for tensor, want in (
        (like, 1),
        (lazy.zeros((2,), of), 0),
        (lazy.full_like(like, True), 1),
        (lazy.zeros_like(like), 0),
        (lazy.full(2, True, of), 1),
    ):
        assert tensor.dtype is of and tensor.tolist() == [want, want]
    assert lazy.full_like(like, 3, lazy.float16).tolist() == [3.0, 3.0] and lazy.ones_like(like, lazy.bool).tolist() == [True, True]


def test_masked_fill_takes_the_dtype_of_its_input() -> None:
    x = lazy.Tensor([1, 2, 3], dtype=lazy.int8)
    assert x.masked_fill(lazy.Tensor([True, False, True]), -5).tolist() == [-5, 2, -5]
    assert lazy.ones((2, 1)).masked_fill(x > 1, float("-inf")).tolist() == [[1.0, -math.inf, -math.inf]] * 2
    with pytest.raises(DTypeError, match="a literal .*: expected an integer"):
        x.masked_fill(x > 1, 0.5)
    with pytest.raises(ArgumentError, match="a number from -128 to 127"):
        x.masked_fill(x > 1, 200)


def test_integer_means_do_not_overflow_and_truncate() -> None:
    assert lazy.full((100,), 100, lazy.int8).mean().item() == 100
    assert lazy.Tensor([-3, -4]).mean().item() == -3 and lazy.Tensor([2**40, 2**40 + 2], dtype=lazy.int64).mean().item() == 2**40 + 1
    assert lazy.zeros((0, 2), lazy.int32).mean(0).tolist() == [0, 0]


def test_variances_of_few_elements_are_not_numbers() -> None:
    assert math.isnan(lazy.Tensor([2.0]).var().item()) and math.isnan(lazy.zeros((0,)).var().item())
    assert lazy.Tensor([1.0, 3.0]).var(correction=2).item() == math.inf
    assert lazy.Tensor([[1.0, 3.0], [5.0, 5.0]]).var(1, keepdim=True).tolist() == [[2.0], [0.0]]


def test_agreement_is_a_python_bool() -> None:
    x = lazy.Tensor([1.0, math.inf, -2.0])
    assert lazy.allclose(x, x * 1.000001) is True and x.allclose(x * 1.01) is False
    assert lazy.allclose(x, x + 0.001, rtol=0, atol=0.0011) and not lazy.allclose(x, x + 0.001, rtol=0, atol=0.0009)
    assert not lazy.allclose(x, -x) and not lazy.allclose(lazy.Tensor([1.0]), lazy.Tensor([math.inf]))
    assert not lazy.allclose(lazy.Tensor([math.nan]), lazy.Tensor([math.nan])) and lazy.allclose(lazy.zeros((0,)), lazy.zeros((0,)))
    third = lazy.Tensor([1 / 3], dtype=lazy.bfloat16)
    assert lazy.allclose(third, third * 1.006, rtol=0.006) and not lazy.allclose(third, third * 1.02, rtol=0.006)
    assert x.equal(lazy.Tensor([1.0, math.inf, -2.0])) is True and lazy.equal(x, x[:2]) is False and not x.equal(-x)
    assert lazy.equal(lazy.ones((2,), lazy.int4), lazy.full((2,), 1, lazy.int4)) and lazy.equal(lazy.zeros((0, 2)), lazy.zeros((0, 2)))
    assert not lazy.equal(lazy.zeros((0, 2)), lazy.zeros((0, 3)))


def test_a_stored_tensor_moves_at_once_and_a_computed_one_when_it_is_computed() -> None:
    x = lazy.Tensor([1.0, 2.0], name="weight")
    moved = x.copy(_CPU)
    assert moved.device is _CPU and x.device is _GPU and moved.name == "weight"
    assert isinstance(moved.trace_tensor.producer, Storage) and moved.tolist() == [1.0, 2.0]
    assert x.copy(_GPU) is x
    later = (x + 1.0).copy(_CPU)
    assert isinstance(later.trace_tensor.producer, Copy) and later.device is _CPU and (later * 2.0).device is _CPU
    assert str(lazy.Trace([later])).split("\n")[-3:] == [
        "t3 = copy(t2, device=cpu:0)", "outputs:", "    t3: [shape=(2,), dtype=(float32), loc=(cpu:0)]",
    ]  # fmt: skip
    assert later.tolist() == [2.0, 3.0] and later.device is _CPU


def test_operands_on_two_devices_meet_by_a_copy() -> None:
    x, y = lazy.Tensor([1.0]), lazy.Tensor([2.0], device=_CPU)
    with pytest.raises(ArgumentError, match="one device"):
        x + y
    assert (x + y.copy(_GPU)).tolist() == [3.0] and (x.copy(_CPU) + y).device is _CPU
    with pytest.raises(ArgumentError, match="one device"):
        x + lazy.ones(1).copy(_CPU)
    with pytest.raises(DTypeError, match="device of copy: expected a device"):
        x.copy("cpu")


def test_a_tensor_is_not_iterable_and_is_true_or_false_with_one_element_only() -> None:
    x = lazy.Tensor([[1.0], [2.0]])
    with pytest.raises(TypeError):
        list(x)
    with pytest.raises(TypeError):
        1.0 in x  # noqa: B015 - membership would iterate
    with pytest.raises(ArgumentError, match=r"bool\(\): expected exactly one element"):
        bool(x)
    assert bool(x[0, 0]) and not bool(lazy.zeros((1, 1)))


_M = lazy.ones((2, 3))


@pytest.mark.parametrize(
    ("kind", "argument", "call"),
    [
        (ShapeError, "_M", lambda: lazy.outer(lazy.ones(2), _M)),
        (ShapeError, "_M[0]", lambda: lazy.tril(_M[0])),
        (ArgumentError, "-1", lambda: lazy.repeat(_M, -1, 0)),
        (DTypeError, "1.5", lambda: lazy.repeat(_M, 1.5, 0)),
        (ArgumentError, "", lambda: lazy.repeat(_M, 2, 2)),
        (ShapeError, "", lambda: _M % lazy.ones(2)),
        (ShapeError, "", lambda: _M.masked_fill(lazy.ones(2, lazy.bool), 0)),
    ],
)
def test_errors_mark_the_argument(kind: type[FusibleError], argument: str, call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(kind) as caught:
        call()
    _, line, marks, sentence = str(caught.value).split("\n")
    marked = line[marks.index("^") : marks.rindex("^") + 1]
    assert ": expected " in sentence and (marked == argument if argument else len(marked) > len("_M % "))


def test_the_largest_float8_is_where_computed_values_saturate() -> None:
    x = lazy.Tensor(np.array([0.0, 448.0, -448.0], ml_dtypes.float8_e4m3fn))
    assert lazy.rsqrt(x).tolist()[0] == 448.0 and (x // lazy.full_like(x, 0.25)).tolist() == [0.0, 448.0, -448.0]
    assert lazy.maximum(x, 2).tolist() == [2.0, 448.0, 2.0] and (x > 1).tolist() == [False, True, False]
