"""FP8 casts bit for bit, scales, amaxes, layouts, and quantizing in place."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tex_backends import Runner, on_backends
from torch import Tensor

from fusible.errors import ArgumentError, DTypeError, ShapeError
from fusible.quantized import Float8CurrentScalingQuantizer, Float8Quantizer
from fusible.tex import DType
from fusible.tex.protocol import FLT_MAX, FP8_MAX

FORMATS = [DType.kFloat8E4M3, DType.kFloat8E5M2]
NUMPY = {DType.kFloat8E4M3: ml_dtypes.float8_e4m3fn, DType.kFloat8E5M2: ml_dtypes.float8_e5m2}
TORCH = {DType.kFloat8E4M3: torch.float8_e4m3fn, DType.kFloat8E5M2: torch.float8_e5m2}

pytestmark = on_backends("quantize", "dequantize", "bgrad_quantize", "fp8_transpose", "compute_amax")


def delayed(fp8: DType, scale: float = 1.0, **usages: bool) -> Float8Quantizer:
    return Float8Quantizer(torch.tensor([scale]), torch.zeros(1), fp8, **usages)


def oracle(x: Tensor, scale: float, fp8: DType) -> np.ndarray:
    """The bytes that a saturating cast to nearest even gives, by ml_dtypes."""
    with np.errstate(all="ignore"):
        product = x.float().numpy() * np.float32(scale)
    return np.clip(product, -FP8_MAX[fp8], FP8_MAX[fp8]).astype(NUMPY[fp8])


def assert_same_bytes(data: Tensor, expected: np.ndarray) -> None:
    got = data.numpy().view(expected.dtype)
    nan = np.isnan(expected.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    np.testing.assert_array_equal(data.numpy()[~nan], expected.view(np.uint8)[~nan])


EVERY_BFLOAT16 = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)


@pytest.mark.parametrize("fp8", FORMATS)
@pytest.mark.parametrize("scale", [1.0, 0.3, 1e-30, 3e30])
def test_every_bfloat16_is_cast_to_the_nearest_with_saturation(runner: Runner, fp8: DType, scale: float) -> None:
    quantized = runner("quantize", tensor=EVERY_BFLOAT16, quantizer=delayed(fp8, scale))
    assert_same_bytes(quantized._data, oracle(EVERY_BFLOAT16, scale, fp8))


@pytest.mark.parametrize("fp8", FORMATS)
def test_random_fp32_bits_are_cast_to_the_nearest_with_saturation(runner: Runner, fp8: DType) -> None:
    bits = torch.randint(-(1 << 31), 1 << 31, (64, 512), generator=torch.Generator().manual_seed(3), dtype=torch.int64).to(torch.int32)
    near = torch.randn(64, 512, generator=torch.Generator().manual_seed(4)) * 2.0 ** torch.arange(-24, 40).view(64, 1)
    for x in (bits.view(torch.float32), near):
        assert_same_bytes(runner("quantize", tensor=x, quantizer=delayed(fp8))._data, oracle(x, 1.0, fp8))


@pytest.mark.parametrize("fp8", FORMATS)
def test_special_values_and_ties(runner: Runner, fp8: DType) -> None:
    largest = FP8_MAX[fp8]
    values = [
        0.0,
        -0.0,
        math.inf,
        -math.inf,
        math.nan,
        largest,
        -largest,
        largest * 1.03,
        1e38,
        2.0**-9,
        2.0**-10,
        2.0**-16,
        2.0**-17,
        1.0625,
        1.125,
        1.25,
    ]
    x = torch.tensor([values])
    data = runner("quantize", tensor=x, quantizer=delayed(fp8))._data
    assert_same_bytes(data, oracle(x, 1.0, fp8))
    decoded = data.view(TORCH[fp8]).float()[0]
    assert decoded[2] == largest and decoded[3] == -largest and decoded[4].isnan()
    assert math.copysign(1, decoded[1].item()) == -1


@pytest.mark.parametrize("fp8", FORMATS)
@pytest.mark.parametrize("otype", [torch.float32, torch.bfloat16, DType.kFloat16, 4])
def test_every_byte_is_decoded_exactly(runner: Runner, fp8: DType, otype: object) -> None:
    quantizer = delayed(fp8, 0.25)
    quantized = runner("quantize", tensor=torch.zeros(16, 16), quantizer=quantizer)
    quantized._data.copy_(torch.arange(256, dtype=torch.int32).to(torch.uint8).view(16, 16))
    value = runner("dequantize", input=quantized, otype=otype)
    expected = (np.arange(256, dtype=np.uint8).view(NUMPY[fp8]).astype(np.float32) * 4).reshape(16, 16)
    torch.testing.assert_close(value, torch.from_numpy(expected).to(value.dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 5), (7,), (0, 4), (3, 0), (2, 3, 2, 4)])
@pytest.mark.parametrize(("rowwise", "columnwise"), [(True, False), (False, True), (True, True)])
def test_usages_decide_which_copies_are_made(runner: Runner, shape: tuple[int, ...], rowwise: bool, columnwise: bool) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    quantized = runner("quantize", tensor=x, quantizer=delayed(DType.kFloat8E4M3, 2.0, rowwise=rowwise, columnwise=columnwise))
    expected = torch.from_numpy(oracle(x, 2.0, DType.kFloat8E4M3).view(np.uint8))
    assert (quantized._data is not None, quantized._transpose is not None) == (rowwise, columnwise)
    if rowwise:
        assert torch.equal(quantized._data, expected) and quantized._data.is_contiguous()
    if columnwise:
        assert torch.equal(quantized._transpose, expected.movedim(-1, 0)) and quantized._transpose.is_contiguous()
    assert quantized._dtype is torch.bfloat16
    assert torch.equal(quantized._scale_inv, torch.tensor([0.5]))
    back = runner("dequantize", input=quantized, otype=torch.float32)
    assert back.shape == x.shape and torch.equal(back, expected.view(torch.float8_e4m3fn).float() * 0.5)


def test_no_usage_at_all_is_refused(runner: Runner) -> None:
    with pytest.raises(ArgumentError, match="rowwise or columnwise usage"):
        runner("quantize", tensor=torch.zeros(2, 2), quantizer=delayed(DType.kFloat8E4M3, rowwise=False, columnwise=False))


def test_a_strided_tensor_is_quantized_like_its_copy(runner: Runner) -> None:
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(1)).t()
    quantized = runner("quantize", tensor=x, quantizer=delayed(DType.kFloat8E4M3))
    assert quantized._data.is_contiguous()
    assert_same_bytes(quantized._data, oracle(x.contiguous(), 1.0, DType.kFloat8E4M3))


@pytest.mark.parametrize("shape", [(1,), ()])
def test_delayed_scaling_raises_the_amax_and_never_lowers_it(runner: Runner, shape: tuple[int, ...]) -> None:
    amax = torch.full(shape, 2.0)
    quantizer = Float8Quantizer(torch.tensor([1.0]), amax, DType.kFloat8E4M3)
    runner("quantize", tensor=torch.tensor([[1.0, -1.5]]), quantizer=quantizer)
    assert amax.item() == 2.0
    runner("quantize", tensor=torch.tensor([[1.0, -3.5]]), quantizer=quantizer)
    assert quantizer.amax is amax and amax.item() == 3.5


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_non_finite_element_shows_in_the_amax(runner: Runner, value: float) -> None:
    quantizer = Float8Quantizer(torch.ones(1), None, DType.kFloat8E5M2)
    runner("quantize", tensor=torch.tensor([[1.0, value]]), quantizer=quantizer)
    assert not quantizer.amax.isfinite().all()
    buffered = delayed(DType.kFloat8E5M2)
    runner("quantize", tensor=torch.tensor([[value, 7.0]]), quantizer=buffered)
    assert not buffered.amax.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 4), (0, 4)])
def test_without_an_amax_buffer_the_amax_is_assigned(runner: Runner, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    quantizer = Float8Quantizer(torch.ones(1), None, DType.kFloat8E4M3)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    runner("quantize", tensor=x, quantizer=quantizer)
    assert quantizer.amax.shape == (1,) and quantizer.amax.dtype is torch.float32
    assert quantizer.amax.item() == (x.float().abs().max().item() if x.numel() else 0)


def rule(amax: float, fp8: DType, power_of_two: bool, epsilon: float) -> np.float32:
    """The scale of an amax, in NumPy's fp32."""
    with np.errstate(all="ignore"):
        a = np.float32(amax)
        if a < np.float32(epsilon):
            a = np.float32(epsilon)
        if not np.isfinite(a) or a == 0:
            return np.float32(1)
        scale = np.float32(FP8_MAX[fp8]) / a
        if np.isinf(scale):
            scale = np.float32(FLT_MAX)
        return (scale.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32) if power_of_two else scale


