"""The matrix product with FP8 operands and results, empty operands, and refusals. High precision is in the table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tex_backends import REFERENCE, Runner, on_backends
from torch import Tensor

from fusible.conformance.cases.gemm import call, product
from fusible.conformance.cases.pointwise import gelu
from fusible.conformance.table import close
from fusible.errors import ArgumentError, DTypeError, NotServedError, ShapeError
from fusible.quantized import Float8CurrentScalingQuantizer, Float8Quantizer
from fusible.tex import DType

pytestmark = on_backends("generic_gemm")

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def quantized(x: Tensor, fp8: DType, copies: str) -> tuple[Any, Tensor]:
    """``x`` in FP8 with the copies named, and the value that this stands for."""
    quantizer = Float8CurrentScalingQuantizer(fp8, "cpu", rowwise="row" in copies, columnwise="column" in copies)
    result = REFERENCE("quantize", tensor=x, quantizer=quantizer)
    return result, REFERENCE("dequantize", input=result, otype=DType.kFloat32)


@pytest.mark.parametrize("copies", ["row", "column", "row column"])
@pytest.mark.parametrize(("fp8_a", "fp8_b"), [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)])
@pytest.mark.parametrize(("trans_a", "trans_b"), [(True, False), (False, False), (False, True), (True, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_operands_are_scaled_whichever_copy_they_have(
    runner: Runner, copies: str, fp8_a: DType, fp8_b: DType, trans_a: bool, trans_b: bool, dtype: torch.dtype
) -> None:
    a, value_a = quantized(random(16, 32) if trans_a else random(32, 16), fp8_a, copies)
    b, value_b = quantized(random(32, 48, seed=2) * 30 if trans_b else random(48, 32, seed=2) * 30, fp8_b, copies)
    ab, size, length = product(value_a, trans_a, value_b, trans_b)
    bias = random(16, seed=3).to(dtype)
    d, bias_grad, pre_gelu, extra = runner("generic_gemm", **call(a, trans_a, b, trans_b, output_dtype=dtype, bias=bias))
    close(d, ab + bias.double(), dtype, length, size)
    assert d.dtype is dtype and bias_grad is pre_gelu is extra is None


@pytest.mark.parametrize("copies", ["row", "column"])
def test_leading_dimensions_of_fp8_operands_are_kept(runner: Runner, copies: str) -> None:
    w, value_w = quantized(random(5, 8), E4M3, copies)
    x, value_x = quantized(random(2, 3, 8, seed=2), E4M3, copies)
    dy, value_dy = quantized(random(2, 3, 5, seed=3), E5M2, copies)
    for a, b, trans_a, trans_b, values, shape in (
        (w, x, True, False, (value_w, value_x), (2, 3, 5)),
        (w, dy, False, False, (value_w, value_dy), (2, 3, 8)),
        (x, dy, False, True, (value_x, value_dy), (5, 8)),
    ):
        ab, size, length = product(values[0], trans_a, values[1], trans_b)
        d = runner("generic_gemm", **call(a, trans_a, b, trans_b, output_dtype=torch.float32))[0]
        assert d.shape == shape
        close(d, ab.reshape(shape), torch.float32, length, size)


@pytest.mark.parametrize("mixed", ["A", "B"])
def test_one_fp8_operand_is_enough(runner: Runner, mixed: str) -> None:
    a, value_a = quantized(random(16, 32), E4M3, "row") if mixed == "A" else (random(16, 32),) * 2
    b, value_b = quantized(random(48, 32, seed=2), E4M3, "row") if mixed == "B" else (random(48, 32, seed=2),) * 2
    ab, size, length = product(value_a, True, value_b, False)
    close(runner("generic_gemm", **call(a, True, b, False, output_dtype=torch.float32))[0], ab, torch.float32, length, size)


def test_the_default_dtype_is_the_nominal_one_of_a(runner: Runner) -> None:
    a, _ = quantized(random(4, 8).to(torch.bfloat16), E4M3, "row")
    assert runner("generic_gemm", **call(a, True, random(2, 8), False))[0].dtype is torch.bfloat16


def test_pre_gelu_out_has_bias_type_for_fp8_operands(runner: Runner) -> None:
    a, value_a = quantized(random(4, 8), E4M3, "row")
    b, value_b = quantized(random(2, 8, seed=2), E4M3, "row")
    d, _, pre_gelu, _ = runner("generic_gemm", **call(a, True, b, False, output_dtype=torch.float32, bias_type=DType.kBFloat16, gelu=True))
    ab, size, length = product(value_a, True, value_b, False)
    close(pre_gelu, ab, torch.bfloat16, length, size)
    close(d, gelu(ab), torch.float32, length, 2 * size)
    assert pre_gelu.dtype is torch.bfloat16 and d.dtype is torch.float32


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("operands", ["fp8", "high"])
def test_delayed_scaling_quantizes_the_accumulator_of_fp8_operands(runner: Runner, given: bool, operands: str) -> None:
    a, value_a = quantized(random(4, 8), E4M3, "row") if operands == "fp8" else (random(4, 8),) * 2
    b, value_b = quantized(random(2, 8, seed=2), E4M3, "row") if operands == "fp8" else (random(2, 8, seed=2),) * 2
    quantizer = Float8Quantizer(torch.tensor([8.0]), torch.zeros(1), E4M3)
    empty = {"shape": [2, 4], "dtype": torch.bfloat16, "device": torch.device("cpu"), "pin_memory": False}
    d = REFERENCE("create_empty_quantized_tensor", quantizer=quantizer, **empty) if given else None
    result = runner("generic_gemm", **call(a, True, b, False, D=d, quantizer=quantizer, output_dtype=torch.bfloat16))[0]
    assert d is None or result is d
    ab, size, length = product(value_a, True, value_b, False)
    exact = ab.abs().max() if operands == "fp8" else ab.abs().max().to(torch.bfloat16).double()
    close(quantizer.amax, exact[None], torch.float32, length, size)
    value = REFERENCE("dequantize", input=result, otype=torch.float32)
    assert ((value - ab).abs() <= 0.07 * ab.abs() + 2.0**-12).all() and result._dtype is torch.bfloat16


def test_current_scaling_quantizes_the_result_in_output_dtype(runner: Runner) -> None:
    a, value_a = quantized(random(4, 8), E4M3, "row")
    quantizer = Float8CurrentScalingQuantizer(E5M2, "cpu")
    result = runner("generic_gemm", **call(a, True, a, False, quantizer=quantizer, output_dtype=torch.bfloat16))[0]
    largest = product(value_a, True, value_a, False)[0].abs().max().to(torch.bfloat16).float()
    assert result._scale_inv.item() == (1 / (57344 / largest)).item()


def test_a_given_d_is_written_and_returned(runner: Runner) -> None:
    a, b = random(4, 8), random(2, 3, 8, seed=2)
    for d in (torch.full((2, 3, 4), torch.nan), torch.full((4, 3, 2), torch.nan).permute(2, 1, 0)):
        assert runner("generic_gemm", **call(a, True, b, False, D=d))[0] is d
        close(d, (b.double() @ a.double().T), torch.float32, 8, 20.0)


def test_beta_zero_reads_nothing_of_d(runner: Runner) -> None:
    d = torch.full((2, 4), torch.nan)
    runner("generic_gemm", **call(random(4, 8), True, random(2, 8), False, D=d, accumulate=True, beta=0.0))
    assert d.isfinite().all()


def test_extra_output_is_handed_through(runner: Runner) -> None:
    extra = torch.zeros(3)
    assert runner("generic_gemm", **call(random(4, 8), True, random(2, 8), False, extra_output=extra))[3] is extra


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("depth", [0, 3])
def test_empty_products_are_zero_without_bias(runner: Runner, accumulate: bool, depth: int) -> None:
    rows = 0 if depth else 2
    d = torch.full((rows, 4), 5.0)
    a, b = torch.zeros(4, depth), torch.zeros(rows, depth)
    result = runner("generic_gemm", **call(a, True, b, False, D=d, bias=torch.ones(4), accumulate=accumulate))[0]
    assert result is d and (d == (5.0 if accumulate else 0.0)).all()
    fresh = runner("generic_gemm", **call(a, True, b, False, bias=torch.ones(4), gelu=True))
    assert fresh[0].shape == fresh[2].shape == (rows, 4) and not fresh[0].any() and not fresh[2].any()


def test_an_empty_weight_gradient_has_a_zero_bias_gradient(runner: Runner) -> None:
    d, bias_grad, _, _ = runner("generic_gemm", **call(torch.zeros(0, 4), False, torch.zeros(0, 3), True, bias=torch.ones(3), grad=True))
    assert d.shape == (3, 4) and not d.any() and bias_grad.shape == (3,) and not bias_grad.any()


A, B = random(4, 8), random(2, 8, seed=2)
REFUSED = [
    (
        call(A, False, B, False),
        ShapeError,
        r"A and B of generic_gemm, .*: expected equal contracted dimensions in layout NN, got 4 of A \[4, 8\] and 8 of B \[2, 8\]",
    ),
    (call(A, True, B, True), ShapeError, "layout TT"),
    (call(A, True, B, False, D=torch.zeros(4, 2)), ShapeError, r"D .*: expected shape \[2, 4\]"),
    (call(A, True, B, False, D=torch.zeros(2, 4, device="meta")), ArgumentError, "D of generic_gemm: expected a tensor with data|tensors on meta"),
    (call(A, True, B, False, D=torch.zeros(2, 4), output_dtype=torch.bfloat16), DTypeError, "that of D"),
    (call(A, True, B, False, D=torch.zeros(2, 4), beta=0.5), ArgumentError, "beta 0 or None without accumulate"),
    (call(A, True, B, False, beta=1.0), ArgumentError, "beta 0 or None without accumulate"),
    (call(A, True, B, False, accumulate=True), ArgumentError, "a given D"),
    (call(A, True, B, False, D=torch.zeros(2, 4), bias=torch.zeros(3)), ShapeError, r"bias .*: expected shape \[4\]"),
    (call(A, True, B, False, D=torch.zeros(2, 4), gelu=True, grad=True), ShapeError, "gelu_in"),
    (
        call(A, True, B, False, D=torch.zeros(2, 4), gelu=True, grad=True, gelu_in=torch.zeros(2, 3)),
        ShapeError,
        r"gelu_in .*: expected shape \[2, 4\]",
    ),
    (call(A, True, B, False, output_dtype=torch.int32), DTypeError, "output_dtype"),
    (call(A, True, B, False, comm_overlap=object()), NotServedError, "comm_overlap"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED)
def test_wrong_arguments_write_nothing(runner: Runner, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        runner("generic_gemm", **arguments)
    assert str(caught.value).count(". ") == 0
    d = arguments["D"]
    assert d is None or d.device.type == "meta" or not d.any()


def test_no_graph_is_recorded(runner: Runner) -> None:
    weight = torch.nn.Parameter(random(4, 8))
    assert not runner("generic_gemm", **call(weight, True, B, False))[0].requires_grad
    assert torch.is_grad_enabled()
