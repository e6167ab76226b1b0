"""Casts to 8 bits and back agree bit for bit with ml_dtypes, with saturation."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import torch

from fusible import nvte
from fusible.nvte import DType, Pass, QuantizedType, Tensor
from fusible.quantized import FP8_MAX, Float8CurrentScalingQuantizer, Float8Quantizer

ORACLE = {DType.Float8E4M3: ml_dtypes.float8_e4m3fn, DType.Float8E5M2: ml_dtypes.float8_e5m2}
FORMATS = [pytest.param(dtype, id=str(dtype)) for dtype in ORACLE]
SCALES = (1.0, 2.0**10, 3.7, 2.0**-9)


def _every_bf16() -> torch.Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def _every_fp16() -> torch.Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16)


def _fp32() -> torch.Tensor:
    """Random bit patterns (subnormals, infinities and NaN among them), values of ordinary size, and what lies on and beside each tie."""
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (60000,), generator=generator, dtype=torch.int64).to(torch.int32).view(torch.float32)
    ordinary = torch.randn(20000, generator=generator) * 2.0 ** torch.randint(-20, 18, (20000,), generator=generator)
    codes = np.arange(127, dtype=np.uint8)
    ties = []
    for oracle in ORACLE.values():
        values = codes.view(oracle).astype(np.float32)
        values = values[np.isfinite(values)]
        middle = (values[1:] + values[:-1]) / 2
        ties.append(np.concatenate([middle, np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(0))]))
    near = torch.from_numpy(np.concatenate(ties))
    infinity = float("inf")
    special = torch.tensor([0.0, -0.0, infinity, -infinity, float("nan"), 1e-45, -1e-45, 448.0, 464.0, 465.0, 57344.0, 61440.0, 65536.0, 3.4e38])
    return torch.cat([bits, ordinary, near, -near, special])


SOURCES = [pytest.param(make, id=make.__name__.removeprefix("_")) for make in (_every_bf16, _every_fp16, _fp32)]


def _expected(x: torch.Tensor, scale: float, dtype: DType) -> np.ndarray:
    """``cast(x * scale)`` with the product in fp32, saturated to the largest finite value; NaN stays NaN."""
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = x.float().numpy() * np.float32(scale)
    largest = FP8_MAX[int(dtype)]
    return np.clip(scaled, -largest, largest).astype(ORACLE[dtype]).view(np.uint8)


def _same_bytes(got: torch.Tensor, expected: np.ndarray, dtype: DType) -> None:
    """Equal bytes; of NaN, which has several, only that it is one."""
    found = got.numpy()
    nan = np.isnan(expected.view(ORACLE[dtype]).astype(np.float32))
    assert np.array_equal(np.isnan(found.view(ORACLE[dtype]).astype(np.float32)), nan)
    assert np.array_equal(found[~nan], expected[~nan])


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("make", SOURCES)
def test_a_given_scale(make: Callable[[], torch.Tensor], dtype: DType, scale: float) -> None:
    x = make()
    finite = x.float()[x.float().isfinite()].abs().max()
    expected = _expected(x, scale, dtype)
    quantized = Float8Quantizer(torch.tensor([scale]), torch.zeros(1), int(dtype))(x)
    _same_bytes(quantized._data, expected, dtype)
    type_ = QuantizedType(dtype, "delayed", "s")
    word, amax = nvte.quantize(Tensor(x, nvte.nvte_dtype(x.dtype)), type_, torch.tensor([scale]))
    _same_bytes(word.data._data, expected, dtype)
    assert amax.isnan() and word.scale_inv.item() == np.float32(1) / np.float32(scale)
    kept = x[x.float().isfinite()]
    _, amax = nvte.quantize(Tensor(kept, nvte.nvte_dtype(x.dtype)), type_, torch.tensor([scale]))
    assert amax.item() == finite.item()


@pytest.mark.parametrize("dtype", FORMATS)
def test_every_byte_is_decoded_exactly_and_comes_back(dtype: DType) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    values = torch.from_numpy(codes.numpy().view(ORACLE[dtype]).astype(np.float32))
    quantizer = Float8Quantizer(torch.ones(1), torch.zeros(1), int(dtype))
    decoded = quantizer(torch.zeros(256))
    decoded._data.copy_(codes)
    got = decoded.dequantize(dtype=torch.float32)
    finite = values.isfinite()
    assert torch.equal(got[finite], values[finite]) and torch.equal(got.isnan(), values.isnan()) and torch.equal(got.isinf(), values.isinf())
    assert torch.equal(torch.signbit(got[finite]), torch.signbit(values[finite]))
    assert torch.equal(quantizer(values)._data[finite], codes[finite])


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("amax", [1.0, 0.3, 448.0, 1e-30, 1e-40, 3e38, 0.0])
def test_current_scaling_takes_the_tensors_own_scale(dtype: DType, amax: float, power_of_two: bool) -> None:
    x = torch.linspace(-1, 1, 101) * amax
    largest = np.float32(x.abs().max().item())
    with np.errstate(over="ignore", divide="ignore"):
        scale = np.minimum(np.float32(FP8_MAX[int(dtype)]) / largest, np.finfo(np.float32).max) if largest > 0 else np.float32(1)
    if power_of_two:
        scale = np.float32(2.0 ** np.floor(np.log2(np.float64(scale))))
    quantized = Float8CurrentScalingQuantizer(int(dtype), force_pow_2_scales=power_of_two)(x)
    assert quantized._scale_inv.item() == np.float32(1) / scale
    _same_bytes(quantized._data, _expected(x, scale, dtype), dtype)
    assert torch.equal(quantized._transpose, quantized._data)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_current_scaling_of_a_tensor_that_is_not_finite(dtype: DType, bad: float) -> None:
    """Its scale is 1: NaN stays NaN, an infinity is the largest value, the rest is as it would be."""
    x = torch.tensor([1.0, bad, -3.0, 0.0])
    quantized = Float8CurrentScalingQuantizer(int(dtype))(x)
    assert quantized._scale_inv.item() == 1
    _same_bytes(quantized._data, _expected(x, 1.0, dtype), dtype)


@pytest.mark.parametrize("dtype", FORMATS)
def test_words_note_what_they_observe(dtype: DType) -> None:
    x = Tensor(torch.tensor([[1.0, -5.0], [2.0, 3.0]]), DType.Float32)
    type_ = QuantizedType(dtype, "delayed", "3.x")
    with nvte.running(Pass("forward", {"3.x": torch.tensor([8.0])})) as state:
        y, transposed = nvte.cast_transpose(x, type_)
    assert state.amaxes["3.x"].item() == 5.0
    assert torch.equal(nvte.dequantize(transposed, DType.Float32).data, x.data.t()) and y.type == transposed.type == type_
    with nvte.running(Pass("forward", {"3.x": torch.tensor([8.0])})) as state:
        z, dbias = nvte.bgrad_cast(x, type_, DType.Float32)
    assert torch.equal(z.data._data, y.data._data) and torch.equal(dbias.data, torch.tensor([3.0, -2.0])) and set(state.amaxes) == {"3.x"}
