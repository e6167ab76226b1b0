"""What a call in inference mode or under a fake mode keeps, the training that follows must be able to use."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses import FakeTensorMode

from fusible import (
    GELU,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    LayerNorm,
    Linear,
    MultiHeadedSelfAttention,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    Sequential,
    SwiGLU,
    autocast,
    frozen_weights,
)
from fusible.pytorch import ops

WIDTH = 64
RECIPES = [None, DelayedScaling(), Float8CurrentScaling(), MXFP8BlockScaling(), Float8BlockScaling(), NVFP4BlockScaling()]
MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "Linear": lambda: Linear(WIDTH, WIDTH),
    "block": lambda: Sequential(LayerNorm(WIDTH), Linear(WIDTH, 2 * WIDTH), SwiGLU(), Linear(WIDTH, WIDTH)),
    "attention": lambda: Sequential(Linear(WIDTH, 3 * WIDTH), MultiHeadedSelfAttention(WIDTH, 2), Linear(WIDTH, WIDTH)),
    "ops": lambda: ops.Sequential(ops.Linear(WIDTH, WIDTH), ops.GELU(), ops.Linear(WIDTH, WIDTH)),
    "compiled": lambda: Sequential(Linear(WIDTH, WIDTH), GELU(), Linear(WIDTH, WIDTH)).compile("xla"),
}


def under(recipe: Recipe | None) -> autocast:
    return autocast(enabled=recipe is not None, recipe=recipe)


def step(model: torch.nn.Module, x: torch.Tensor, recipe: Recipe | None) -> list[torch.Tensor]:
    """The output and the gradients of a training pass."""
    torch.manual_seed(3)
    leaf = x.clone().requires_grad_()
    with under(recipe):
        y = model(leaf)
    y.square().sum().backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    assert leaf.grad is not None
    return [y.detach(), leaf.grad, *grads]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_training_after_a_look_in_inference_mode(recipe: Recipe | None, kind: str, frozen: bool) -> None:
    """The 8-bit copies that the look has made serve the training, which gives what a model gives that nobody looked at."""
    x, results = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1)), []
    for look in (torch.no_grad, torch.inference_mode):
        torch.manual_seed(0)
        model = MODELS[kind]().requires_grad_(not frozen)
        for _ in range(2):
            with look(), under(recipe):
                model(x)
            with look(), under(recipe), frozen_weights():
                model(x)
            results.append(step(model, x, recipe))
    assert same(results[0], results[2]) and same(results[1], results[3])


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_a_call_under_a_fake_mode_leaves_nothing(recipe: Recipe | None) -> None:
    """Whether it gives a tensor without values, or raises."""
    x, results = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1)), []
    for faked in (False, True):
        torch.manual_seed(0)
        model = MODELS["block"]()
        for _ in range(2):
            results.append(step(model, x, recipe))
            if faked:
                with FakeTensorMode(allow_non_fake_inputs=True) as mode, under(recipe):
                    try:
                        model(mode.from_tensor(x))
                    except Exception as error:
                        assert str(error)
        results.append(step(model, x, recipe))
    assert all(same(a, b) for a, b in zip(results[:3], results[3:], strict=True))


@pytest.mark.parametrize("executor", ["eager", "xla"])
@pytest.mark.parametrize("rows", [5, 16, 32])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_an_output_can_be_written_to(recipe: Recipe | None, rows: int, executor: str) -> None:
    """It is the caller's, with nothing behind it that was padded."""
    torch.manual_seed(0)
    model = Sequential(Linear(WIDTH, WIDTH)).compile(executor)
    with under(recipe):
        y = model(torch.randn(rows, WIDTH))
    assert y._base is None and y.untyped_storage().nbytes() == y.numel() * y.element_size()
    before = y.detach().clone()
    y += 1
    assert torch.equal(y.detach(), before + 1)
    y.sum().backward()


@pytest.mark.parametrize("executor", ["eager", "xla"])
@pytest.mark.parametrize("name", ["GELU", "ErfGELU", "QGELU", "SiLU", "ReLU", "GeGLU", "ErfGeGLU", "QGeGLU", "SwiGLU", "GLU", "ReGLU"])
def test_slopes_of_large_numbers(name: str, executor: str) -> None:
    """0 or 1 from where the activation is flat or straight: no product of 0 and infinity."""
    import fusible

    far = torch.tensor([[2e19, 3e19, 1e30, 3e38, -2e19, -3e19, -1e30, -3e38]])
    gated = name.endswith("GLU") or name == "GLU"
    x = (torch.cat([far, torch.full_like(far, 0.5)], 1) if gated else far).requires_grad_()
    module = Sequential(getattr(fusible, name)()).compile(executor)
    module(x).sum().backward()
    assert x.grad is not None
    open_ = far.flatten() > 0
    straight = 0.0 if name == "GLU" else 0.5 if gated else 1.0
    torch.testing.assert_close(x.grad.flatten()[: far.numel()], torch.where(open_, straight, 0.0))
