"""Gradients that the product adds to ``main_grad`` itself."""

from __future__ import annotations

import pytest
import torch

from fusible import autocast
from fusible.pytorch import GELU, DelayedScaling, Float8CurrentScaling, HighPrecision, Linear, Recipe, Sequential

RECIPES = [HighPrecision(), DelayedScaling(), Float8CurrentScaling()]


def model_of(accumulate: bool) -> Sequential:
    torch.manual_seed(0)
    return Sequential(Linear(16, 32, accumulate_into_main_grad=accumulate), GELU(), Linear(32, 16, bias=False, accumulate_into_main_grad=accumulate))


def batch(seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(24, 16, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("executor", ["eager", "xla"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
def test_the_sum_over_micro_batches_is_that_of_autograd(recipe: Recipe, dtype: torch.dtype, executor: str) -> None:
    plain, fused = model_of(False).compile(executor), model_of(True).compile(executor)
    weights = [fused[0].weight, fused[2].weight]
    for weight in weights:
        weight.main_grad = torch.full_like(weight, 0.5)  # type: ignore[attr-defined]
    places = [weight.main_grad.data_ptr() for weight in weights]  # type: ignore[attr-defined]
    for seed in range(4):
        for model in (plain, fused):
            with autocast(recipe=recipe):
                model(batch(seed, dtype)).float().square().sum().backward()
    for mine, theirs, place in zip(weights, (plain[0].weight, plain[2].weight), places, strict=True):
        assert mine.grad is None and theirs.grad is not None
        main_grad = mine.main_grad  # type: ignore[attr-defined]
        assert main_grad.data_ptr() == place
        # Both add fp32 products to an fp32 sum; the one within the accumulator, the other after it.
        torch.testing.assert_close(main_grad - 0.5, theirs.grad, rtol=1e-5, atol=1e-5 * theirs.grad.abs().max().item())
    assert torch.equal(fused[0].bias.grad, plain[0].bias.grad)


def test_without_a_main_grad_autograd_has_the_gradient() -> None:
    model = model_of(True)
    model(batch(0, torch.float32)).sum().backward()
    assert model[0].weight.grad is not None and model[2].weight.grad is not None


def test_a_weight_that_needs_no_gradient_is_left_alone() -> None:
    model = model_of(True)
    model[0].weight.main_grad = torch.zeros_like(model[0].weight)
    model[0].weight.requires_grad_(False)
    model(batch(0, torch.float32)).sum().backward()
    assert not model[0].weight.main_grad.any()


@pytest.mark.parametrize("frozen", [False, True])
def test_a_traced_call_adds_to_no_sum_and_says_so_where_there_is_one(frozen: bool) -> None:
    model = model_of(True)
    for layer in (model[0], model[2]):
        layer.weight.main_grad = torch.zeros_like(layer.weight)
        layer.weight.requires_grad_(not frozen)
    traced = torch.compile(model, backend="eager")
    if frozen:
        assert torch.equal(traced(batch(0, torch.float32)), model(batch(0, torch.float32)))
    else:
        with pytest.raises(Exception, match="main_grad"):
            traced(batch(0, torch.float32))
