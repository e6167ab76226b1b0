"""FP8 in 1x128 and 128x128 blocks by the compiled kernels beside plain torch: every option of a quantizer to the bit, and products within the
rounding of their sums."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from native_calls import by_torch, native

from fusible import cpp_extensions, tex
from fusible.quantized import Float8BlockQuantizer

pytestmark = pytest.mark.skipif(not cpp_extensions.available, reason="no compiled kernels")

FORMATS = (tex.DType.kFloat8E4M3, tex.DType.kFloat8E5M2)
COPIES = ((True, False), (False, True), (True, True))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OTYPES = dict(zip(DTYPES, (tex.DType.kFloat32, tex.DType.kBFloat16, tex.DType.kFloat16), strict=True))
BUFFERS = ("_rowwise_data", "_columnwise_data", "_rowwise_scale_inv", "_columnwise_scale_inv")
SHAPES = ((1, 1), (5, 7), (64, 64), (128, 128), (130, 260), (2, 3, 200), (257, 384), (0, 128), (3, 0))


def quantizer(
    fp8: tex.DType = FORMATS[0], rowwise: bool = True, columnwise: bool = True, dim: int = 1, power_of_two: bool = True, epsilon: float = 0.0
) -> Any:
    options = {"amax_epsilon": epsilon, "force_pow_2_scales": power_of_two, "block_scaling_dim": dim}
    return Float8BlockQuantizer(fp8, rowwise=rowwise, columnwise=columnwise, **options)


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-20, 20, shape, generator=generator))


def _stored(x: Any, name: str) -> torch.Tensor | None:
    """The bytes of a buffer, all NaNs as one: E5M2 has three codes of each, and torch's cast drops the signs of some."""
    buffer = getattr(x, name)
    if buffer is None or not name.endswith("data"):
        return buffer if buffer is None else buffer.contiguous().view(torch.uint8)
    return torch.where((buffer & 0x7F) > (0x7C if x._fp8_dtype == FORMATS[1] else 0x7E), 0x7F, buffer)


def same(a: Any, b: Any) -> bool:
    pairs = [(_stored(a, name), _stored(b, name)) for name in BUFFERS]
    return all(x is y if x is None or y is None else torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("copies", "dim", "power_of_two"), [*product(COPIES, (1, 2), (False, True))])
def test_quantizing_is_torchs_to_the_bit(copies: tuple[bool, bool], dim: int, power_of_two: bool, dtype: torch.dtype) -> None:
    for number, (fp8, shape) in enumerate(product(FORMATS, SHAPES)):
        x, epsilon = values(*shape, seed=number).to(dtype), 3.0 * (number % 2)
        options = (fp8, *copies, dim, power_of_two, epsilon)
        found, wanted = native(tex.quantize, x, quantizer(*options)), by_torch(tex.quantize, x, quantizer(*options))
        assert same(found, wanted), (fp8, shape, epsilon)
        for otype in {tex.DType.kFloat32, OTYPES[dtype]}:
            result = native(tex.dequantize, found, otype)
            assert result.is_contiguous() and torch.equal(result, by_torch(tex.dequantize, wanted, otype))
        for noop in (None, torch.zeros(1), torch.ones(1)):  # into a tensor that is there
            other = values(*shape, seed=number + 100).to(dtype)
            native(tex.quantize, other, quantizer(*options), found, noop)
            by_torch(tex.quantize, other, quantizer(*options), wanted, noop)
            assert same(found, wanted), (fp8, shape, epsilon, noop)


@pytest.mark.parametrize("level", cpp_extensions.usable_levels() if cpp_extensions.available else [])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_plain_is_torchs(dtype: torch.dtype, level: str) -> None:
    """NaN of both signs, infinities, zeros; subnormals, whose scales overflow; numbers whose scales have subnormal inverses, or are small."""
    cpp_extensions.set_level(level)
    for magnitude, fp8, dim, power_of_two in product((1e-45, 1e-39, 1e-36, 6e-8, 1.0, 1e30, 3e38), FORMATS, (1, 2), (False, True)):
        x = torch.randn(131, 260, generator=torch.Generator().manual_seed(0)).clamp(-1, 1) * magnitude
        x[20:23], x[:, 9], x[40, :128], x[60, 3] = 0.0, -0.0, -0.0, torch.finfo(torch.float32).max
        x[3, 5], x[7, 40], x[10, 2], x[130, 259] = torch.nan, torch.inf, -torch.nan, -torch.inf  # none in the square in the middle
        x, options = x.to(dtype), {"fp8": fp8, "dim": dim, "power_of_two": power_of_two}
        found, wanted = (ask(tex.quantize, x, quantizer(**options)) for ask in (native, by_torch))
        assert same(found, wanted), (magnitude, options)
        signs = found._rowwise_data[x.isnan()] >> 7
        assert torch.equal(signs, x[x.isnan()].signbit().to(torch.uint8))
        assert torch.equal(signs, found._columnwise_data.t()[x.isnan()] >> 7)
        results = [ask(tex.dequantize, of, tex.DType.kFloat32) for ask, of in ((native, found), (by_torch, wanted))]
        torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)


