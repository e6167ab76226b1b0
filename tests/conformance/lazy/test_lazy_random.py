"""Random tensors: word for word those of their algorithms, reproducible, and distributed as they say."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from squares import squares

from fusible import lazy
from fusible.errors import ArgumentError, DTypeError, ShapeError
from fusible.lazy.evaluation.executor import CACHE

_FLOATS = [lazy.float32, lazy.float16, lazy.bfloat16, lazy.float64]
_DIGITS = {lazy.float32: 24, lazy.float16: 11, lazy.bfloat16: 8, lazy.float64: 53}


@pytest.mark.parametrize("bits", [32, 64])
def test_random_words_are_those_of_squares(bits: int) -> None:
    for seed in (0, 7, 2**63 + 5):
        counter = lazy.iota((50,), 0, lazy.uint64)
        got = lazy.random_words(lazy.Tensor(np.array([seed], np.uint64)), counter, bits=bits)
        assert got.numpy().tolist() == squares(seed, 50, bits)


def test_random_words_have_32_bits_or_64() -> None:
    with pytest.raises(ArgumentError, match="bits of random_words: expected 32 or 64, got 16; pass one of them"):
        lazy.random_words(lazy.Tensor(np.array([1], np.uint64)), lazy.iota((5,), 0, lazy.uint64), bits=16)


@pytest.mark.parametrize("of", _FLOATS, ids=str)
def test_rand_is_the_leading_digits_of_squares(of: lazy.dtype) -> None:
    got = lazy.rand((3, 5), dtype=of, seed=7).numpy().astype(np.float64).ravel().tolist()
    words = squares(7, 30)
    pairs = [(words[2 * i] << 32) | words[2 * i + 1] for i in range(15)]
    wide = [p >> 11 for p in pairs] if of is lazy.float64 else [w >> (32 - _DIGITS[of]) for w in words[:15]]
    assert got == [w * 2.0 ** -_DIGITS[of] for w in wide]


@pytest.mark.parametrize("of", _FLOATS, ids=str)
def test_randn_is_box_mullers(of: lazy.dtype) -> None:
    got = lazy.randn((64,), 1.5, 0.25, of, seed=-3).numpy().astype(np.float64)
    if of is lazy.float64:
        words = squares(-3, 256)
        first, second = ([((words[4 * i + k] << 32) | words[4 * i + k + 1]) >> 11 for i in range(64)] for k in (0, 2))
        count = 53
    else:
        words = squares(-3, 128)
        first, second, count = words[::2], words[1::2], 32
    u1, u2 = (np.array(n, np.float64) * 2.0**-count for n in ([n + 1 for n in first], second))
    want = 1.5 + 0.25 * np.sqrt(-2 * np.log(u1)) * np.cos(math.tau * u2)
    # The angle is rounded to an epsilon of 2 pi, and log(u1) near 1 to one of 1 - u1: 20 epsilons of |z| <= 7 and the mean, and one rounding.
    eps = np.finfo(np.float64 if of is lazy.float64 else np.float32).eps
    half = 0.5 * {lazy.float16: 2.0**-10, lazy.bfloat16: 2.0**-7}.get(of, 0) * np.abs(want)
    assert (np.abs(got - want) <= 20 * eps * 4 + half).all()


@pytest.mark.parametrize("of", _FLOATS, ids=str)
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-3.0, 5.0), (1000.0, 1001.0), (2.0, 2.0), (0.1, 0.30000001)])
def test_rand_stays_within_its_interval(of: lazy.dtype, low: float, high: float) -> None:
    x = lazy.rand((20_000,), low, high, of, seed=1).numpy().astype(np.float64)
    lowest = float(of.numpy.type(low))
    assert x.min() >= min(lowest, low) and (x.max() < high or low == high == x.max() == x.min())


def test_rand_is_uniform() -> None:
    n, bins = 1 << 18, 256
    x = lazy.rand((n,), seed=11).numpy()
    observed = np.bincount((x * bins).astype(int), minlength=bins)
    chi2 = float(((observed - n / bins) ** 2 / (n / bins)).sum())
    # chi2 with 255 degrees of freedom: mean 255, standard deviation sqrt(510); the seed is fixed, five deviations are a defect.
    assert abs(chi2 - 255) < 5 * math.sqrt(510)
    assert abs(np.corrcoef(x[:-1], x[1:])[0, 1]) < 5 / math.sqrt(n)
    assert abs(np.corrcoef(x, lazy.rand((n,), seed=12).numpy())[0, 1]) < 5 / math.sqrt(n)


def test_randn_is_normal() -> None:
    n = 1 << 18
    x = lazy.randn((n,), seed=13).numpy().astype(np.float64)
    # The standard errors of the first four moments of n normal numbers.
    for power, want, error in ((1, 0, 1), (2, 1, math.sqrt(2)), (3, 0, math.sqrt(15)), (4, 3, math.sqrt(96))):
        assert abs((x**power).mean() - want) < 5 * error / math.sqrt(n)
    for bound in (1.0, 2.0, 3.0):
        within = math.erf(bound / math.sqrt(2))
        assert abs((np.abs(x) < bound).mean() - within) < 5 * math.sqrt(within * (1 - within) / n)
    assert abs(np.corrcoef(x[::2], x[1::2])[0, 1]) < 5 / math.sqrt(n / 2)


def test_the_same_seed_gives_the_same_numbers_in_any_order_and_shape() -> None:
    lazy.manual_seed(5)
    a, b = lazy.rand((4, 3)), lazy.randn((2,))
    first = [a.tolist(), b.tolist()]
    lazy.manual_seed(5)
    a, b = lazy.rand((4, 3)), lazy.randn((2,))
    assert [b.tolist(), a.tolist()] == first[::-1]
    lazy.manual_seed(6)
    assert lazy.rand((4, 3)).tolist() != first[0]
    assert lazy.rand((4, 3), seed=9).tolist() == lazy.rand((12,), seed=9).reshape((4, 3)).tolist()
    assert lazy.rand((3,), seed=9).tolist() == lazy.rand((12,), seed=9)[:3].tolist()
    assert lazy.rand((3,)).tolist() != lazy.rand((3,)).tolist()


def test_a_process_begins_as_after_seed_0() -> None:
    code = "import fusible.lazy as lazy; print(lazy.rand((3,)).tolist())"
    fresh = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout
    lazy.manual_seed(0)
    assert fresh.strip() == str(lazy.rand((3,)).tolist())


def test_a_seed_is_an_input_of_the_program() -> None:
    lazy.rand((17,), seed=0).eval()
    before = CACHE.compiled
    assert lazy.rand((17,), seed=1).tolist() != lazy.rand((17,), seed=2).tolist()
    lazy.rand((17,)).eval()
    assert CACHE.compiled == before
    run = lazy.compile(lambda seed: lazy.randn((5,), seed=seed), args=[lazy.InputInfo((), lazy.int64)])
    for seed in (0, 3, -4):
        np.testing.assert_array_equal(run(np.array(seed)).numpy(), lazy.randn((5,), seed=seed).numpy())
    kept = lazy.compile(lambda: lazy.rand((5,)))
    assert kept().numpy().tolist() == kept().numpy().tolist()


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        (ArgumentError, lambda: lazy.rand((2,), 1.0, 0.0)),
        (ArgumentError, lambda: lazy.rand((2,), 0.0, math.inf)),
        (ArgumentError, lambda: lazy.rand((2,), math.nan)),
        (ArgumentError, lambda: lazy.randn((2,), 0.0, -1.0)),
        (ArgumentError, lambda: lazy.randn((2,), math.inf)),
        (DTypeError, lambda: lazy.rand((2,), seed=0.5)),
        (DTypeError, lambda: lazy.rand((2,), seed=lazy.ones(()))),
        (ShapeError, lambda: lazy.rand((2,), seed=lazy.ones((2,), lazy.int64))),
        (DTypeError, lambda: lazy.manual_seed("0")),
    ],
)
def test_illegal_parameters_are_refused_and_draw_nothing(kind: type[Exception], call) -> None:  # type: ignore[no-untyped-def]
    lazy.manual_seed(1)
    want = lazy.rand((2,)).tolist()
    lazy.manual_seed(1)
    with pytest.raises(kind):
        call()
    assert lazy.rand((2,)).tolist() == want
