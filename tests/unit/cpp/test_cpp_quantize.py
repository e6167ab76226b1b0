"""quantize against ml_dtypes, bit for bit, at every level; its amax, transposed copy and column sums against numpy."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusible import cpp_extensions
from fusible.errors import ShapeError


@dataclass(frozen=True)
class Format:
    torch: torch.dtype
    numpy: type
    largest: float

    def encode(self, x: np.ndarray, scale: float = 1.0) -> np.ndarray:
        """The definition: float32 product, clamp, ml_dtypes' cast."""
        with np.errstate(all="ignore"):
            product = x.astype(np.float32) * np.float32(scale)
            clamped = np.where(np.isnan(product), product, np.clip(product, -self.largest, self.largest)).astype(np.float32)
            return clamped.astype(self.numpy).view(np.uint8)


E4M3 = Format(torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn, 448.0)
E5M2 = Format(torch.float8_e5m2, ml_dtypes.float8_e5m2, 57344.0)
FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=["e4m3", "e5m2"])
THREADS = pytest.mark.parametrize("threads", [1, 2])
EVERY_HALF = np.arange(65536, dtype=np.uint16).view(np.int16)


def _ties(fmt: Format) -> np.ndarray:
    """Every midpoint between neighbouring codes, its two neighbours in float32, and the edges of the range, of both signs."""
    values = np.arange(128, dtype=np.uint8).view(fmt.numpy).astype(np.float32)
    values = values[np.isfinite(values)]
    middle = (values[1:] + values[:-1]) / 2
    edge = np.float32([fmt.largest, fmt.largest * 1.03125, fmt.largest * 1.0625, fmt.largest * 2, np.inf, np.nan, 0.0, 1e-45, 1.1754942e-38])
    points = np.concatenate([values, middle, edge])
    with np.errstate(invalid="ignore", over="ignore"):
        around = np.concatenate([points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(np.inf))])
    return np.concatenate([around, -around])


def _quantize(x: torch.Tensor, fmt: Format, scale: float | torch.Tensor, threads: int) -> np.ndarray:
    codes = torch.full(x.shape, 0x55, dtype=torch.uint8)
    cpp_extensions.quantize(x, codes, scale, fmt.torch, num_threads=threads)
    return codes.numpy()


@FORMATS
@THREADS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.37, 3.0e4])
def test_every_16_bit_value_is_cast_exactly(level: str, fmt: Format, threads: int, dtype: torch.dtype, scale: float) -> None:
    x = torch.from_numpy(EVERY_HALF.copy()).view(dtype)
    np.testing.assert_array_equal(_quantize(x, fmt, scale, threads), fmt.encode(x.float().numpy(), scale))


@FORMATS
@THREADS
@pytest.mark.parametrize("scale", [1.0, 2.0**-100, 2.0**100, -1.5, 0.0, float("inf")])
def test_random_bits_are_cast_exactly_under_any_scale(level: str, fmt: Format, threads: int, scale: float) -> None:
    bits = np.random.default_rng(1).integers(0, 2**32, 100_003, dtype=np.uint32)
    x = bits.view(np.float32)
    np.testing.assert_array_equal(_quantize(torch.from_numpy(x), fmt, scale, threads), fmt.encode(x, scale))


@FORMATS
def test_a_nan_scale_makes_every_code_nan(level: str, fmt: Format) -> None:
    codes = _quantize(torch.randn(1000), fmt, float("nan"), 1)
    assert np.isnan(codes.view(fmt.numpy).astype(np.float32)).all()


@FORMATS
@THREADS
def test_ties_saturation_subnormals_and_signed_zeros_are_cast_exactly(level: str, fmt: Format, threads: int) -> None:
    x = _ties(fmt)
    np.testing.assert_array_equal(_quantize(torch.from_numpy(x), fmt, 1.0, threads), fmt.encode(x))


@FORMATS
def test_ordinary_values_are_cast_exactly(level: str, fmt: Format) -> None:
    x = (np.random.default_rng(2).standard_normal(300_000) * np.exp2(np.random.default_rng(3).integers(-18, 18, 300_000))).astype(np.float32)
    np.testing.assert_array_equal(_quantize(torch.from_numpy(x), fmt, 1.0, 0), fmt.encode(x))


