"""``fusible.convert`` on stacks of experts, as transformers holds them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from convert_families import BY_NAME, logits
from pretrained_models import DECODERS, drawn
from torch import nn

import fusible
from fusible.models.convert.experts import ConvertedExperts

FAMILY = BY_NAME["qwen3_moe"]
IN_FP32 = fusible.HighPrecision("float32")


def experts_of(model: Any) -> Any:
    return model.model.layers[1].mlp.experts


def call(experts: Any, top_k: int = 2) -> list[torch.Tensor]:
    """The output and all gradients for tokens of which none goes to expert 3."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(9, 64, generator=draw, requires_grad=True)
    index = torch.stack([torch.randperm(3, generator=draw)[:top_k] for _ in range(9)])
    weights = torch.rand(9, top_k, generator=draw, requires_grad=True)
    y = experts(x, index, weights)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, weights, experts.gate_up_proj, experts.down_proj])]


def why_left(experts: Any) -> list[str]:
    """What the report says of the stack, where it is among those that are left."""
    return [layer.text for layer in fusible.conversion_report(experts).left if layer.kind == "expert stack"]


def check_equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).detach().abs().max() < 1e-5 * max(1.0, float(b.detach().abs().max()))


def test_outputs_and_gradients_are_those_of_transformers() -> None:
    experts = experts_of(FAMILY.make())
    wanted = call(experts)
    fusible.convert(experts, IN_FP32)
    assert isinstance(experts, ConvertedExperts)
    check_equal(call(experts), wanted)


@pytest.mark.parametrize("recipe", [fusible.DelayedScaling(), fusible.Float8CurrentScaling(), fusible.MXFP8BlockScaling()], ids=str)
def test_in_8_bits_they_are_near(recipe: fusible.Recipe) -> None:
    experts = experts_of(FAMILY.make())
    wanted = call(experts)
    fusible.convert(experts, recipe)
    call(experts)
    for found, reference in zip(call(experts), wanted, strict=True):
        # Up to three products lie behind a gradient, each of two operands; dy has 2 bits of mantissa where the recipe's formats are hybrid.
        assert 0 < (found - reference).norm() < (6**0.5) * 2.0**-3 / 3**0.5 * reference.norm()


def test_another_number_of_experts_for_a_token_is_computed_by_the_former_class() -> None:
    experts = experts_of(FAMILY.make())
    wanted = call(experts, top_k=3)
    fusible.convert(experts, fusible.Float8CurrentScaling())
    assert not why_left(experts)
    check_equal(call(experts, top_k=3), wanted)
    assert why_left(experts) == ["a token had 3 experts, where the configuration says 2"]
    call(experts)
    assert not why_left(experts)


def other_activation(experts: Any) -> None:
    experts.act_fn = nn.ReLU()


def fewer_experts(experts: Any) -> None:
    for name in ("gate_up_proj", "down_proj"):
        setattr(experts, name, nn.Parameter(experts.get_parameter(name).detach()[:3].clone()))
    experts.num_experts = 3


def narrower_experts(experts: Any) -> None:
    up, down = experts.gate_up_proj.detach(), experts.down_proj.detach()
    half = down.shape[2] // 2
    experts.gate_up_proj = nn.Parameter(torch.cat([part[:, :half] for part in up.chunk(2, 1)], 1))
    experts.down_proj = nn.Parameter(down[..., :half].clone())


@pytest.mark.parametrize("change", [other_activation, fewer_experts, narrower_experts])
def test_experts_that_are_others_later_are_computed_by_the_former_class(change: Any) -> None:
    plain, experts = experts_of(FAMILY.make()), experts_of(FAMILY.make())
    before = call(fusible.convert(experts, IN_FP32))
    change(plain)
    change(experts)
    found = call(experts)
    check_equal(found, call(plain))
    assert not torch.allclose(found[0], before[0]) or change is fewer_experts  # no token goes to the fourth
    assert why_left(experts) == ["its activation, or the shape of its weights, is another one than when it was converted"]


def test_weights_that_make_no_whole_blocks_are_left_to_the_former_class() -> None:
    experts = experts_of(type(FAMILY)(**{**vars(FAMILY), "options": {**FAMILY.options, "moe_intermediate_size": 24}}).make())
    wanted = call(experts)
    fusible.convert(experts, fusible.MXFP8BlockScaling())
    assert why_left(experts) == ["its weights [4, 48, 64] cannot be cut into blocks of 32 for MXFP8BlockScaling"]
    check_equal(call(experts), wanted)
    fusible.convert(experts, fusible.Float8CurrentScaling())
    assert not why_left(experts)
    assert (call(experts)[0] - wanted[0]).norm() > 0.01 * wanted[0].norm()


class Clamped(nn.Module):
    """Experts of a form of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.config = FAMILY.make().config
        self.gate_up_proj, self.down_proj = nn.Parameter(torch.randn(4, 32, 16)), nn.Parameter(torch.randn(4, 16, 16))
        self.act = nn.SiLU()

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        gate, up = torch.einsum("tkih,th->tki", self.gate_up_proj[index], x).chunk(2, -1)
        return torch.einsum("tkhi,tki,tk->th", self.down_proj[index], self.act(gate).clamp(max=0.5) * up, weights)


def test_experts_of_another_form_are_left_with_the_reason() -> None:
    module = fusible.convert(Clamped(), fusible.Float8CurrentScaling())
    layers = {layer.kind: layer.text for layer in fusible.conversion_report(module).left}
    assert layers["expert stack"] == "it computes no sum of gated experts"


def test_routers_of_sigmoids_stay_transformers_own() -> None:
    """DeepSeek-V3: with a bias that chooses, in groups. All else is converted, and the report says so."""
    model, tokens = DECODERS["deepseek_v3"].make(), drawn(2, 24)
    inputs = {"input_ids": tokens, "labels": tokens}
    wanted, routers = logits(model, inputs), [type(layer.mlp.gate) for layer in model.model.layers[1:]]
    model(**inputs).loss.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    fusible.convert(model, IN_FP32)
    assert [type(layer.mlp.gate) for layer in model.model.layers[1:]] == routers
    report = fusible.conversion_report(model)
    assert "1 attention, 24 linears, 13 norms, 3 MLPs, 2 expert stacks" in str(report)
    assert {layer.kind for layer in report.left} == {"activation"}
    check_equal([logits(model, inputs)], [wanted])
    model(**inputs).loss.backward()
    check_equal([p.grad for p in model.parameters()], gradients)


def test_the_choice_of_experts_has_its_gradient() -> None:
    model, inputs = FAMILY.make(), FAMILY.inputs()
    model(**inputs).loss.backward()
    wanted = model.model.layers[0].mlp.gate.weight.grad.clone()
    model.zero_grad()
    fusible.convert(model, IN_FP32)(**inputs).loss.backward()
    assert wanted.abs().max() > 1e-4 and torch.allclose(model.model.layers[0].mlp.gate.weight.grad, wanted, rtol=1e-3, atol=1e-6)
    assert logits(model, inputs).isfinite().all()
