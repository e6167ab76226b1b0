"""``fusible.convert`` on families of transformers' models: PEFT's LoRA on top of a converted model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from convert_families import OPERAND, RECIPES, Family, check_falls_alike, every_family, losses, peft

import fusible

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