AMAXES = [0.0, 1.0, 3.0, 448.0, 1e-3, 1e-38, 1e-40, 1e38, 3.3e38, math.inf, math.nan, 0.1, 7.7]


@pytest.mark.parametrize("fp8", FORMATS)
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("epsilon", [0.0, 0.5])
def test_current_scaling_follows_the_rule(runner: Runner, fp8: DType, power_of_two: bool, epsilon: float) -> None:
    quantizer = Float8CurrentScalingQuantizer(fp8, "cpu", force_pow_2_scales=power_of_two, amax_epsilon=epsilon)
    for amax in AMAXES:
        x = torch.tensor([[0.0, -amax]])
        quantized = runner("quantize", tensor=x, quantizer=quantizer)
        scale = rule(amax, fp8, power_of_two, epsilon)
        with np.errstate(all="ignore"):
            assert quantized._scale_inv.item() == np.float32(1) / scale, amax
            assert_same_bytes(quantized._data, oracle(x, float(scale), fp8))


@given(amax=st.floats(min_value=2.0**-100, max_value=2.0**100, width=32), fp8=st.sampled_from(FORMATS))
def test_any_amax_is_scaled_to_the_largest_value(runner: Runner, amax: float, fp8: DType) -> None:
    quantized = runner("quantize", tensor=torch.tensor([[amax, amax / 3]]), quantizer=Float8CurrentScalingQuantizer(fp8, "cpu"))
    assert quantized._scale_inv.item() == np.float32(1) / rule(amax, fp8, False, 0.0)
    assert quantized._data[0, 0].view(TORCH[fp8]).float().item() == FP8_MAX[fp8]


