"""Recomputation in NVIDIA's Python package, and what lies elsewhere meanwhile: a pass gives the very numbers that it gives without."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from te_client import RECIPES_OF_CLIENT, package, recipe_for
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

BF16 = torch.bfloat16
RECIPES = ("bf16", *RECIPES_OF_CLIENT)
EACH = pytest.mark.parametrize("recipe_name", RECIPES)
Pass = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]


@pytest.fixture
def te() -> Iterator[Any]:
    with package() as te:
        importlib.import_module("transformer_engine.pytorch.quantization").FP8GlobalStateManager.reset()
        yield te


def recipe_of(te: Any, name: str) -> Any:
    return recipe_for(te, name, **({"disable_stochastic_rounding": True} if name == "nvfp4" else {}))


def results(te: Any, recipe: Any, make: Callable[[], torch.nn.Module], run: Pass, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """The output and all gradients of two passes of a new module."""
    torch.manual_seed(0)
    module, found = make(), []
    for _ in range(2):
        x = torch.randn(shape, device="cuda", dtype=BF16, requires_grad=True)
        module.zero_grad()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = run(module, x)
        y.float().pow(2).sum().backward()
        found += [y.detach(), x.grad, *(parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None)]
    assert len(found) == 2 * (2 + len([*module.parameters()]))
    return found


def same(te: Any, recipe_name: str, make: Callable[[], torch.nn.Module], run: Pass, other: Pass, shape: tuple[int, ...] = (128, 128)) -> None:
    recipe = recipe_of(te, recipe_name)
    found = [results(te, recipe, make, each, shape) for each in (run, other)]
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


def policy(_: Any, operation: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    """Products are kept, all else is computed again: the package's own kernels are none of torch's products."""
    return CheckpointPolicy.MUST_SAVE if operation is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


@EACH
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_module(te: Any, recipe_name: str, reentrant: bool) -> None:
    """Of SiLU: GELU with its bias the package computes in another way while it checkpoints without reentrance."""
    same(
        te,
        recipe_name,
        lambda: te.LayerNormMLP(128, 256, activation="silu", params_dtype=BF16),
        lambda module, x: module(x),
        lambda module, x: te.checkpoint(module, x, use_reentrant=reentrant),
    )


@EACH
def test_a_module_that_checkpoints_its_activation(te: Any, recipe_name: str) -> None:
    recipe = recipe_of(te, recipe_name)
    found = []
    for checkpoint in (False, True):
        torch.manual_seed(0)
        found.append(
            results(te, recipe, lambda c=checkpoint: te.LayerNormMLP(128, 256, params_dtype=BF16, checkpoint=c), lambda m, x: m(x), (128, 128))
        )
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


@pytest.mark.parametrize("recipe_name", [name for name in RECIPES if name != "delayed"])
def test_a_module_of_which_products_are_kept(te: Any, recipe_name: str) -> None:
    """Under delayed scaling the package updates its scales within what is recomputed, by operations that torch has not seen before."""
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    same(
        te,
        recipe_name,
        lambda: te.LayerNormMLP(128, 256, params_dtype=BF16),
        lambda module, x: te.checkpoint(module, x, use_reentrant=False),
        lambda module, x: te.checkpoint(module, x, use_reentrant=False, context_fn=contexts),
    )


@EACH
def test_activations_are_offloaded(te: Any, recipe_name: str) -> None:
    def offloaded(module: Any, x: torch.Tensor) -> torch.Tensor:
        options = {"num_layers": 1, "model_layers": 3, "offload_activations": True, "offload_weights": False}
        context, synchronize = te.get_cpu_offload_context(enabled=True, **options)
        for layer in module:
            with context:
                x = layer(x)
            x = synchronize(x)
        return x

    def make() -> torch.nn.Module:
        return torch.nn.Sequential(*(te.Linear(128, 128, params_dtype=BF16) for _ in range(3)))

    same(te, recipe_name, make, lambda module, x: module(x), offloaded)


MODULES: dict[str, Callable[[Any, str], torch.nn.Module]] = {
    "Linear": lambda te, device: te.Linear(128, 256, params_dtype=BF16, device=device),
    "LayerNormLinear": lambda te, device: te.LayerNormLinear(128, 256, params_dtype=BF16, device=device),
    "LayerNormMLP": lambda te, device: te.LayerNormMLP(128, 256, params_dtype=BF16, device=device),
    "GroupedLinear": lambda te, device: te.GroupedLinear(2, 128, 256, params_dtype=BF16, device=device),
    "TransformerLayer": lambda te, device: te.TransformerLayer(128, 256, 4, params_dtype=BF16, fuse_qkv_params=True, device=device),
}


@EACH
@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "quantized"])
@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_made_on_meta_and_filled_later(te: Any, name: str, recipe_name: str, quantized: bool) -> None:
    recipe = recipe_of(te, recipe_name)
    with te.quantized_model_init(enabled=quantized and recipe is not None, recipe=recipe):
        module: Any = MODULES[name](te, "meta")
    assert all(parameter.device.type == "meta" for parameter in module.parameters())
    for part in reversed([*module.modules()]):
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    assert all(parameter.device.type == "cpu" for parameter in module.parameters())
    x = torch.randn((32, 4, 128) if name == "TransformerLayer" else (128, 128), device="cuda", dtype=BF16)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x, [64, 64]) if name == "GroupedLinear" else module(x)
    y = y[0] if isinstance(y, tuple) else y
    y.float().sum().backward()
    assert y.isfinite().all() and y.any() and all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())
