"""dequantize, amax and the byte transpose against numpy, at every level."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusible import cpp_extensions

NUMPY = {
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
    torch.float8_e5m2: ml_dtypes.float8_e5m2,
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.bfloat16: ml_dtypes.bfloat16,
}
WIDE = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
FORMATS = pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)


def _as_numpy(x: torch.Tensor) -> np.ndarray:
    integer = torch.int32 if x.dtype == torch.float32 else torch.int16
    return x.view(integer).numpy().view(NUMPY[x.dtype])


def _same(found: np.ndarray, wanted: np.ndarray) -> None:
    """Equal bits, except that one NaN is as good as another of its sign."""
    nan = np.isnan(wanted.astype(np.float32))
    integer = np.uint32 if wanted.itemsize == 4 else np.uint16
    np.testing.assert_array_equal(np.isnan(found.astype(np.float32)), nan)
    np.testing.assert_array_equal(np.signbit(found.astype(np.float32)), np.signbit(wanted.astype(np.float32)))
    np.testing.assert_array_equal(found.view(integer)[~nan], wanted.view(integer)[~nan])


@FORMATS
@WIDE
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("scale_inv", [1.0, 0.3, 2.0**-20, 2.0**-125, 3.0e36, -2.0])
def test_every_code_has_its_exact_value(level: str, fp8: torch.dtype, dtype: torch.dtype, threads: int, scale_inv: float) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(130)[: 130 * 256 - 5]
    out = torch.empty(codes.shape, dtype=dtype)
    cpp_extensions.dequantize(codes.view(fp8), out, scale_inv, fp8, num_threads=threads)
    with np.errstate(all="ignore"):
        product = codes.numpy().view(NUMPY[fp8]).astype(np.float32) * np.float32(scale_inv)
        _same(_as_numpy(out), product.astype(NUMPY[dtype]))


@given(count=st.integers(0, 100), data=st.data())
def test_any_length_is_written_and_nothing_beyond_it(count: int, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    cpp_extensions.set_level(data.draw(st.sampled_from(cpp_extensions.usable_levels())))
    codes, out = torch.arange(64, 64 + count, dtype=torch.uint8) % 120, torch.full((count + 40,), -1.0, dtype=dtype)
    cpp_extensions.dequantize(codes, out[:count], 1.0, torch.float8_e4m3fn)
    assert torch.equal(out[:count].float(), codes.view(torch.float8_e4m3fn).float())
    assert (out[count:] == -1).all()


@WIDE
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("count", [1, 3, 63, 64, 65, 40_001])
def test_amax_is_the_largest_magnitude_wherever_it_is(level: str, dtype: torch.dtype, threads: int, count: int) -> None:
    x = torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)
    for place in {0, count // 2, count - 1}:
        changed = x.clone()
        changed[place] = -100.5
        out = torch.zeros(1)
        assert cpp_extensions.amax(changed, out, threads) == out.item() == 100.5
        changed[place] = float("-inf")
        assert cpp_extensions.amax(changed, num_threads=threads) == float("inf")
        changed[count - 1 - place] = float("nan")
        assert np.isnan(cpp_extensions.amax(changed, num_threads=threads))


def test_amax_of_nothing_is_zero_and_of_a_subnormal_is_itself(level: str) -> None:
    assert cpp_extensions.amax(torch.empty(0)) == 0.0
    assert cpp_extensions.amax(torch.tensor([-1e-45, 0.0])) == np.float32(1e-45)
    assert cpp_extensions.amax(torch.full((70,), 2.0**-24, dtype=torch.float16)) == 2.0**-24


@given(rows=st.integers(0, 200), cols=st.integers(0, 200), threads=st.integers(1, 2), data=st.data())
def test_bytes_are_transposed_for_any_shape(rows: int, cols: int, threads: int, data: st.DataObject) -> None:
    cpp_extensions.set_level(data.draw(st.sampled_from(cpp_extensions.usable_levels())))
    x = torch.randint(0, 256, (rows, cols), dtype=torch.uint8)
    out = torch.empty(cols, rows, dtype=torch.uint8)
    cpp_extensions.transpose_bytes(x, out, threads)
    assert torch.equal(out, x.t())
