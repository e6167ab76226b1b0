"""The activations at every level: against float64, and their FP8 codes, copies, sums and amax against their own float32 results, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cpp_activations import FLOATS, GATED, POINTWISE, SHAPES, Call, close, numbers, reference

from fusible import cpp_extensions
from fusible.errors import ArgumentError, DTypeError, ShapeError

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
CALLS = [Call(name, backward) for name in (*POINTWISE, *GATED) for backward in (False, True)]
EVERY = pytest.mark.parametrize("call", CALLS, ids=str)


@EVERY
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_results_are_within_the_error_of_their_terms(level: str, call: Call, dtype: torch.dtype) -> None:
    for seed, shape in enumerate(SHAPES):
        grad_dtype = FLOATS[seed % 3]
        grad, x = call.operands(shape, seed, dtype, grad_dtype)
        close(call(grad, x, dtype), *reference(call, grad, x), dtype)


@EVERY
def test_arguments_of_any_size_stay_finite_and_right(level: str, call: Call) -> None:
    magnitudes = torch.tensor([0.0, 1e-45, 1e-38, 1e-20, 1e-3, 7.0, 15.0, 40.0, 80.0, 100.0, 1e4, 1e10, 1e18])
    if "sreglu" not in call.name and "srelu" not in call.name:
        magnitudes = torch.cat((magnitudes, torch.tensor([1e20, 1e30])))
    x = torch.cat((magnitudes, -magnitudes))
    if call.gated:
        x = torch.cat((x, torch.full_like(x, 1.5)))
    grad = torch.ones(call.shape_out(tuple(x.shape))) if call.backward else None
    close(call(grad, x, torch.float32), *reference(call, grad, x), torch.float32)


def test_a_gate_of_infinity_is_open_or_shut(level: str) -> None:
    gates = torch.tensor([float("inf"), float("-inf"), 89.0, -89.0, 1e38, -1e38, -1e30, -3e20])
    opened = Call("glu", False)(None, torch.cat((gates, torch.full_like(gates, 1.5))), torch.float32)
    torch.testing.assert_close(opened, 1.5 * gates.sigmoid(), rtol=2**-21, atol=1e-37)
    assert not opened.signbit().any()


@EVERY
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_nan_is_passed_on_alone_and_saturates_no_code(level: str, call: Call, dtype: torch.dtype) -> None:
    grad, x = call.operands((3, 100), 5, dtype, dtype)
    hurt = x.clone()
    hurt[1, 3] = float("nan")
    if dtype is torch.float32:
        hurt.view(torch.int32)[1, 3] = 0x7FC001FF  # a payload must not turn it into a number
    places = [(1, 3), (1, 3 + x.shape[1] // 2)] if call.gated and call.backward else [(1, 3)]
    if call.name in ("relu", "reglu", "clamped_swiglu") and call.backward:
        places = places[1:]  # a slope that is 0 or 1 by a comparison is no NaN
    got, clean = call(grad, hurt, torch.float32), call(grad, x, torch.float32)
    for place in places:
        assert got[place].isnan()
        got[place] = clean[place]
    got[1, 3] = clean[1, 3]
    assert torch.equal(got, clean)
    if places:
        largest = torch.zeros(1)
        codes = call(grad, hurt, FP8[1], amax=largest)
        assert largest.isnan() and all(codes[place].float().isnan() for place in places)


@EVERY
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_codes_are_those_of_the_float32_results(level: str, call: Call, dtype: torch.dtype) -> None:
    for seed, shape in enumerate(SHAPES):
        grad, x = call.operands(shape, seed, FLOATS[seed % 3], FLOATS[seed % 2])
        wide, threads = call(grad, x, torch.float32), 1 + seed % 2
        rows, cols = wide.shape
        largest = wide.abs().max().view(1) if wide.numel() else torch.zeros(1)
        wanted, amaxes = torch.empty(rows, cols, dtype=dtype), torch.full((2, 1), 7.0)
        cpp_extensions.quantize(wide, wanted, 3.0, dtype)
        alone, beside, turned, only_turned = (numbers(size, dtype) for size in 2 * [(rows, cols)] + 2 * [(cols, rows)])
        call.into(grad, x, alone, dtype, amax=amaxes[0], scale=3.0, num_threads=threads)
        call.into(grad, x, beside, dtype, turned, amax=amaxes[1], scale=torch.tensor([3.0]), num_threads=threads)
        call.into(grad, x, None, dtype, only_turned, scale=3.0, num_threads=threads)
        for codes in (alone, beside, turned.t(), only_turned.t()):
            assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))
        assert torch.equal(amaxes, largest.expand(2, 1))


@pytest.mark.parametrize("name", POINTWISE)
@pytest.mark.parametrize("dtype", [*FLOATS, *FP8], ids=str)
def test_the_bias_gradient_is_the_sum_of_the_float32_results(level: str, name: str, dtype: torch.dtype) -> None:
    call = Call(name, True)
    for seed, shape in enumerate(SHAPES):
        grad, x = call.operands(shape, seed, torch.bfloat16, torch.bfloat16)
        wide, sums = call(grad, x, torch.float32), torch.full((2, shape[1]), 7.0)
        cpp_extensions.quantize(wide, torch.empty(shape, dtype=torch.uint8), 1.0, FP8[0], bias_grad=sums[0])
        wanted = sums[0].clone()
        out = call(grad, x, dtype, bias_grad=sums[0], num_threads=1)
        other = numbers(shape, dtype)
        turned = numbers((shape[1], shape[0]), dtype) if dtype in FP8 else None
        call.into(grad, x, other, dtype, turned, bias_grad=sums[1], num_threads=2)
        assert torch.equal(sums[0], wanted) and torch.equal(sums[1], wanted)
        assert torch.equal(out.view(torch.uint8), other.view(torch.uint8))
        assert torch.equal(out.view(torch.uint8), call(grad, x, dtype).view(torch.uint8))


@EVERY
def test_threads_do_not_change_a_bit(level: str, call: Call) -> None:
    grad, x = call.operands((200, 2600), 3, torch.bfloat16, torch.bfloat16)
    for dtype in (torch.bfloat16, FP8[0]):
        assert torch.equal(call(grad, x, dtype, num_threads=1).view(torch.uint8), call(grad, x, dtype, num_threads=2).view(torch.uint8))


OPTIONS = {"situglu": {"beta1": 1.5, "beta2": 3.0}, "clamped_swiglu": {"limit": 1.25, "alpha": 1.1, "offset": 0.5}}


@pytest.mark.parametrize(("name", "options"), OPTIONS.items(), ids=OPTIONS)
@pytest.mark.parametrize("backward", [False, True])
def test_options_reach_the_formula(level: str, name: str, backward: bool, options: dict[str, float]) -> None:
    call = Call(name, backward, tuple(options.items()))
    grad, x = call.operands((20, 66), 1, torch.float32, torch.float32)
    close(call(grad, x, torch.float32), *reference(call, grad, x), torch.float32)
    assert not torch.equal(call(grad, x, torch.float32), Call(name, backward)(grad, x, torch.float32))


def test_leading_dimensions_are_rows() -> None:
    x, turned = torch.randn(3, 5, 12), torch.empty(6, 3, 5, dtype=torch.uint8)
    out, codes = torch.empty(3, 5, 6), torch.empty(3, 5, 6, dtype=torch.uint8)
    cpp_extensions.gated_activation("swiglu", x, out, torch.float32)
    cpp_extensions.gated_activation("swiglu", x, codes, FP8[0], turned)
    a, b = x.double().chunk(2, -1)
    torch.testing.assert_close(out.double(), a * torch.sigmoid(a) * b, rtol=1e-5, atol=1e-6)
    assert torch.equal(codes.reshape(15, 6).t().reshape(6, 3, 5), turned)


X, Y, Z = torch.ones(4, 6), torch.ones(4, 6), torch.ones(4, 6)
native = cpp_extensions
BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a name": (lambda: native.activation("swiglu", X, X, X.dtype), ArgumentError, "expected one of gelu, erf_gelu, qgelu.*got 'swiglu'"),
    "a gated name": (lambda: native.gated_activation("gelu", X, X, X.dtype), ArgumentError, "expected one of geglu.*got 'gelu'"),
    "an odd width": (lambda: native.gated_activation("glu", X[:, :5].contiguous(), X, X.dtype), ShapeError, r"even last dimension.*\[4, 5\]"),
    "a gated output": (lambda: native.gated_activation("glu", X, X, X.dtype), ShapeError, "dst: expected 12 elements, got 24"),
    "a gradient": (lambda: native.activation_backward("gelu", X[:3], X, Y, X.dtype), ShapeError, "grad: expected 24 elements, got 18"),
    "a gated gradient": (lambda: native.gated_activation_backward("glu", X, X, X, X.dtype), ShapeError, "grad: expected 12 elements, got 24"),
    "a source": (lambda: native.activation("gelu", X.int(), X, X.dtype), DTypeError, "src: expected .*, got int32"),
    "a gradient's dtype": (lambda: native.activation_backward("gelu", X.int(), X, X, X.dtype), DTypeError, "grad: expected .*, got int32"),
    "a dtype": (lambda: native.activation("gelu", X, X, torch.bfloat16), DTypeError, "dst: expected bfloat16, got float32"),
    "a transpose": (lambda: native.activation("gelu", X, Y, X.dtype, Z), ArgumentError, "expected dst alone"),
    "no output": (lambda: native.activation("gelu", X, None, FP8[0]), ArgumentError, "None for both"),
    "a bias gradient": (lambda: native.activation_backward("gelu", X, X, Y, X.dtype, bias_grad=Z), ShapeError, "bias_grad: expected 6 elements"),
    "an amax": (lambda: native.activation("gelu", X, Y, X.dtype, amax=Z), ShapeError, "amax: expected 1 elements"),
    "an amax of wide floats": (lambda: native.activation("gelu", X, Y, X.dtype, amax=Z[0, :1]), ArgumentError, "amax: expected None"),
    "threads": (lambda: native.activation("gelu", X, X, X.dtype, num_threads=-1), ArgumentError, "num_threads: expected .*, got -1"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_argument_is_one_sentence_and_writes_nothing(case: str) -> None:
    call, error, message = BAD[case]
    with pytest.raises(error, match=message):
        call()
    assert all((x == 1).all() for x in (X, Y, Z))
