"""FP8 blocks, MXFP8 and NVFP4: bytes and scales of every copy, bit for bit, and back."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from tex_backends import Runner, on_backends
from torch import Tensor

from fusible.conformance import block_oracle as oracle
from fusible.conformance.block_oracle import F
from fusible.quantized import Float8BlockQuantizer, MXFP8Quantizer, NVFP4Quantizer
from fusible.tex import DType
from fusible.tex.backends.torch_backend import number_formats

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
USAGES = [(True, False), (False, True), (True, True)]
RHT = {"with_rht": True, "with_post_rht_amax": True}

pytestmark = on_backends("quantize", "dequantize", "bgrad_quantize", "create_empty_quantized_tensor")


def spread(shape: tuple[int, int], dtype: torch.dtype = torch.float32, seed: int = 1, exponents: int = 6) -> Tensor:
    """Normal numbers whose size differs from row to row and from column to column."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(-exponents, exponents, (shape[0], 1), generator=generator)
    columns = torch.randint(-exponents, exponents, (1, shape[1]), generator=generator)
    return (torch.randn(shape, generator=generator) * 2.0**rows * 2.0**columns).to(dtype)


def special(shape: tuple[int, int], length: int) -> Tensor:
    """A matrix whose blocks hold zeros, subnormals, huge numbers, and one infinity or NaN among ordinary numbers."""
    x = spread(shape, seed=2)
    x[:length, :length] = 0
    x[:length, length : 2 * length] = torch.tensor([1e-45, -3e-39, 2e-38, -0.0]).repeat(length // 4)
    x[length : 2 * length, :length] *= 2.0**110
    x[length + 1, length + 1] = math.inf
    x[length + 2, length + 1] = -math.inf
    x[2 * length - 1, 2 * length - 1] = 3.4e38
    return x


def same_fp8(got: Tensor, expected: np.ndarray, fp8: int) -> None:
    """Equal bytes; of NaN, which has several, only that it is one."""
    found = got.numpy()
    nan = np.isnan(expected.view(oracle.NUMPY[fp8]).astype(F))
    np.testing.assert_array_equal(np.isnan(found.view(oracle.NUMPY[fp8]).astype(F)), nan)
    np.testing.assert_array_equal(found[~nan], expected[~nan])


def same_scales(got: Tensor, expected: np.ndarray) -> None:
    """Equal bits in the upper left, and zeros around."""
    rows, columns = expected.shape
    np.testing.assert_array_equal(got.numpy()[:rows, :columns].view(np.uint8), np.ascontiguousarray(expected).view(np.uint8))
    rest = got.clone()
    rest[:rows, :columns] = 0
    assert not rest.any()


def fp32(x: Tensor) -> np.ndarray:
    return x.float().numpy()


# FP8 blocks

BLOCK_SHAPES = [(256, 256), (130, 300), (1, 5), (7, 128), (129, 1), (3, 200)]


@pytest.mark.parametrize("shape", BLOCK_SHAPES)
@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize(("fp8", "options"), [(E4M3, {}), (E5M2, {"force_pow_2_scales": False}), (E4M3, {"amax_epsilon": 0.5})])
def test_fp8_blocks(runner: Runner, shape: tuple[int, int], dim: int, fp8: DType, options: dict[str, Any]) -> None:
    for dtype in DTYPES:
        x = spread(shape, dtype, exponents=3)
        t = runner("quantize", tensor=x, quantizer=Float8BlockQuantizer(fp8, block_scaling_dim=dim, **options))
        assert t._is_2D_scaled == (dim == 2) and t._fp8_dtype == fp8 and t._dtype is dtype
        check_fp8_blocks(t, x, dim, fp8, **options)


def check_fp8_blocks(t: Any, x: Tensor, dim: int, fp8: DType, amax_epsilon: float = 0.0, force_pow_2_scales: bool = True) -> None:
    rule = amax_epsilon, force_pow_2_scales, torch.finfo(x.dtype).max
    if t._rowwise_data is not None:
        data, scales = oracle.block_fp8(fp32(x), fp8, (1, 128) if dim == 1 else (128, 128), *rule)
        same_fp8(t._rowwise_data, data, fp8)
        same_scales(t._rowwise_scale_inv, scales.T if dim == 1 else scales)
        assert t._rowwise_scale_inv.shape[1] % 4 == 0
    if t._columnwise_data is not None:
        data, scales = oracle.block_fp8(fp32(x), fp8, (128, 1) if dim == 1 else (128, 128), *rule)
        same_fp8(t._columnwise_data, np.ascontiguousarray(data.T), fp8)
        same_scales(t._columnwise_scale_inv, scales if dim == 1 else scales.T)
        assert t._columnwise_scale_inv.shape[1] % 4 == 0


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("power_of_two", [True, False])
def test_fp8_blocks_of_special_values(runner: Runner, dim: int, power_of_two: bool) -> None:
    x = special((384, 256), 128)
    x[300, 200] = math.nan
    t = runner("quantize", tensor=x, quantizer=Float8BlockQuantizer(E4M3, block_scaling_dim=dim, force_pow_2_scales=power_of_two))
    check_fp8_blocks(t, x, dim, E4M3, force_pow_2_scales=power_of_two)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("power_of_two", [True, False])
def test_a_scale_that_overflows_is_the_largest_value_of_the_dtype(runner: Runner, dtype: torch.dtype, power_of_two: bool) -> None:
    x = torch.full((1, 128), 2.0**-24 if dtype is torch.float16 else 1e-38, dtype=dtype) * torch.arange(128, dtype=dtype) / 128
    quantizer = Float8BlockQuantizer(E5M2, block_scaling_dim=1, force_pow_2_scales=power_of_two)
    check_fp8_blocks(runner("quantize", tensor=x, quantizer=quantizer), x, 1, E5M2, force_pow_2_scales=power_of_two)


# MXFP8


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("fp8", [E4M3, E5M2])
@pytest.mark.parametrize("shape", [(160, 96), (32, 32), (64, 256)])
def test_mxfp8(runner: Runner, shape: tuple[int, int], fp8: DType, tiled: bool) -> None:
    for dtype in DTYPES:
        x = spread(shape, dtype, exponents=5)
        check_mxfp8(runner("quantize", tensor=x, quantizer=MXFP8Quantizer(fp8, with_2d_quantization=tiled)), x, fp8, tiled)


def test_mxfp8_of_special_values(runner: Runner) -> None:
    x = special((96, 96), 32)
    x[70, 70] = math.nan
    for fp8 in (E4M3, E5M2):
        check_mxfp8(runner("quantize", tensor=x, quantizer=MXFP8Quantizer(fp8)), x, fp8, False)
    t = runner("quantize", tensor=x, quantizer=MXFP8Quantizer(E4M3))
    assert t._rowwise_scale_inv[70, 2] == 255 and t._rowwise_scale_inv[33, 1] == 254 and t._rowwise_scale_inv[0, 0] == 0


def check_mxfp8(t: Any, x: Tensor, fp8: DType, tiled: bool) -> None:
    rows, columns = x.shape
    for way, block in (("rowwise", (1, 32)), ("columnwise", (32, 1))):
        data, scales = oracle.mxfp8(fp32(x), fp8, (32, 32) if tiled else block)
        same_fp8(getattr(t, f"_{way}_data"), data, fp8)
        same_scales(getattr(t, f"_{way}_scale_inv"), scales.repeat(32, 0 if way == "rowwise" else 1) if tiled else scales)
    assert t._rowwise_scale_inv.shape == (-(-rows // 128) * 128, -(-columns // 128) * 4)
    assert t._columnwise_scale_inv.shape == (-(-rows // 128) * 4, -(-columns // 128) * 128)


# NVFP4


def unpacked(data: Tensor) -> np.ndarray:
    return number_formats.unpack_nibbles(data).numpy()


def same_codes(data: Tensor, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(unpacked(data), expected)


def check_nvfp4(t: Any, x: Tensor, quantizer: NVFP4Quantizer) -> None:
    over6 = quantizer.nvfp4_4over6_err_mode if quantizer.nvfp4_use_4over6 else None
    sources = {"rowwise": fp32(x)}
    sources["columnwise"] = oracle.transformed(fp32(x), quantizer.rht_matrix_random_sign_mask_t != 0) if quantizer.with_rht else fp32(x).T
    for way, asked in (("rowwise", quantizer.rowwise_usage), ("columnwise", quantizer.columnwise_usage)):
        data, scales, amax = (getattr(t, f"_{name}") for name in (f"{way}_data", f"{way}_scale_inv", f"amax_{way}"))
        if not asked:
            assert data is scales is amax is None
            continue
        source = np.ascontiguousarray(sources[way])
        expected = np.abs(source).max(1) if quantizer.row_scaled_nvfp4 else np.abs(source).max(keepdims=True).reshape(1)
        np.testing.assert_array_equal(amax.numpy(), expected)
        codes, bytes_ = oracle.nvfp4(source, expected, quantizer.with_2d_quantization, over6, quantizer.nvfp4_e4m3_max)
        same_codes(data, codes)
        nan = (bytes_ & 127) == 127
        found = scales.numpy()[: bytes_.shape[0], : bytes_.shape[1]]
        assert ((found & 127 == 127) == nan).all() and (found[~nan] == bytes_[~nan]).all()
        assert scales.shape[0] % 128 == scales.shape[1] % 4 == 0 and scales.shape[0] - source.shape[0] < 128


NVFP4_OPTIONS: list[dict[str, Any]] = [
    {},
    {"with_2d_quantization": True},
    {"row_scaled_nvfp4": True},
    *({"nvfp4_use_4over6": True, "nvfp4_4over6_err_mode": mode, "nvfp4_e4m3_max": top} for mode in ("MAE", "MSE") for top in (448, 256)),
    {"nvfp4_use_4over6": True, "with_2d_quantization": True},
    {"nvfp4_use_4over6": True, "row_scaled_nvfp4": True, "nvfp4_4over6_err_mode": "MSE", "nvfp4_e4m3_max": 256},
]


@pytest.mark.parametrize("options", NVFP4_OPTIONS)
@pytest.mark.parametrize(("rowwise", "columnwise"), USAGES)
def test_nvfp4(runner: Runner, options: dict[str, Any], rowwise: bool, columnwise: bool) -> None:
    for dtype, exponents in ((torch.float32, 6), (torch.bfloat16, 3), (torch.float16, 1)):
        x = spread((48, 80), dtype, exponents=exponents)
        quantizer = NVFP4Quantizer(rowwise=rowwise, columnwise=columnwise, **options)
        t = runner("quantize", tensor=x, quantizer=quantizer)
        assert (t._row_scaled_nvfp4, t._nvfp4_use_4over6) == (quantizer.row_scaled_nvfp4, quantizer.nvfp4_use_4over6)
        assert t._nvfp4_e4m3_max == quantizer.nvfp4_e4m3_max and t._fp4_dtype == DType.kFloat4E2M1 and not t._with_gemm_swizzled_scales
        check_nvfp4(t, x, quantizer)


@pytest.mark.parametrize("options", NVFP4_OPTIONS)
@pytest.mark.parametrize("factor", [0.0, 1e-40, 2.0**-126, 1e30, 2.0**120])
def test_nvfp4_of_tiny_and_huge_tensors(runner: Runner, options: dict[str, Any], factor: float) -> None:
    x = spread((32, 32), exponents=2) * factor
    quantizer = NVFP4Quantizer(**options)
    check_nvfp4(runner("quantize", tensor=x, quantizer=quantizer), x, quantizer)


@pytest.mark.parametrize("options", NVFP4_OPTIONS[3:])
def test_nvfp4_of_many_lines_is_that_of_few_with_the_same_amaxes(runner: Runner, options: dict[str, Any]) -> None:
    x, quantizer = spread((2048, 64), exponents=3), NVFP4Quantizer(**options)
    whole = runner("quantize", tensor=x, quantizer=quantizer)
    amaxes, columns = whole._amax_rowwise, whole._amax_columnwise
    for first in range(0, 2048, 512):
        part = slice(first, first + 512)
        own = amaxes[part] if quantizer.row_scaled_nvfp4 else amaxes
        few = runner("nvfp4_quantize_with_amax", tensor=x[part], quantizer=quantizer, rowwise_amax=own, columnwise_amax=columns)
        for name in ("data", "scale_inv"):
            assert torch.equal(getattr(whole, f"_rowwise_{name}")[part], getattr(few, f"_rowwise_{name}"))
        assert torch.equal(whole._columnwise_data[:, first // 2 : first // 2 + 256], few._columnwise_data)


def test_nvfp4_scales_are_a_product_with_the_rounded_sixth(runner: Runner) -> None:
    """Amaxes of a tensor and a block for which ``a * (S * (1 / 6))``, ``a * (S / 6)`` and ``a / 6 * S`` round to different E4M3 values."""
    pairs = [(4.072887420654297, 2.763744831085205), (1.5281219482421875, 0.00025315911625511944), (3.1816937923431396, 0.26987579464912415)]
    for amax, largest in pairs:
        x = torch.zeros(16, 32)
        x[0, 0], x[3, 20] = amax, -largest
        quantizer = NVFP4Quantizer()
        check_nvfp4(runner("quantize", tensor=x, quantizer=quantizer), x, quantizer)


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("options", NVFP4_OPTIONS[:3])
def test_nvfp4_of_a_tensor_that_is_not_finite(runner: Runner, options: dict[str, Any], value: float) -> None:
    x = spread((32, 32), exponents=2)
    x[3, 20] = value
    x[5] = 0
    quantizer = NVFP4Quantizer(**options)
    check_nvfp4(runner("quantize", tensor=x, quantizer=quantizer), x, quantizer)


@pytest.mark.parametrize("signs", [True, False])
@pytest.mark.parametrize(("rowwise", "columnwise"), USAGES)
def test_the_hadamard_transform_is_of_the_columnwise_copy_alone(runner: Runner, rowwise: bool, columnwise: bool, signs: bool) -> None:
    x = spread((64, 48), torch.bfloat16, exponents=3)
    quantizer = NVFP4Quantizer(rowwise=rowwise, columnwise=columnwise, with_random_sign_mask=signs, **RHT)
    check_nvfp4(runner("quantize", tensor=x, quantizer=quantizer), x, quantizer)


# Values


def expanded(scales: np.ndarray, block: tuple[int, int], shape: tuple[int, int]) -> np.ndarray:
    return scales.repeat(block[0], 0).repeat(block[1], 1)[: shape[0], : shape[1]]


QUANTIZERS: list[Any] = [
    lambda **usages: Float8BlockQuantizer(E4M3, block_scaling_dim=1, **usages),
    lambda **usages: Float8BlockQuantizer(E5M2, block_scaling_dim=2, force_pow_2_scales=False, **usages),
    lambda **usages: MXFP8Quantizer(E4M3, **usages),
    lambda **usages: MXFP8Quantizer(E5M2, with_2d_quantization=True, **usages),
    *(lambda options=options, **usages: NVFP4Quantizer(**options, **usages) for options in [*NVFP4_OPTIONS, RHT]),
]


def value_of(t: Any, way: str) -> np.ndarray:
    """The fp64 matrix that a copy stands for, with whatever transform it has."""
    data, scales = getattr(t, f"_{way}_data"), getattr(t, f"_{way}_scale_inv").numpy()
    rows, columns = t.shape
    if hasattr(t, "_fp4_dtype"):
        lines = oracle.e2m1_values(unpacked(data)).astype(np.float64)
        by_block = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        amax = getattr(t, f"_amax_{way}").double().numpy().reshape(-1, 1)
        lines = lines * expanded(by_block, (1, 16), lines.shape) * amax / (6 * t._nvfp4_e4m3_max)
        return lines if way == "rowwise" else lines.T
    values = data.numpy().view(oracle.NUMPY[t._fp8_dtype]).astype(np.float64)
    if hasattr(t, "_is_2D_scaled"):
        scales, values = (scales if t._is_2D_scaled == (way == "rowwise") else scales.T), (values if way == "rowwise" else values.T)
        block = (128, 128) if t._is_2D_scaled else (1, 128) if way == "rowwise" else (128, 1)
    else:
        scales, block = scales.view(ml_dtypes.float8_e8m0fnu), (1, 32) if way == "rowwise" else (32, 1)
    return values * expanded(scales.astype(np.float64), block, (rows, columns))


@pytest.mark.parametrize("make", QUANTIZERS)
@pytest.mark.parametrize("swizzled", [False, True])
def test_dequantize(runner: Runner, make: Any, swizzled: bool) -> None:
    x = spread((160, 96), torch.bfloat16, exponents=2)
    plain = runner("quantize", tensor=x, quantizer=make())
    quantizer = make()
    quantizer.optimize_for_gemm = swizzled
    for way in ("rowwise", "columnwise"):
        quantizer.set_usage(rowwise=way == "rowwise", columnwise=way == "columnwise")
        t = runner("quantize", tensor=x, quantizer=quantizer)
        expected = value_of(plain, way)
        if getattr(quantizer, "with_rht", False) and way == "columnwise":
            expected = (expected.T.reshape(-1, 16) @ quantizer.rht_matrix.double().numpy().T).reshape(96, 160).T
        got = runner("dequantize", input=t, otype=torch.float32)
        # Three roundings of fp32 at most; the transform sums 16 products of a quarter.
        tolerance = 2**-22 * (1 if not getattr(quantizer, "with_rht", False) else 16)
        np.testing.assert_allclose(got.numpy(), expected, rtol=tolerance, atol=tolerance * np.abs(expected).max() * (tolerance > 2**-22))
        assert got.shape == x.shape and got.is_contiguous()
        half = runner("dequantize", input=t, otype=torch.bfloat16)
        assert torch.equal(half, got.bfloat16())


@pytest.mark.parametrize("make", [make for make in QUANTIZERS[2:]])
def test_swizzled_scales_are_the_same_in_another_order(runner: Runner, make: Any) -> None:
    x = spread((160, 160), torch.bfloat16, exponents=2)
    quantizer = make()
    plain = runner("quantize", tensor=x, quantizer=quantizer)
    quantizer.optimize_for_gemm = True
    t = runner("quantize", tensor=x, quantizer=quantizer)
    assert t._with_gemm_swizzled_scales and not plain._with_gemm_swizzled_scales
    assert torch.equal(t._rowwise_data, plain._rowwise_data) and torch.equal(t._columnwise_data, plain._columnwise_data)
    np.testing.assert_array_equal(t._rowwise_scale_inv.numpy(), oracle.swizzled(plain._rowwise_scale_inv.numpy()))
    columns = plain._columnwise_scale_inv.numpy()
    if isinstance(quantizer, MXFP8Quantizer):
        np.testing.assert_array_equal(t._columnwise_scale_inv.numpy().ravel(), oracle.swizzled(columns.T.copy()).ravel())
    else:
        np.testing.assert_array_equal(t._columnwise_scale_inv.numpy(), oracle.swizzled(columns))
