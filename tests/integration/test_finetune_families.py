"""Steps on packed documents for families with windows, mixtures and parallel branches: those of transformers' models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from finetune_models import EPS, options, plain_steps
from pretrained_models import DECODERS, saved

from fusible.models import from_pretrained
from fusible.models.training import Corpus, Trainer, Windows, adapters_of, add_adapters, pack
from fusible.models.weight_formats import WEIGHT_FORMATS
from fusible.pytorch import Float8BlockScaling, HighPrecision, MXFP8BlockScaling, NVFP4BlockScaling

LENGTHS = [5, 40, 17, 33, 2, 64, 9, 20]
NAMES = ("deepseek_v3", "gemma2_window", "gemma3", "mixtral", "phi", "qwen2_moe")


def windows() -> Windows:
    tokens = torch.randint(3, 128, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    return pack(Corpus(tokens, torch.ones(len(tokens), dtype=torch.bool), torch.tensor(LENGTHS)), 32)


@pytest.mark.parametrize("name", NAMES)
def test_steps_of_a_family_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """With adapters, which add nothing at first, the first loss is the same, and nothing else moves."""
    folder = saved(name, tmp_path)
    trainer = Trainer(from_pretrained(folder, HighPrecision(), trainable=True), windows(), options())
    wanted = plain_steps(DECODERS[name].make(), windows(), options(), 2)
    assert [trainer.step() for _ in range(2)] == pytest.approx(wanted, rel=64 * EPS)
    model = from_pretrained(folder)
    add_adapters(model, 2, 4.0)
    adapters = Trainer(model, windows(), options())
    losses = [adapters.step() for _ in range(2)]
    assert losses[0] == pytest.approx(wanted[0], rel=64 * EPS) and losses[1] != pytest.approx(losses[0], rel=1e-4)
    assert all(".down" in name or ".up." in name for name in adapters.parameters)


RECIPES = {"block": Float8BlockScaling(), "mxfp8": MXFP8BlockScaling(), "nvfp4": NVFP4BlockScaling()}


@pytest.mark.parametrize("held", RECIPES)
@pytest.mark.parametrize("name", ["mixtral", "phi"])
def test_adapters_train_on_a_base_in_the_format_of_the_recipe(name: str, held: str, tmp_path: Path) -> None:
    """Experts among them. Beside the same base in high precision the adapters go the same way, but for what the recipe rounds."""
    folder, ways = saved(name, tmp_path), []
    for recipe in (HighPrecision(), RECIPES[held]):
        model = from_pretrained(folder, WEIGHT_FORMATS[held])
        model.recipe = recipe
        add_adapters(model, 2, 4.0)
        trainer = Trainer(model, windows(), options())
        trainer.step()
        ways.append([up.detach().flatten() for adapted in adapters_of(model) for up in adapted.up])
    alike = [torch.cosine_similarity(a, b, 0).item() for a, b in zip(*ways, strict=True)]
    assert sum(alike) / len(alike) > 0.5  # Adam's first step is the gradients' signs: 0 of others that have nothing to do with them


def test_adapters_count_where_heads_attend_to_latents(tmp_path: Path) -> None:
    """With a cache the product that makes keys and values of latents stands elsewhere, and its adapter with it."""
    model = from_pretrained(saved("deepseek_v3", tmp_path))
    tokens = torch.randint(3, 128, (10,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = model(tokens[None])[0, -1]
        add_adapters(model, 2, 4.0, ["kv_b_proj"])
        for adapted in adapters_of(model):
            for up in adapted.up:
                up.normal_(generator=torch.Generator().manual_seed(2))
        whole = model(tokens[None])[0, -1]
        found = model.next_logits(tokens, torch.tensor([10], dtype=torch.int32), model.new_cache(1, 16))[0]
    assert len(adapters_of(model)) == 3 and not torch.allclose(whole, before, rtol=0, atol=0.1)
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-5 * whole.abs().max().item())
