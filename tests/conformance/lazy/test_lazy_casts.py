"""Casts bit for bit, against ml_dtypes; and roundings that the compiler must keep."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from fusible import lazy

_FLOAT8S = [lazy.float8, lazy.float8e5m2]
_ALL_BF16 = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
_ALL_F16 = np.arange(1 << 16, dtype=np.uint16).view(np.float16)


def _float32s() -> np.ndarray:
    """Random bit patterns; values in the range of float8, on ties and one unit beside them; subnormals; the special ones."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 60_000, dtype=np.uint64).astype(np.uint32)
    near = (bits & 0x807FFFFF) | (rng.integers(127 - 26, 127 + 18, bits.size, dtype=np.uint32) << 23)
    ties = near & np.uint32(0xFFF80000)
    beside = ties + rng.integers(0, 2, bits.size, dtype=np.uint32)
    subnormal = bits & np.uint32(0x807FFFFF)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 448, 464, 465, -480, 57344, 61439, 61440, -61441, 1e9], np.float32)
    return np.concatenate([bits, near, ties, beside, subnormal, special.view(np.uint32)]).view(np.float32)


def _saturated(x: np.ndarray, of: lazy.dtype) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.clip(x.astype(np.float32), np.float32(of.min), np.float32(of.max)).astype(of.numpy)


@pytest.mark.parametrize("of", _FLOAT8S, ids=str)
@pytest.mark.parametrize("source", ["bfloat16", "float32"])
def test_to_float8_is_exact_and_saturates(of: lazy.dtype, source: str) -> None:
    x = _ALL_BF16 if source == "bfloat16" else _float32s()
    got = lazy.Tensor(x).cast(of).numpy()
    np.testing.assert_array_equal(got.view(np.uint8), _saturated(x, of).view(np.uint8))


@pytest.mark.parametrize("of", _FLOAT8S, ids=str)
def test_float16_to_float8_is_exact_and_keeps_nan(of: lazy.dtype) -> None:
    got = lazy.Tensor(_ALL_F16).cast(of).numpy()
    number = ~np.isnan(_ALL_F16)
    np.testing.assert_array_equal(got.view(np.uint8)[number], _saturated(_ALL_F16, of).view(np.uint8)[number])
    assert np.isnan(got[~number].astype(np.float32)).all()


@pytest.mark.parametrize("of", _FLOAT8S, ids=str)
def test_float64_to_float8_rounds_once(of: lazy.dtype) -> None:
    codes = np.arange(128, dtype=np.uint8).view(of.numpy).astype(np.float64)
    grid = codes[np.isfinite(codes)]
    middle = (grid[1:] + grid[:-1]) / 2
    even = np.where(np.arange(len(middle)) % 2 == 0, grid[:-1], grid[1:])
    for x, want in ((middle, even), (middle * (1 + 1e-12), grid[1:]), (middle * (1 - 1e-12), grid[:-1])):
        np.testing.assert_array_equal(lazy.Tensor(x).cast(of).numpy().astype(np.float64), want)


@pytest.mark.parametrize("of", _FLOAT8S, ids=str)
@pytest.mark.parametrize("wide", [lazy.float32, lazy.bfloat16, lazy.float16, lazy.float64], ids=str)
def test_from_float8_is_exact(of: lazy.dtype, wide: lazy.dtype) -> None:
    codes = np.arange(256, dtype=np.uint8)
    got = lazy.Tensor(codes).bitcast(of).cast(wide).numpy().astype(np.float64)
    np.testing.assert_array_equal(got, codes.view(of.numpy).astype(np.float64))


def test_float32_to_bfloat16_is_exact() -> None:
    x = _float32s()
    got = lazy.Tensor(x).cast(lazy.bfloat16).numpy()
    with np.errstate(invalid="ignore"):
        want = x.astype(ml_dtypes.bfloat16)
    number = ~np.isnan(x)
    np.testing.assert_array_equal(got.view(np.uint16)[number], want.view(np.uint16)[number])
    assert np.isnan(got[~number].astype(np.float32)).all()


@pytest.mark.parametrize("of", [lazy.int8, lazy.int32, lazy.int64, lazy.uint8, lazy.uint32, lazy.uint64], ids=str)
@pytest.mark.parametrize("source", [np.float32, np.float64, np.float16], ids=lambda t: t.__name__)
def test_float_to_integer_truncates_and_saturates(of: lazy.dtype, source: type) -> None:
    edges = [float(of.min), float(of.max), -1.5, 1.99, 0.0, -0.9, 126.7, 1e30, -1e30, np.inf, -np.inf, np.nan, 3e9, 2.0**31, 2.0**63, 2.0**64]
    with np.errstate(over="ignore"):
        x = np.array(edges).astype(source)
    want = [0 if np.isnan(v) else of.max if v >= of.max else of.min if v <= of.min else int(v) for v in x.tolist()]
    assert lazy.Tensor(x).cast(of).numpy().tolist() == want


def test_to_bool_and_between_integers() -> None:
    assert lazy.Tensor([0.0, -0.0, 0.25, float("nan")]).cast(lazy.bool).tolist() == [False, False, True, True]
    assert lazy.Tensor([0, 256, 257, -1]).cast(lazy.uint8).tolist() == [0, 0, 1, 255]
    assert lazy.Tensor([True, False]).cast(lazy.float8).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("narrow", [lazy.bfloat16, lazy.float16, lazy.float8, lazy.float8e5m2], ids=str)
def test_rounding_to_a_narrower_type_is_kept(narrow: lazy.dtype) -> None:
    x = np.random.default_rng(1).standard_normal(4096).astype(np.float32)
    got = ((lazy.Tensor(x) * 1.5).cast(narrow).cast(lazy.float32) + 1.0).numpy()
    want = (x * np.float32(1.5)).astype(narrow.numpy).astype(np.float32) + np.float32(1)
    np.testing.assert_array_equal(got, want)


def test_every_bfloat16_operation_rounds() -> None:
    x = np.random.default_rng(2).standard_normal(4096).astype(ml_dtypes.bfloat16)
    t = lazy.Tensor(x)
    got = ((t + t + t) * (t + 0.5)).cast(lazy.float32).numpy()
    want = ((x + x + x) * (x + ml_dtypes.bfloat16(0.5))).astype(np.float32)
    np.testing.assert_array_equal(got, want)


def test_a_16_bit_product_accumulates_in_float32_and_rounds_once() -> None:
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in ((32, 257), (257, 16)))
    wide = lazy.matmul(lazy.Tensor(a), lazy.Tensor(b), dtype=lazy.float32).numpy()
    exact = a.astype(np.float64) @ b.astype(np.float64)
    bound = 257 * np.finfo(np.float32).eps * (np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64)))
    assert (np.abs(wide - exact) <= bound).all()
    np.testing.assert_array_equal((lazy.Tensor(a) @ lazy.Tensor(b)).numpy(), wide.astype(ml_dtypes.bfloat16))


def test_a_float8_product_decodes_exactly_and_mixes_formats() -> None:
    rng = np.random.default_rng(4)
    a, b = rng.standard_normal((9, 33)).astype(ml_dtypes.float8_e4m3fn), rng.standard_normal((33, 5)).astype(ml_dtypes.float8_e5m2)
    got = lazy.matmul(lazy.Tensor(a.view(np.uint8)).bitcast(lazy.float8), lazy.Tensor(b))
    assert got.dtype is lazy.float32
    exact = a.astype(np.float64) @ b.astype(np.float64)
    bound = 33 * np.finfo(np.float32).eps * (np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64)))
    assert (np.abs(got.numpy() - exact) <= bound).all()
