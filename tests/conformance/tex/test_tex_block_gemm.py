"""generic_gemm of block-scaled operands and results: every format with every other, against float64 products of the values of the copies."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from tex_backends import Runner, on_backends
from torch import Tensor

from fusible.errors import ArgumentError
from fusible.quantized import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from fusible.tex import DType

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2
RHT = {"with_rht": True, "with_post_rht_amax": True}
MAKERS: dict[str, Any] = {
    "bf16": lambda **usages: None,
    "float8": lambda **usages: Float8CurrentScalingQuantizer(E5M2, **usages),
    "block-1d": lambda **usages: Float8BlockQuantizer(E4M3, block_scaling_dim=1, **usages),
    "block-2d": lambda **usages: Float8BlockQuantizer(E4M3, block_scaling_dim=2, **usages),
    "mxfp8": lambda **usages: MXFP8Quantizer(E4M3, **usages),
    "nvfp4": lambda **usages: NVFP4Quantizer(**usages),
    "nvfp4-2d": lambda **usages: NVFP4Quantizer(with_2d_quantization=True, **usages),
    "nvfp4-rht": lambda **usages: NVFP4Quantizer(**RHT, **usages),
    "nvfp4-rows": lambda **usages: NVFP4Quantizer(row_scaled_nvfp4=True, **usages),
    "nvfp4-over6": lambda **usages: NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_e4m3_max=256, **usages),
}
QUANTIZED = [name for name in MAKERS if name != "bf16"]
# Layout: shapes of A and B, their flags.
LAYOUTS: dict[str, Any] = {
    "TN": ((64, 96), True, (2, 16, 96), False),
    "NN": ((64, 96), False, (2, 16, 64), False),
    "NT": ((2, 16, 96), False, (2, 16, 64), True),
    "TT": ((32, 96), True, (96, 64), True),
}
K = 96

CALL: dict[str, Any] = {
    **dict.fromkeys(("D", "quantizer", "output_dtype", "bias", "gelu_in", "workspace")),
    **dict.fromkeys(("gelu", "grad", "accumulate", "use_split_accumulator"), False),
    "bias_type": torch.bfloat16,
    "workspace_size": 0,
}

pytestmark = on_backends("split_quantize", "generic_gemm")


def normal(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def operand(runner: Runner, name: str, x: Tensor, **usages: bool) -> Any:
    quantizer = MAKERS[name](**usages)
    return x if quantizer is None else runner("quantize", tensor=x, quantizer=quantizer)


def value(runner: Runner, name: str, x: Tensor, rowwise: bool) -> Tensor:
    """What the copy that a product reads stands for, as a fp64 matrix; of a transformed one, before the transform."""
    if name == "bf16":
        return x.double().flatten(0, -2)
    t = runner("quantize", tensor=x, quantizer=MAKERS[name](rowwise=rowwise, columnwise=not rowwise))
    return runner("dequantize", input=t, otype=torch.float32).double().flatten(0, -2)


def expectation(runner: Runner, layout: str, a_name: str, b_name: str) -> tuple[dict[str, Any], Tensor, Tensor]:
    """The arguments of a call, its exact result, and how much that may err by: fp32 sums of up to K products, and two roundings of each factor."""
    a_shape, trans_a, b_shape, trans_b = LAYOUTS[layout]
    a, b = normal(a_shape, 1), normal(b_shape, 2)
    call = {**CALL, "A": operand(runner, a_name, a), "transA": trans_a, "B": operand(runner, b_name, b), "transB": trans_b}
    left, right = value(runner, b_name, b, not trans_b), value(runner, a_name, a, trans_a)
    left, right = left.T if trans_b else left, right.T if trans_a else right
    exact, size = left @ right, left.abs() @ right.abs()
    if not trans_b:
        exact, size = (y.reshape(*b_shape[:-1], -1) for y in (exact, size))
    # A Hadamard transform and its inverse sum 16 products, each as large as the largest of 16 elements.
    widest = size.max() if "nvfp4-rht" in (a_name, b_name) else size
    return call, exact, (K + 40) * 2**-24 * widest


@pytest.mark.parametrize(("a_name", "b_name"), [pair for pair in product(MAKERS, MAKERS) if pair != ("bf16", "bf16")])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_format_with_every_other(runner: Runner, layout: str, a_name: str, b_name: str) -> None:
    call, exact, error = expectation(runner, layout, a_name, b_name)
    result = runner("generic_gemm", **{**call, "output_dtype": torch.float32})
    assert result[1:] == [None, None, None] and result[0].dtype is torch.float32 and result[0].shape == exact.shape
    assert ((result[0].double() - exact).abs() <= error).all()


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_swizzled_scales_and_single_copies_give_the_same_product(runner: Runner, layout: str, name: str) -> None:
    a_shape, trans_a, b_shape, trans_b = LAYOUTS[layout]
    a, b = normal(a_shape, 1), normal(b_shape, 2)
    call = {**CALL, "transA": trans_a, "transB": trans_b}
    expected = runner("generic_gemm", A=operand(runner, name, a), B=operand(runner, name, b), **call)[0]
    quantizers = MAKERS[name](rowwise=trans_a, columnwise=not trans_a), MAKERS[name](rowwise=not trans_b, columnwise=trans_b)
    for swizzled in (False, True):
        for quantizer in quantizers:
            quantizer.optimize_for_gemm = swizzled
        left, right = (runner("quantize", tensor=x, quantizer=q) for x, q in zip((a, b), quantizers, strict=True))
        assert torch.equal(runner("generic_gemm", A=left, B=right, **call)[0], expected)


def test_the_copy_along_the_contracted_dimension_is_needed(runner: Runner) -> None:
    x = normal((32, 32), 1)
    for name in ("block-1d", "mxfp8", "nvfp4"):
        t = operand(runner, name, x, columnwise=False)
        with pytest.raises(ArgumentError, match="a tensor of .*: expected a columnwise copy, got only the rowwise one"):
            runner("generic_gemm", **{**CALL, "A": t, "transA": False, "B": x, "transB": False})
        with pytest.raises(ArgumentError, match="a rowwise copy"):
            alone = operand(runner, name, x, rowwise=False)
            runner("generic_gemm", **{**CALL, "A": alone, "transA": True, "B": x, "transB": False})


@pytest.mark.parametrize("name", QUANTIZED)
def test_epilogues(runner: Runner, name: str) -> None:
    call, exact, error = expectation(runner, "TN", name, name)
    bias = normal((64,), 3)
    y, none, pre, _ = runner("generic_gemm", **{**call, "output_dtype": torch.float32, "bias": bias, "gelu": True, "bias_type": torch.float32})
    assert none is None and pre.dtype is torch.float32 and ((pre.double() - exact - bias.double()).abs() <= error + 2**-24 * 64).all()
    torch.testing.assert_close(y, torch.nn.functional.gelu(pre, approximate="tanh"), rtol=2**-18, atol=2**-18)
    d = torch.ones(exact.shape)
    out = runner("generic_gemm", **{**call, "D": d, "accumulate": True, "alpha": 2.0})[0]
    assert out is d and ((d.double() - 1 - 2 * exact).abs() <= 2 * error + 2**-24 * (1 + 2 * exact.abs())).all()
    call, exact, error = expectation(runner, "NT", name, name)
    dw, bias_grad, _, _ = runner("generic_gemm", **{**call, "output_dtype": torch.float32, "grad": True, "bias": bias})
    rows = runner("dequantize", input=call["B"], otype=torch.float32).flatten(0, -2)
    assert torch.equal(bias_grad, rows.sum(0)) and ((dw.double() - exact).abs() <= error).all()


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("operands", ["bf16", "float8", "mxfp8"])
def test_results_are_rounded_and_then_quantized(runner: Runner, name: str, operands: str) -> None:
    call, _, _ = expectation(runner, "TN", operands, operands)
    y = runner("generic_gemm", **{**call, "output_dtype": torch.bfloat16})[0]
    expected = runner("dequantize", input=runner("quantize", tensor=y, quantizer=MAKERS[name]()), otype=torch.float32)
    for d in (None, operand(runner, name, normal((2, 16, 64), 4))):
        result = runner("generic_gemm", **{**call, "output_dtype": torch.bfloat16, "quantizer": MAKERS[name](), "D": d})[0]
        assert d is None or result is d
        assert torch.equal(runner("dequantize", input=result, otype=torch.float32), expected)
    d = operand(runner, name, normal((2, 16, 64), 4))
    assert runner("generic_gemm", **{**call, "output_dtype": torch.bfloat16, "D": d})[0] is d
    assert torch.equal(runner("dequantize", input=d, otype=torch.float32), expected)


def test_only_per_tensor_operands_are_quantized_from_the_accumulator(runner: Runner) -> None:
    """Delayed scaling by a huge scale shows the bits that bfloat16 lacks."""
    for name, direct in (("float8", True), ("mxfp8", False)):
        call, _, _ = expectation(runner, "TN", name, name)
        wide = runner("generic_gemm", **{**call, "output_dtype": torch.float32})[0]
        quantizer = Float8Quantizer(torch.ones(1), None, E4M3)
        runner("generic_gemm", **{**call, "output_dtype": torch.bfloat16, "quantizer": quantizer})
        assert quantizer.amax.item() == (wide if direct else wide.bfloat16().float()).abs().max().item()
        assert wide.abs().max() != wide.bfloat16().float().abs().max()


@pytest.mark.parametrize("name", QUANTIZED)
def test_an_empty_operand_makes_zeros(runner: Runner, name: str) -> None:
    w, x = operand(runner, name, normal((64, 96), 1)), operand(runner, name, normal((96, 96), 1)[:0])
    assert runner("generic_gemm", **{**CALL, "A": w, "transA": True, "B": x, "transB": False})[0].shape == (0, 64)
    dw = runner("generic_gemm", **{**CALL, "A": x, "transA": False, "B": operand(runner, name, normal((64, 64), 1)[:0]), "transB": True})[0]
    assert dw.shape == (64, 96) and not dw.any()