@given(rows=st.integers(0, 200), cols=st.integers(0, 330), seed=st.integers(0, 9), e4m3=st.booleans(), threads=st.integers(1, 2), data=st.data())
def test_outputs_agree_for_any_shape(rows: int, cols: int, seed: int, e4m3: bool, threads: int, data: st.DataObject) -> None:
    fmt = E4M3 if e4m3 else E5M2
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    cpp_extensions.set_level(data.draw(st.sampled_from(cpp_extensions.usable_levels())))
    x = (torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * 50).to(dtype)
    if rows * cols > 3 and data.draw(st.booleans()):
        x.view(-1)[seed % (rows * cols)] = data.draw(st.sampled_from([float("nan"), float("-inf")]))
    codes, transposed = torch.empty(rows, cols, dtype=fmt.torch), torch.empty(cols, rows, dtype=torch.uint8)
    only_transposed, sums, largest = torch.empty_like(transposed), torch.full((cols,), 7.0), torch.full((1,), 7.0)
    cpp_extensions.quantize(x, codes, 1.7, fmt.torch, transposed, largest, False, sums, num_threads=threads)
    cpp_extensions.quantize(x, None, 1.7, fmt.torch, only_transposed, num_threads=threads)
    wanted = fmt.encode(x.float().numpy(), 1.7)
    np.testing.assert_array_equal(codes.view(torch.uint8).numpy(), wanted)
    np.testing.assert_array_equal(transposed.numpy(), wanted.T)
    np.testing.assert_array_equal(only_transposed.numpy(), wanted.T)
    np.testing.assert_array_equal(largest.numpy(), x.float().abs().max().numpy() if x.numel() else 0.0)
    wide = x.double().numpy()
    # A sum of n float32 numbers in any order is off by at most n * eps times the sum of their magnitudes.
    bound = max(rows, 1) * np.finfo(np.float32).eps * np.abs(wide).sum(0)
    with np.errstate(invalid="ignore"):
        close = np.abs(sums.double().numpy() - wide.sum(0)) <= bound
    assert np.all(close | ~np.isfinite(wide.sum(0)))


def test_column_sums_do_not_depend_on_threads_or_level() -> None:
    x, codes = torch.randn(9000, 130), torch.empty(9000, 130, dtype=torch.uint8)
    found = []
    for name in cpp_extensions.usable_levels():
        cpp_extensions.set_level(name)
        for threads in (1, 2):
            sums = torch.empty(130)
            cpp_extensions.quantize(x, codes, 1.0, torch.float8_e4m3fn, bias_grad=sums, num_threads=threads)
            found.append(sums)
    assert all(torch.equal(found[0], other) for other in found)


def test_a_tensor_gives_the_scale_and_leading_dimensions_are_rows() -> None:
    x, codes, transposed = torch.randn(3, 5, 70), torch.empty(3, 5, 70, dtype=torch.uint8), torch.empty(70, 3, 5, dtype=torch.uint8)
    cpp_extensions.quantize(x, codes, torch.tensor([2.0]), "float8_e4m3fn", transposed)
    np.testing.assert_array_equal(codes.numpy(), E4M3.encode(x.numpy(), 2.0))
    assert torch.equal(codes.reshape(15, 70).t().reshape(70, 3, 5), transposed)


def test_amax_accumulates_and_overwrites() -> None:
    x, codes, largest = torch.tensor([1.0, -3.0]), torch.empty(2, dtype=torch.uint8), torch.tensor([5.0])
    cpp_extensions.quantize(x, codes, 1.0, 7, amax=largest, accumulate_amax=True)
    assert largest.item() == 5.0
    cpp_extensions.quantize(x, codes, 1.0, 7, amax=largest)
    assert largest.item() == 3.0
    cpp_extensions.quantize(x * float("nan"), codes, 1.0, 7, amax=largest, accumulate_amax=True)
    cpp_extensions.quantize(x, codes, 1.0, 7, amax=largest, accumulate_amax=True)
    assert torch.isnan(largest).all()


def test_noop_writes_nothing() -> None:
    x, codes, largest, sums = torch.randn(4, 8), torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(1), torch.zeros(8)
    cpp_extensions.quantize(x, codes, 1.0, torch.float8_e5m2, None, largest, False, sums, torch.ones(1))
    assert not codes.any() and not largest.any() and not sums.any()
    cpp_extensions.quantize(x, codes, 1.0, torch.float8_e5m2, None, largest, False, sums, torch.zeros(1))
    assert codes.any() and largest.all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (1, 1), (63, 17), (64, 64), (130, 71), (1031, 1100), (9000, 3)])
def test_sums_of_columns(level: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Within a rounding for each row of a part and for each part; the same on any number of threads."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = [torch.full(shape[1:], 7.0) for _ in range(2)]
    for threads, sums in enumerate(found, 1):
        cpp_extensions.column_sums(x, sums, num_threads=threads)
    parts = min(64, -(-shape[0] // 64))
    roundings = torch.finfo(torch.float32).eps / 2 * (-(-shape[0] // max(parts, 1)) + 64 + parts)
    assert torch.equal(*found)
    assert bool(((found[0] - x.double().sum(0)).abs() <= roundings * x.double().abs().sum(0)).all())


def test_sums_of_columns_have_what_is_no_number(level: str) -> None:
    x = torch.zeros(70, 40)
    x[66, 3], x[2, 39], x[69, 39] = torch.nan, torch.inf, -torch.inf
    sums = torch.zeros(40)
    cpp_extensions.column_sums(x, sums)
    assert sums.isnan().nonzero().flatten().tolist() == [3, 39] and bool((sums[[*range(3), *range(4, 39)]] == 0).all())
    with pytest.raises(ShapeError, match="dst: expected 40"):
        cpp_extensions.column_sums(x, torch.zeros(39))