@pytest.mark.parametrize("internal", [False, True])
def test_an_output_is_written_in_place(runner: Runner, internal: bool) -> None:
    quantizer = delayed(DType.kFloat8E4M3, 2.0)
    quantizer.internal = internal
    first = runner("quantize", tensor=torch.zeros(2, 3), quantizer=quantizer)
    data, transpose, scale_inv = first._data, first._transpose, first._scale_inv
    quantizer.scale = torch.tensor([4.0])
    x = torch.arange(6.0).view(2, 3)
    assert runner("quantize", tensor=x, quantizer=quantizer, output=first) is first
    assert first._data is data and first._transpose is transpose and first._scale_inv is scale_inv
    assert torch.equal(runner("dequantize", input=first, otype=torch.float32), x)
    assert torch.equal(transpose, data.t()) and scale_inv.item() == 0.25


def test_a_transpose_that_is_not_asked_for_is_marked_stale(runner: Runner) -> None:
    quantizer = delayed(DType.kFloat8E4M3)
    quantized = runner("quantize", tensor=torch.zeros(2, 3), quantizer=quantizer)
    quantizer.columnwise_usage = False
    runner("quantize", tensor=torch.ones(2, 3), quantizer=quantizer, output=quantized)
    assert quantized._transpose_invalid


@pytest.mark.parametrize("skip", [0.0, 1.0])
def test_noop_writes_nothing_at_all(runner: Runner, skip: float) -> None:
    quantizer = delayed(DType.kFloat8E4M3, 2.0)
    output = runner("quantize", tensor=torch.ones(2, 3), quantizer=quantizer)
    before = [output._data.clone(), output._transpose.clone(), output._scale_inv.clone(), quantizer.amax.clone()]
    quantizer.scale = torch.tensor([4.0])
    runner("quantize", tensor=torch.full((2, 3), 5.0), quantizer=quantizer, output=output, noop=torch.tensor([skip]))
    after = [output._data, output._transpose, output._scale_inv, quantizer.amax]
    assert all(torch.equal(a, b) == bool(skip) for a, b in zip(before, after, strict=True))


