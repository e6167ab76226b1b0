"""MXFP8 by the compiled kernels beside plain torch: every option of a quantizer to the bit, and products within the rounding of their sums."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from native_calls import by_torch, native

from fusible import cpp_extensions, tex
from fusible.quantized import MXFP8Quantizer

pytestmark = pytest.mark.skipif(not cpp_extensions.available, reason="no compiled kernels")

FORMATS = (tex.DType.kFloat8E4M3, tex.DType.kFloat8E5M2)
COPIES = ((True, False), (False, True), (True, True))
BUFFERS = ("_rowwise_data", "_columnwise_data", "_rowwise_scale_inv", "_columnwise_scale_inv")


def quantizer(fp8: tex.DType = FORMATS[0], rowwise: bool = True, columnwise: bool = True, swizzled: bool = False, tiled: bool = False) -> Any:
    made = MXFP8Quantizer(fp8, rowwise=rowwise, columnwise=columnwise)
    made.optimize_for_gemm, made.with_2d_quantization = swizzled, tiled
    return made


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-20, 20, shape, generator=generator))


def same(a: Any, b: Any) -> bool:
    pairs = [(getattr(a, name), getattr(b, name)) for name in BUFFERS]
    return a._with_gemm_swizzled_scales == b._with_gemm_swizzled_scales and all(x is y is None or torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("copies", "swizzled", "tiled"), [*product(COPIES, (False, True), (False, True))])
def test_quantizing_is_torchs_to_the_bit(copies: tuple[bool, bool], swizzled: bool, tiled: bool, dtype: torch.dtype) -> None:
    for number, (fp8, shape) in enumerate(product(FORMATS, ((64, 96), (2, 32, 160), (256, 128), (0, 64)))):
        x, options = values(*shape, seed=number).to(dtype), (fp8, *copies, swizzled, tiled)
        found, wanted = native(tex.quantize, x, quantizer(*options)), by_torch(tex.quantize, x, quantizer(*options))
        assert same(found, wanted), (fp8, shape)
        for otype in (tex.DType.kFloat32, tex.DType.kBFloat16):
            assert torch.equal(native(tex.dequantize, found, otype), by_torch(tex.dequantize, wanted, otype))
        for noop in (None, torch.zeros(1), torch.ones(1)):  # into a tensor that is there
            other = values(*shape, seed=number + 10).to(dtype)
            native(tex.quantize, other, quantizer(*options), found, noop)
            by_torch(tex.quantize, other, quantizer(*options), wanted, noop)
            assert same(found, wanted), (fp8, shape, noop)


def test_infinities_zeros_and_not_a_number_are_torchs() -> None:
    x = values(64, 128)
    x[3, 5], x[7, 40], x[10, 2], x[20:23], x[:, 9] = torch.nan, torch.inf, -torch.nan, 0.0, -0.0
    for fp8, tiled in product(FORMATS, (False, True)):
        found, wanted = (ask(tex.quantize, x, quantizer(fp8, tiled=tiled)) for ask in (native, by_torch))
        for way in ("rowwise", "columnwise"):
            assert torch.equal(getattr(found, f"_{way}_scale_inv"), getattr(wanted, f"_{way}_scale_inv"))
        torch.testing.assert_close(
            *(ask(tex.dequantize, of, tex.DType.kFloat32) for ask, of in ((native, found), (by_torch, wanted))), rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("magnitude", [1.0, 2.0**-100], ids=["plain", "beyond products of bf16"])
@pytest.mark.parametrize(("trans_a", "trans_b"), [*product((True, False), (True, False))])
def test_products_are_those_of_the_values(trans_a: bool, trans_b: bool, magnitude: float, swizzled: bool) -> None:
    for m, n, k in ((32, 32, 64), (64, 96, 128), (160, 64, 32), (128, 512, 384)):
        a = values(*((n, k) if trans_a else (k, n)), seed=1) * magnitude
        b = values(*((k, m) if trans_b else (m, k)), seed=2) / magnitude
        a, b = (native(tex.quantize, x, quantizer(swizzled=swizzled)) for x in (a, b))
        rest = (None, None, tex.DType.kFloat32, None, None, False, None, False, None, 0, False, False)
        found, wanted = (ask(tex.generic_gemm, a, trans_a, b, trans_b, *rest)[0] for ask in (native, by_torch))
        of_a, of_b = (_read(x, along).double() for x, along in ((a, trans_a), (b, not trans_b)))
        left, right = of_b.t() if trans_b else of_b, of_a.t() if trans_a else of_a
        bound = 4 * torch.finfo(torch.float32).eps * k**0.5 * (left.abs() @ right.abs())
        for result in (found, wanted):
            assert ((result.double() - left @ right).abs() <= bound).all()


def _read(x: Any, along_rows: bool) -> torch.Tensor:
    """The values of the copy that a product reads."""
    kept = quantizer(rowwise=along_rows, columnwise=not along_rows, swizzled=x._with_gemm_swizzled_scales)
    copy = kept.make_empty(tuple(x.shape))
    for name in BUFFERS:
        if getattr(copy, name) is not None:
            setattr(copy, name, getattr(x, name))
    copy._with_gemm_swizzled_scales = x._with_gemm_swizzled_scales
    return by_torch(tex.dequantize, copy, tex.DType.kFloat32)
