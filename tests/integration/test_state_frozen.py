"""Frozen layers under delayed scaling: where gradients are enabled, a call observes though nothing wants a gradient, as in NVIDIA's package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fusible import (
    GELU,
    CustomRecipe,
    DelayedScaling,
    Dropout,
    Float8CurrentScaling,
    KVCache,
    LayerNorm,
    Linear,
    MultiHeadedSelfAttention,
    Residual,
    Sequential,
    autocast,
)
from fusible.compat import te_modules as te
from fusible.pytorch import ops
from fusible.quantized import DelayedScalingRequest

WIDTH = 32
RECIPE = DelayedScaling(amax_history_len=3)
MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "Sequential": lambda: Sequential(Residual(LayerNorm(WIDTH), Linear(WIDTH, 48), GELU(), Dropout(0.25), Linear(48, WIDTH))),
    "Linear": lambda: te.Linear(WIDTH, WIDTH),
    "LayerNormLinear": lambda: te.LayerNormLinear(WIDTH, WIDTH),
    "LayerNormMLP": lambda: te.LayerNormMLP(WIDTH, 64),
    "TransformerLayer": lambda: te.TransformerLayer(WIDTH, 64, 2, hidden_dropout=0.0, attention_dropout=0.0, self_attn_mask_type="causal"),
    "ops": lambda: ops.Sequential(ops.Linear(WIDTH, WIDTH), ops.GELU(), ops.Linear(WIDTH, WIDTH)),
}
CALLS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "eager": lambda model: model,
    "compiled": lambda model: torch.compile(model, backend="aot_eager"),
}


def twins(kind: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A model, and the same one frozen."""
    made = []
    for _ in range(2):
        torch.manual_seed(1)
        made.append(MODELS[kind]())
    return made[0], made[1].requires_grad_(False)


def inputs(count: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(16, 2, WIDTH, generator=generator) * 0.01 * 4**step for step in range(count)]


def everything(model: torch.nn.Module) -> dict[str, Any]:
    """Parameters and scaling state, as they are now."""
    return {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("kind", "call"), [(kind, "eager") for kind in MODELS] + [(kind, "compiled") for kind in ("Sequential", "Linear", "ops")])
@pytest.mark.parametrize("recipe", [RECIPE, CustomRecipe(qfactory=lambda role: DelayedScalingRequest(amax_history_len=3))], ids=["delayed", "custom"])
def test_a_frozen_layer_observes_as_a_trained_one(recipe: Any, kind: str, call: str) -> None:
    trained, frozen = twins(kind)
    calls = [CALLS[call](model) for model in (trained, frozen)]
    for step, x in enumerate(inputs()):
        results = []
        for run in calls:
            torch.manual_seed(step)
            with autocast(recipe=recipe):
                results.append(run(x))
        assert results[0].requires_grad and not results[1].requires_grad
        assert torch.equal(results[0].detach(), results[1])
        assert same(everything(trained), everything(frozen))
    fresh = everything(twins(kind)[1])
    assert not same(everything(frozen), fresh)


@pytest.mark.parametrize("call", CALLS)
def test_a_call_without_gradients_observes_nothing(call: str) -> None:
    _, frozen = twins("Linear")
    run, (first, *rest) = CALLS[call](frozen), inputs()
    with autocast(recipe=RECIPE):
        run(first)
    before = everything(frozen)
    with torch.no_grad(), autocast(recipe=RECIPE):
        for x in rest:
            run(x)
    with autocast(recipe=Float8CurrentScaling()):
        run(rest[0])
    assert same(everything(frozen), before)


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_a_frozen_layer_whose_forward_is_repeated(reentrant: bool) -> None:
    """Frozen layers before the first trainable one, all within one checkpoint: outputs, gradients and states are those without it."""
    results = []
    for checkpointed in (False, True):
        (_, frozen), (trained, _) = twins("LayerNormMLP"), twins("Linear")

        def run(x: Tensor, frozen: torch.nn.Module = frozen, trained: torch.nn.Module = trained) -> Tensor:
            return trained(frozen(x.detach()))

        found = []
        for x in inputs():
            leaf = x.clone().requires_grad_()  # a reentrant checkpoint wants an input with a gradient
            with autocast(recipe=RECIPE):
                y = checkpoint(run, leaf, use_reentrant=reentrant) if checkpointed else run(leaf)
            y.square().sum().backward()
            found.append((y.detach(), [p.grad.clone() for p in trained.parameters()], everything(frozen), everything(trained)))
        results.append(found)
    for plain, repeated in zip(*results, strict=True):
        assert torch.equal(plain[0], repeated[0])
        assert all(torch.equal(a, b) for a, b in zip(plain[1], repeated[1], strict=True))
        assert same(plain[2], repeated[2]) and same(plain[3], repeated[3])


def test_a_frozen_call_between_a_forward_and_its_backward() -> None:
    """The backward is still awaited, so that a look at the model without gradients is not what it repeats."""
    states = []
    for looked in (False, True):
        model, _ = twins("Linear")
        for x in inputs():
            with autocast(recipe=RECIPE):
                y = checkpoint(model, x, use_reentrant=False)
                model.requires_grad_(False)
                model(4 * x)
                if looked:
                    with torch.no_grad():
                        model(x)
                model.requires_grad_(True)
            y.square().sum().backward()
        states.append((everything(model), [p.grad for p in model.parameters()]))
    assert same(states[0][0], states[1][0])
    assert all(torch.equal(a, b) for a, b in zip(states[0][1], states[1][1], strict=True))


def test_a_frozen_model_generates_where_gradients_are_enabled() -> None:
    """Nothing wants a gradient, so that a call goes on from a cache, and observes nothing."""
    torch.manual_seed(0)
    model = Sequential(Linear(WIDTH, 3 * WIDTH), MultiHeadedSelfAttention(WIDTH, 2)).requires_grad_(False)
    before, cache = everything(model), KVCache(1, 64, dtype=torch.float32)
    x = torch.randn(1, 6, WIDTH)
    with autocast(recipe=RECIPE):
        parts = []
        for part in x.split([4, 1, 1], dim=1):
            parts.append(model(part, cache=cache))
            cache.advance([part.shape[1]])
        with torch.no_grad():
            whole = model(x)
    assert same(everything(model), before)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0.1, atol=0.02)