def test_an_output_of_another_shape_is_refused_before_anything_is_written(runner: Runner) -> None:
    quantizer = delayed(DType.kFloat8E4M3)
    output = runner("quantize", tensor=torch.zeros(2, 3), quantizer=quantizer)
    with pytest.raises(ShapeError, match=r"expected shape \[2, 3\]"):
        runner("quantize", tensor=torch.ones(3, 2), quantizer=quantizer, output=output)
    assert quantizer.amax.item() == 0 and not output._data.any()


def test_bgrad_quantize_gives_the_bias_gradient_first(runner: Runner) -> None:
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    bias_grad, quantized = runner("bgrad_quantize", input=x, quantizer=delayed(DType.kFloat8E5M2))
    assert torch.equal(bias_grad, x.float().sum((0, 1)).to(torch.bfloat16))
    assert_same_bytes(quantized._data, oracle(x, 1.0, DType.kFloat8E5M2))
    assert runner("bgrad_quantize", input=x, quantizer=None)[1] is x


@pytest.mark.parametrize("internal", [False, True])
def test_empty_quantized_tensors_have_the_buffers_of_the_usages(runner: Runner, internal: bool) -> None:
    quantizer = delayed(DType.kFloat8E4M3, columnwise=True)
    quantizer.internal = internal
    arguments = {"shape": [2, 3, 4], "dtype": torch.bfloat16, "device": torch.device("cpu"), "pin_memory": False}
    empty = runner("create_empty_quantized_tensor", quantizer=quantizer, **arguments)
    assert isinstance(empty, torch.Tensor) != internal
    assert empty._data.shape == (2, 3, 4) and empty._transpose.shape == (4, 2, 3) and empty._data.dtype is torch.uint8
    assert empty._scale_inv.shape == (1,) and empty._dtype is torch.bfloat16 and not empty._transpose_invalid


@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 5), (0, 3), (5,)])
def test_fp8_transpose(runner: Runner, shape: tuple[int, ...]) -> None:
    data = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    expected = data.movedim(-1, 0)
    result = runner("fp8_transpose", input=data, dtype=DType.kFloat8E4M3, out=None)
    assert torch.equal(result, expected) and result.is_contiguous()
    out = torch.empty_like(result)
    assert runner("fp8_transpose", input=data, dtype=DType.kFloat8E4M3, out=out) is out and torch.equal(out, expected)


def test_fp8_transpose_refuses_another_shape_or_type(runner: Runner) -> None:
    data = torch.zeros(2, 3, dtype=torch.uint8)
    with pytest.raises(ShapeError, match=r"shape \[3, 2\]"):
        runner("fp8_transpose", input=data, dtype=DType.kFloat8E4M3, out=torch.zeros(2, 3, dtype=torch.uint8))
    with pytest.raises(DTypeError, match="uint8"):
        runner("fp8_transpose", input=data.float(), dtype=DType.kFloat8E4M3, out=None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_compute_amax_overwrites(runner: Runner, dtype: torch.dtype) -> None:
    amax = torch.tensor([9.0])
    assert runner("compute_amax", input=torch.tensor([[1.0, -2.0]], dtype=dtype), amax=amax) is None
    assert amax.item() == 2.0
    runner("compute_amax", input=torch.zeros(0, 3, dtype=dtype), amax=amax)
    assert amax.item() == 0.0
    runner("compute_amax", input=torch.tensor([[1.0, math.nan]], dtype=dtype), amax=amax)
    assert amax.isnan()
    with pytest.raises(DTypeError, match=r"fp32 \[1\]"):
        runner("compute_amax", input=torch.zeros(2, dtype=dtype), amax=torch.zeros(2))


def test_other_things_than_quantizers_and_quantized_tensors_are_refused(runner: Runner) -> None:
    for other in (object(), None):
        with pytest.raises(DTypeError, match="a quantizer"):
            runner("quantize", tensor=torch.zeros(2, 2), quantizer=other)
    with pytest.raises(DTypeError, match="a quantized tensor"):
        runner("dequantize", input=torch.zeros(2, 2), otype=torch.float32)
