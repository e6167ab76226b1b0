"""Block-scaled formats on lazy tensors: every quantizer gives the bits of the torch backend, and products read every copy of every format.

XLA's float arithmetic takes subnormals for zero, so inputs below 2^-126 quantize to zero, and NVFP4's errors of 4-over-6 count only above.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import test_tex_block_gemm as gemm
import torch
from test_tex_block_formats import NVFP4_OPTIONS, same_fp8, spread
from torch import Tensor
from xla_runner import RUNNER

from fusible import lazy, tex
from fusible.errors import NotServedError, ShapeError
from fusible.quantized import Float8BlockQuantizer, MXFP8Quantizer, NVFP4Quantizer
from fusible.tex import DType

pytest.importorskip("jaxlib")

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2
SMALLEST = torch.finfo(torch.float32).tiny
QUANTIZERS: dict[str, Any] = {
    **{
        f"block-{fp8.name[7:]}-{dim}d-{power}": Float8BlockQuantizer(fp8, block_scaling_dim=dim, force_pow_2_scales=power)
        for fp8, dim, power in product((E4M3, E5M2), (1, 2), (True, False))
    },
    "block-epsilon": Float8BlockQuantizer(E4M3, block_scaling_dim=1, amax_epsilon=0.5),
    **{f"mxfp8-{fp8.name[7:]}-{tiled}": MXFP8Quantizer(fp8, with_2d_quantization=tiled) for fp8, tiled in product((E4M3, E5M2), (False, True))},
    **{f"nvfp4-{i}": NVFP4Quantizer(**options) for i, options in enumerate(NVFP4_OPTIONS)},
    "nvfp4-stochastic": NVFP4Quantizer(stochastic_rounding=True),
}


def special(dtype: torch.dtype) -> Tensor:
    """Blocks of zeros, of small numbers, and with an infinity or NaN, among others that differ in size."""
    x = spread((64, 160), seed=3, exponents=12)
    x[:32, :32] = 0
    x[32:48] *= 1e-34
    x[5, 100], x[60, 70], x[61, 140] = torch.inf, -torch.inf, torch.nan
    x[7] = -0.0
    return torch.where(x.abs() < SMALLEST, 0.0, x).to(dtype)


def check_same(t: Any, reference: Any) -> None:
    """Equal bits; of NaN only that it is one."""
    names = [name for name, value in vars(reference).items() if isinstance(value, Tensor)]
    assert names and {name for name, value in vars(t).items() if isinstance(value, Tensor)} == set(names)
    for name in names:
        a, b = getattr(t, name), getattr(reference, name)
        if name.endswith("scale_inv") and type(reference).__name__.startswith("NVFP4"):
            a, b = (value.view(torch.float8_e4m3fn).float() for value in (a, b))
        assert a.shape == b.shape and a.dtype is b.dtype, name
        if name.endswith("wise_data") and hasattr(reference, "_fp8_dtype"):
            same_fp8(a, b.numpy(), reference._fp8_dtype)
        else:
            assert torch.equal(a.nan_to_num(nan=-7.0), b.nan_to_num(nan=-7.0)), name


def reference(x: Tensor, quantizer: Any) -> Any:
    with tex.set_backend("torch"):
        return tex.quantize(x, quantizer, None, None).storage_without_autograd()


@pytest.mark.parametrize("name", QUANTIZERS)
def test_quantizing_gives_the_bits_of_the_torch_backend(name: str) -> None:
    quantizer, dtype = QUANTIZERS[name], (torch.float32, torch.bfloat16)[len(name) % 2]
    tensors = [spread((48, 96) if name.startswith("nv") else (64, 160), dtype, exponents=4), special(dtype)]
    torch.manual_seed(4)
    quantized = RUNNER("multi_tensor_quantize", tensor_list=tensors, quantizer_list=[quantizer, quantizer])
    torch.manual_seed(4)
    for t, x in zip(quantized, tensors, strict=True):
        check_same(t, reference(x, quantizer))


@pytest.mark.parametrize("factor", [2.0**-126, 2.0**-118, 2.0**-64, 1e30, 2.0**120])
def test_tensors_whose_scale_has_a_subnormal_inverse_are_scaled_alike(factor: float) -> None:
    x = spread((32, 32), exponents=2) * factor
    x = torch.where(x.abs() < 64 * SMALLEST, 0.0, x)
    quantizers = [NVFP4Quantizer(), MXFP8Quantizer(E4M3), Float8BlockQuantizer(E4M3, block_scaling_dim=1)]
    quantized = RUNNER("multi_tensor_quantize", tensor_list=[x] * 3, quantizer_list=quantizers)
    for t, quantizer in zip(quantized, quantizers, strict=True):
        check_same(t, reference(x, quantizer))


def test_a_given_tensor_is_written_unless_a_flag_says_no() -> None:
    first, second = spread((32, 64), seed=1), spread((32, 64), seed=2)
    for quantizer in (MXFP8Quantizer(E4M3), Float8BlockQuantizer(E4M3), NVFP4Quantizer()):
        held = reference(first, quantizer)
        RUNNER("quantize", tensor=second, quantizer=quantizer, output=held, noop=torch.ones(1))
        check_same(held, reference(first, quantizer))
        RUNNER("quantize", tensor=second, quantizer=quantizer, output=held, noop=torch.zeros(1))
        check_same(held, reference(second, quantizer))
        with pytest.raises(ShapeError, match="the tensor quantized into output"):
            RUNNER("quantize", tensor=spread((64, 64)), quantizer=quantizer, output=held)


def test_several_tensors_and_given_amaxes() -> None:
    x, quantizers = spread((96, 64)), [MXFP8Quantizer(E4M3), None]
    first, second = RUNNER("split_quantize", tensor=x, split_sections=[32, 64], quantizer_list=quantizers)
    check_same(first, reference(x[:32], quantizers[0]))
    assert torch.equal(second, x[32:])
    amax = torch.tensor([100.0])
    arguments = {"tensor": x, "quantizer": NVFP4Quantizer(), "rowwise_amax": amax, "columnwise_amax": amax}
    with tex.set_backend("torch"):
        expected = tex.nvfp4_quantize_with_amax(*arguments.values())
    check_same(RUNNER("nvfp4_quantize_with_amax", **arguments), expected.storage_without_autograd())


def test_swizzled_scales_are_read_back() -> None:
    x, quantizer = spread((64, 128)), MXFP8Quantizer(E4M3)
    quantizer.optimize_for_gemm = True
    swizzled = RUNNER("quantize", tensor=x, quantizer=quantizer)
    check_same(swizzled, reference(x, quantizer))
    for usages in ({"rowwise": True, "columnwise": False}, {"rowwise": False, "columnwise": True}):
        one = reference(x, quantizer.with_usages(**usages))
        assert torch.equal(RUNNER("dequantize", input=one, otype=torch.float32), tex.dequantize(one, torch.float32))


NAMES = [*gemm.MAKERS]
PRODUCTS = [(a, NAMES[(i + step) % len(NAMES)], [*gemm.LAYOUTS][(i + step) % 3]) for i, a in enumerate(NAMES) for step in (0, 1)]


@pytest.mark.parametrize(("a", "b", "layout"), PRODUCTS)
def test_products_read_every_format(a: str, b: str, layout: str) -> None:
    """fp32 sums of at most 96 terms in another order: off by ``sqrt(96) * eps`` of the norms' product, root mean square; four times that at most."""
    shape_a, trans_a, shape_b, trans_b = gemm.LAYOUTS[layout]
    tensors = [gemm.normal(shape, seed) for seed, shape in enumerate((shape_a, shape_b))]
    quantizers = [gemm.MAKERS[name]() for name in (a, b)]
    A, B = (x if quantizer is None else reference(x, quantizer) for x, quantizer in zip(tensors, quantizers, strict=True))
    call = {**gemm.CALL, "A": A, "transA": trans_a, "B": B, "transB": trans_b, "output_dtype": torch.float32}
    expected, got = (runner("generic_gemm", **call)[0] for runner in (gemm_of_torch, RUNNER))
    norms = max(tensors[0].double().norm(dim=0).max().item(), tensors[0].double().norm(dim=-1).max().item()) * tensors[1].double().norm().item()
    assert (got - expected).abs().max().item() <= 4 * 96**0.5 * torch.finfo(torch.float32).eps * norms


def gemm_of_torch(function: str, **call: Any) -> Any:
    with tex.set_backend("torch"):
        return getattr(tex, function)(**call)


def test_stochastic_rounding_in_a_program_without_seeds_is_refused() -> None:
    quantizer = NVFP4Quantizer(stochastic_rounding=True)
    said = "stochastic rounding of lazy tensors of quantize of compile: expected .*, got an argument of a function being compiled"
    with pytest.raises(NotServedError, match=said):
        lazy.compile(lambda x: tex.quantize(x * 2, quantizer, None, None)._rowwise_data, args=[lazy.InputInfo((16, 16), lazy.float32)])
