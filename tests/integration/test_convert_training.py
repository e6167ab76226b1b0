"""``fusible.convert`` on families of transformers' models: training and files, against transformers itself."""

from __future__ import annotations

from pathlib import Path

import torch
from convert_families import OPERAND, RECIPES, Family, check_falls_alike, every_family, logits, losses, transformers

import fusible


@every_family
def test_three_steps_of_training_fall_alike(family: Family) -> None:
    inputs = family.inputs()
    reference = losses(family.make(), inputs)
    check_falls_alike(losses(fusible.convert(family.make()), inputs), reference, 1e-4)
    check_falls_alike(losses(fusible.convert(family.make(), fusible.HighPrecision("float32")), inputs), reference, 1e-4)
    check_falls_alike(losses(fusible.convert(family.make(), RECIPES["delayed"]), inputs), reference, OPERAND["delayed"] * 4)


@every_family
def test_a_converted_model_is_saved_and_loaded_as_transformers_own(family: Family, tmp_path: Path) -> None:
    model, inputs = fusible.convert(family.make(), RECIPES["delayed"]), family.inputs()
    model.train()(**inputs).loss.backward()  # now there are scales
    assert list(model.state_dict()) == list(family.make().state_dict())
    model.save_pretrained(tmp_path)
    loaded, told = getattr(transformers, family.model).from_pretrained(tmp_path, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    fusible.convert(model, undo=True)
    assert torch.equal(logits(loaded.eval(), inputs), logits(model.eval(), inputs))