def test_threads_change_nothing() -> None:
    x = values(700, 2100)
    results = []
    for threads in (1, 2, 3):
        rows, columns = (torch.zeros(shape, dtype=torch.uint8) for shape in ((700, 2100), (2100, 700)))
        buffers = (rows, torch.zeros(17, 700), columns, torch.zeros(6, 2100))
        cpp_extensions.quantize_block_fp8(x, torch.float8_e4m3fn, *buffers, num_threads=threads)
        out = torch.empty(x.shape)
        cpp_extensions.dequantize_block_fp8(buffers[0], buffers[1], False, out, torch.float8_e4m3fn, num_threads=threads)
        results.append((*buffers, out))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("magnitude", [1.0, 2.0**-100], ids=["plain", "beyond products of bf16"])
@pytest.mark.parametrize(("trans_a", "trans_b"), [*product((True, False), (True, False))])
def test_products_are_those_of_the_values(trans_a: bool, trans_b: bool, magnitude: float, power_of_two: bool) -> None:
    for (m, n, k), dims in product(((5, 7, 9), (64, 96, 128), (160, 64, 300), (130, 512, 384)), ((1, 1), (2, 1))):
        a = values(*((n, k) if trans_a else (k, n)), seed=1) * magnitude
        b = values(*((k, m) if trans_b else (m, k)), seed=2) / magnitude
        a, b = (native(tex.quantize, x, quantizer(dim=dim, power_of_two=power_of_two)) for x, dim in zip((a, b), dims, strict=True))
        rest = (None, None, tex.DType.kFloat32, None, None, False, None, False, None, 0, False, False)
        found, wanted = (ask(tex.generic_gemm, a, trans_a, b, trans_b, *rest)[0] for ask in (native, by_torch))
        of_a, of_b = (_read(x, along).double() for x, along in ((a, trans_a), (b, not trans_b)))
        left, right = of_b.t() if trans_b else of_b, of_a.t() if trans_a else of_a
        bound = 4 * torch.finfo(torch.float32).eps * k**0.5 * (left.abs() @ right.abs())
        for result in (found, wanted):
            assert ((result.double() - left @ right).abs() <= bound).all()


def _read(x: Any, along_rows: bool) -> torch.Tensor:
    """The values of the copy that a product reads."""
    kept = quantizer(rowwise=along_rows, columnwise=not along_rows, dim=2 if x._is_2D_scaled else 1)
    copy = kept.make_empty(tuple(x.shape))
    for name in BUFFERS:
        if getattr(copy, name) is not None:
            setattr(copy, name, getattr(x, name))
    return by_torch(tex.dequantize, copy, tex.DType.kFloat32)


def test_what_bf16_holds_is_said() -> None:
    """A scale that is no power of two, or a value beyond 2^-60 .. 2^60, is a product's that is computed in fp32."""
    codes, out = torch.full((3, 130), 0x38, dtype=torch.uint8), torch.empty(3, 130, dtype=torch.bfloat16)
    for scale, plain in ((1.0, True), (2.0**-50, True), (2.0**-61, False), (2.0**61, False), (1.5, False), (torch.nan, False), (0.0, True)):
        scales = torch.ones(2, 3)
        scales[1, 2] = scale
        assert cpp_extensions.dequantize_block_fp8(codes, scales, False, out, torch.float8_e4m3fn) is plain, scale
        assert torch.equal(out[2, 128:].float().nan_to_num(7.0), torch.full((2,), scale).nan_to_num(7.0))


def test_wrong_arguments_are_refused_before_anything_is_written() -> None:
    x, codes, scales = values(130, 200), torch.full((130, 200), 0x55, dtype=torch.uint8), torch.full((2, 130), 5.0)
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"dst": codes}, "codes and their scales"),
        ({"dst": codes, "scale_inv": scales[:1]}, "a matrix of at least 2 x 130"),
        ({"dst": codes, "scale_inv": scales.to(torch.uint8)}, "float32"),
        ({"dst": codes, "scale_inv": scales, "dst_columns": codes.clone(), "scale_inv_columns": scales.clone()}, "a matrix of at least 2 x 200"),
        ({}, "dst or dst_columns"),
        ({"dst": codes, "scale_inv": scales, "num_threads": -1}, "num_threads"),
    )
    for given, sentence in wrong:
        with pytest.raises((TypeError, ValueError), match=sentence):
            cpp_extensions.quantize_block_fp8(x, torch.float8_e4m3fn, **given)
    assert (codes == 0x55).all() and (scales == 5.0).all()
