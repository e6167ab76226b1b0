"""``fusible.convert`` on families of transformers' models: PEFT's LoRA on top of a converted model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from convert_families import BY_NAME, OPERAND, RECIPES, Family, check_falls_alike, every_family, losses, peft

import fusible
from fusible.models.convert.attention import ConvertedAttention
from fusible.models.convert.joining import is_joined
from fusible.models.convert.mlp import ConvertedMLP

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # PEFT asks transformers by an older name
    pytest.mark.filterwarnings("ignore:fan_in_fan_out:UserWarning"),
]


def with_lora(model: Any, family: Family) -> Any:
    torch.manual_seed(3)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=list(family.targets), lora_dropout=0.0))


@every_family
def test_three_steps_of_lora_fall_alike_and_train_nothing_else(family: Family) -> None:
    inputs, rate = family.inputs(), 0.5
    reference = losses(with_lora(family.make(), family), inputs, rate=rate)
    check_falls_alike(losses(with_lora(fusible.convert(family.make()), family), inputs, rate=rate), reference, 1e-4)
    model = with_lora(fusible.convert(family.make(), RECIPES["delayed"]), family)
    before = {name: parameter.clone() for name, parameter in model.named_parameters() if "lora" not in name}
    check_falls_alike(losses(model, inputs, rate=rate), reference, OPERAND["delayed"] * 4)
    after = dict(model.named_parameters())
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert list(model.merge_and_unload().state_dict()) == list(family.make().state_dict())


TARGETS = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, Any] = {
    "LoRA": lambda: peft.LoraConfig(r=4, target_modules=TARGETS),
    "DoRA": lambda: peft.LoraConfig(r=4, target_modules=TARGETS, use_dora=True),
    "IA3": lambda: peft.IA3Config(target_modules=TARGETS, feedforward_modules=["down_proj"]),
    "OFT": lambda: peft.OFTConfig(target_modules=TARGETS, oft_block_size=4, r=0),
    "HRA": lambda: peft.HRAConfig(r=4, target_modules=TARGETS),
}


@pytest.mark.parametrize(
    "again", [lambda model: fusible.convert(model, RECIPES["current"]), lambda model: model.to(torch.float32)], ids=["convert", "to"]
)
@pytest.mark.parametrize("name", ADAPTERS)
def test_layers_whose_adapters_were_merged_are_computed_together_again(name: str, again: Any) -> None:
    family = BY_NAME["llama"]
    model = fusible.convert(family.make(), RECIPES["current"])
    adapted = peft.get_peft_model(model, ADAPTERS[name]())
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    merged = again(adapted.merge_and_unload())
    joined = [module for module in merged.modules() if isinstance(module, ConvertedMLP | ConvertedAttention)]
    assert len(joined) >= 4
    for module in joined:
        weights = module._weights() if isinstance(module, ConvertedMLP) else [module._modules[one].weight for one in module._projections.names]  # type: ignore[union-attr]  # pyright: ignore
        assert is_joined(weights)  # type: ignore[arg-type]  # pyright: ignore
        assert module._is_whole() if isinstance(module, ConvertedMLP) else module.goes_with_members()
