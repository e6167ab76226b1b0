"""Fusible's attention as an implementation of transformers' ``AttentionInterface``, against its ``sdpa``."""

from __future__ import annotations

import gc
import importlib
from typing import Any

import pytest
import torch
from convert_families import BY_NAME, logits
from torch import nn

import fusible
from fusible.models.convert import conversion, scaled_products
from fusible.models.convert.mlp import ConvertedMLP

fusible_attention: Any = scaled_products.fusible_attention
sdpa: Any = importlib.import_module("transformers.integrations.sdpa_attention").sdpa_attention_forward
LLAMA = BY_NAME["llama"]


class Attending(nn.Module):
    def __init__(self, causal: bool, repeats: int) -> None:
        super().__init__()
        self.is_causal, self.num_key_value_groups = causal, repeats


def operands(heads: int, groups: int, tokens: int = 7, keys: int = 7, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(2, count, rows, 16, generator=draw).to(dtype) for count, rows in ((heads, tokens), (groups, keys), (groups, keys))]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which implementation computed each call."""
    seen: list[str] = []
    scaled_products.register()
    run, handed = scaled_products.ConvertedRunner.run, scaled_products._known["sdpa"]

    def runs(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "DotProductAttention" in repr(self.pipeline.ops):
            seen.append("fusible")
        return run(self, *args, **kwargs)

    monkeypatch.setattr(scaled_products.ConvertedRunner, "run", runs)
    monkeypatch.setattr(conversion, "register", lambda: None)
    monkeypatch.setitem(scaled_products._known, "sdpa", lambda *args, **kwargs: seen.append("sdpa") or handed(*args, **kwargs))
    return seen


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2.0**-6)])
def test_outputs_and_gradients_are_those_of_sdpa(causal: bool, heads: int, groups: int, dtype: Any, tolerance: float, calls: list[str]) -> None:
    module, given = Attending(causal, heads // groups), [x.requires_grad_() for x in operands(heads, groups, dtype=dtype)]
    results = []
    for function in (fusible_attention, sdpa):
        y, weights = function(module, *given, None, scaling=0.3)
        assert weights is None and y.shape == (2, 7, heads, 16) and y.dtype is dtype
        results.append([y, *torch.autograd.grad(y.float().square().sum(), given)])
    assert calls == ["fusible"]
    for found, wanted in zip(*results, strict=True):
        assert (found - wanted).detach().abs().max() <= tolerance * max(1.0, float(wanted.detach().abs().max()))


@pytest.mark.parametrize(
    ("sizes", "options", "why"),
    [
        ({"tokens": 1}, {}, "one further token"),
        ({"tokens": 3}, {"is_causal": False}, "keys from elsewhere"),
        ({}, {"attention_mask": torch.ones(2, 1, 7, 7, dtype=torch.bool).tril()}, "a mask"),
        ({}, {"dropout": 0.5}, "dropout"),
        ({}, {"position_bias": torch.ones(1, 4, 7, 7)}, "a bias"),
        ({"dtype": torch.bfloat16}, {}, "bf16 without gradients"),
        ({"dtype": torch.float64}, {}, "fp64"),
    ],
)
def test_what_it_does_not_take_is_handed_on(sizes: dict[str, Any], options: dict[str, Any], why: str, calls: list[str]) -> None:
    module, given = Attending(True, 1), operands(4, 4, **sizes)
    mask = options.pop("attention_mask", None)
    torch.manual_seed(0)
    found, _ = fusible_attention(module, *given, mask, **options)
    torch.manual_seed(0)
    assert torch.equal(found, sdpa(module, *given, mask, **options)[0]) and calls == ["sdpa"], why
    options["attention_mask"] = mask


def test_the_empty_part_of_a_static_cache_is_left_out(calls: list[str]) -> None:
    module, given = Attending(True, 2), operands(4, 2, tokens=5, keys=12)
    found, _ = fusible_attention(module, *given, None)
    assert calls == ["fusible"]
    assert (found - sdpa(module, *given, None)[0]).abs().max() < 1e-5


def test_a_model_computes_by_it_until_the_conversion_is_undone(calls: list[str]) -> None:
    model, inputs = LLAMA.make(), LLAMA.inputs()
    logits(fusible.convert(model), inputs)
    assert calls == ["fusible"] * 2 and model.config._attn_implementation == "fusible"
    del calls[:]
    model.generate(inputs["input_ids"], max_new_tokens=3, do_sample=False)
    assert calls == ["fusible"] * 2 + ["sdpa"] * 4  # the prompt, and two further tokens
    fusible.convert(model, undo=True)
    del calls[:]
    logits(model, inputs)
    assert not calls and model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    fusible.convert(model)
    assert model.config._attn_implementation == "eager"
    told = [layer.text for layer in fusible.conversion_report(model).left if layer.kind == "attention"]
    assert told == ["its implementation is 'eager'"]
    model.set_attn_implementation("sdpa")
    assert fusible.convert(model, include="mlp").config._attn_implementation == "sdpa"


def test_a_conversion_that_fails_leaves_the_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LLAMA.make()

    def fails(self: Any) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(ConvertedMLP, "join", fails)
    with pytest.raises(MemoryError):
        fusible.convert(model)
    assert model.config._attn_implementation == "sdpa" and not [m for m in model.modules() if "Fusible" in type(m).__name__]


def test_a_recipe_may_ask_for_operands_in_8_bits(calls: list[str]) -> None:
    model, inputs = LLAMA.make().bfloat16(), LLAMA.inputs()
    usual = logits(fusible.convert(model, fusible.Float8CurrentScaling()), inputs)
    assert calls == ["sdpa"] * 2
    found = logits(fusible.convert(model, fusible.Float8CurrentScaling(fp8_dpa=True)), inputs)
    assert calls[2:] == ["fusible"] * 2
    # Queries, keys, values and probabilities are rounded by 2^-4 at most in each of the two layers.
    assert 0 < (found - usual).norm() < (8**0.5) * 2.0**-4 / 3**0.5 * usual.norm() * 2


def test_a_module_that_goes_takes_its_pipelines_along() -> None:
    module = Attending(True, 1)
    fusible_attention(module, *operands(2, 2), None)
    assert module in scaled_products._pipelines
    count = len(scaled_products._pipelines)
    del module
    gc.collect()
    assert len(scaled_products._pipelines) < count
