"""``ScaledTanhSReLU``, and whether a grouped layer takes a recipe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fusible
from fusible.errors import ArgumentError, ShapeError
from fusible.pytorch import ops
from fusible.pytorch.ops import fused

EPSILON = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def expected(x: Tensor, scales: Tensor, clamp: float) -> Tensor:
    return (clamp * torch.tanh(torch.relu(x) / clamp)).square() * scales[..., None]


@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 4), (0, 4)], ids=str)
@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("clamp", [0.5, 2.0, 1000.0])
def test_values_and_gradients_are_the_float64_ones(clamp: float, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    x = (2 * torch.randn(shape, generator=generator)).to(dtype).requires_grad_()
    scales = torch.rand(shape[:-1], generator=generator).requires_grad_()
    y = ops.ScaledTanhSReLU(tanh_clamp_scale=clamp)(x, scales)
    dy = torch.randn(shape, generator=generator).to(dtype)
    dx, dscales = torch.autograd.grad(y, (x, scales), dy)
    wide, wide_scales = x.detach().double().requires_grad_(), scales.detach().double().requires_grad_()
    wanted = expected(wide, wide_scales, clamp)
    wanted_grads = torch.autograd.grad(wanted, (wide, wide_scales), dy.double())
    assert y.dtype is dx.dtype is dtype and dscales.dtype is torch.float32 and dscales.shape == scales.shape
    # Once rounded to the dtype, and a few operations in fp32, of which 1 - tanh^2 cancels; the scales' gradient is a sum of a row.
    for got, want in zip((y, dx, dscales), (wanted, *wanted_grads), strict=True):
        size = want.detach().abs().max().item() if want.numel() else 0.0
        assert torch.allclose(got.double(), want, rtol=EPSILON[got.dtype] + 2.0**-20, atol=2.0**-20 * size)


def test_it_stands_in_a_mixture_of_experts_under_a_recipe() -> None:
    sizes, scales, x = torch.tensor([10, 0, 22]), torch.rand(32), torch.randn(32, 64)
    first, second = ops.GroupedLinear(3, 64, 128, bias=False), ops.GroupedLinear(3, 128, 64, bias=False)
    middle = ops.ScaledTanhSReLU(tanh_clamp_scale=1.0)
    apart = ops.Sequential(first, middle, second)
    together = ops.Sequential(fused.GroupedMLP_CuTeGEMMUnary(fc1=first, activation=middle, fc2=second))
    for recipe in (None, fusible.MXFP8BlockScaling()):
        results = []
        for model in (apart, together):
            with fusible.autocast(enabled=recipe is not None, recipe=recipe):
                y = model(x, sizes, scales, sizes)
            results.append([y, *torch.autograd.grad(y.square().sum(), list(model.parameters()))])
        assert all(map(torch.equal, *results))


@pytest.mark.parametrize("clamp", [0.0, -1.0, float("inf"), float("nan")])
def test_a_clamp_that_is_none_is_refused(clamp: float) -> None:
    with pytest.raises(ArgumentError, match=r"^tanh_clamp_scale: expected a finite positive number, got "):
        ops.ScaledTanhSReLU(tanh_clamp_scale=clamp)


def test_every_row_has_a_scale() -> None:
    message = r"^the scales of ScaledTanhSReLU: expected one number for each of 4 rows, got \[3\]; give every row one\.$"
    with pytest.raises(ShapeError, match=message):
        ops.ScaledTanhSReLU(tanh_clamp_scale=1.0)(torch.zeros(4, 2), torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("override", [None, "dequantized"])
def test_what_is_said_to_be_supported_runs_and_nothing_else(override: Any, dtype: torch.dtype) -> None:
    recipe = fusible.Float8CurrentScaling(backward_override=override)
    supported = ops.is_op_fuser_grouped_tensor_path_supported(recipe, dtype)
    assert supported is (override is None and dtype is not torch.float64)
    assert ops.is_op_fuser_grouped_tensor_path_supported(None, dtype)

    def call() -> Tensor:
        layer = ops.GroupedLinear(2, 64, 64, dtype=dtype, single_grouped_weight=True)
        with fusible.autocast(recipe=recipe):
            return layer(torch.randn(32, 64, dtype=dtype, requires_grad=True), torch.tensor([16, 16]))

    if supported:
        call().sum().backward()
    else:
        with pytest.raises((ArgumentError, TypeError)):
            call()
