"""Adapters: logits, gradients and files beside PEFT's on transformers' model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from convert_families import peft
from finetune_models import checkpoint, corpus_of, new_model
from torch import nn
from torch.nn import functional as F

from fusible.errors import ArgumentError, FileError
from fusible.models import LanguageModel, from_pretrained, save_pretrained
from fusible.models.training import Cosine, StepOptions, Trainer, adapters_of, add_adapters, merge_adapters, pack, save_adapters
from fusible.models.weight_formats import WEIGHT_FORMATS
from fusible.pytorch import HighPrecision
from fusible.quantized import QuantizedTensor

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # PEFT asks transformers by an older name
    pytest.mark.filterwarnings("ignore:fan_in_fan_out:UserWarning"),
]

EPS = 2.0**-24
KINDS = ("llama", "gpt2", "phi3", "qwen2")
TOKENS = torch.randint(3, 600, (2, 24), generator=torch.Generator().manual_seed(5))


def adapted(folder: Path, rank: int = 4, targets: tuple[str, ...] = (), held: Any = None) -> LanguageModel:
    model = from_pretrained(folder, held, dtype=torch.float32)
    model.recipe = HighPrecision()
    add_adapters(model, rank, 6.0, targets, seed=2)
    return model


def spread(model: LanguageModel) -> LanguageModel:
    """With adapters that do something: at first they add nothing."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for layer in adapters_of(model):
            for up in layer.up:
                up.copy_(torch.randn(up.shape, generator=generator) * 0.1)
    return model


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    assert (found - wanted).abs().max() < tolerance * wanted.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_peft_loads_the_adapters_to_the_same_logits(kind: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "base", kind)
    model = adapted(folder)
    with torch.no_grad():
        close(model(TOKENS), new_model(kind)(TOKENS).logits, 64 * EPS)  # at first they add nothing
        found = spread(model)(TOKENS)
    save_adapters(model, tmp_path / "adapter", base=str(folder))
    theirs = peft.PeftModel.from_pretrained(new_model(kind), tmp_path / "adapter")
    with torch.no_grad():
        wanted = theirs(TOKENS).logits
    assert (wanted - new_model(kind)(TOKENS).logits).abs().max() > 0.1
    close(found, wanted, 128 * EPS)
    own = {name for name, _ in theirs.named_parameters() if "lora" in name}
    saved = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert len(own) == 2 * sum(len(layer.product.names) for layer in adapters_of(model)) and saved["r"] == 4
    with pytest.raises(FileError, match="a new folder"):
        save_adapters(model, tmp_path / "adapter", base="")


@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_model_is_one_that_transformers_loads(kind: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "base", kind)
    model = spread(adapted(folder))
    merged = from_pretrained(folder, trainable=True)
    merge_adapters(model, merged)
    save_pretrained(merged, tmp_path / "merged")
    with torch.no_grad():
        close(type(new_model(kind)).from_pretrained(tmp_path / "merged")(TOKENS).logits, model(TOKENS), 128 * EPS)


def test_steps_are_those_of_peft(tmp_path: Path) -> None:
    """The same adapters, trained by PEFT, torch's AdamW and plain autograd: q, k and v, one product here, have one each."""
    folder = checkpoint(tmp_path / "base")
    model, windows = adapted(folder), pack(corpus_of([33] * 8), 32)
    save_adapters(model, tmp_path / "adapter", base=str(folder))
    theirs = peft.PeftModel.from_pretrained(new_model(), tmp_path / "adapter", is_trainable=True)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    trainer = Trainer(model, windows, StepOptions(8, 4, Cosine(1e-2, 1, 100), seed=1))
    optimizer = torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], lr=1.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(6):
        logits = theirs(windows.tokens.long()).logits
        loss = F.cross_entropy(logits.flatten(0, 1), windows.targets.long().flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = trainer.options.rate(step)
        optimizer.step()
        assert trainer.step() == pytest.approx(loss.item(), rel=64 * 32 * EPS), step
    assert all(torch.equal(frozen[name], p) for name, p in model.named_parameters() if not p.requires_grad)
    assert sum(p.numel() for p in trainer.parameters.values()) == sum(p.numel() for p in theirs.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", [name for name, recipe in WEIGHT_FORMATS.items() if recipe is not None])
def test_gradients_through_a_base_of_8_or_4_bits_are_those_of_its_values(name: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "base")
    model = spread(adapted(folder, held=WEIGHT_FORMATS[name]))
    plain = spread(adapted(folder))
    held = [p for p in model.parameters() if isinstance(p, QuantizedTensor)]
    assert len(held) == 8  # of each of two layers qkv, out, up, down
    with torch.no_grad():
        for layer, other in zip(adapters_of(model), adapters_of(plain), strict=True):
            base: Any = layer.base
            other.base.weight.copy_(base.weight.dequantize())  # pyright: ignore[reportCallIssue]
    for each in (model, plain):
        F.cross_entropy(each(TOKENS).flatten(0, 1), TOKENS.flatten()).backward()
    found, wanted = ([p.grad for p in each.parameters() if p.requires_grad] for each in (model, plain))
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours is not None and theirs is not None
        close(ours, theirs, 1e-4)


def test_targets_are_names_of_layers_and_whole_products(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "base")
    assert [layer.product.names[0][-6:] for layer in adapters_of(adapted(folder, targets=("o_proj",)))] == ["o_proj"] * 2
    for targets, sentence in ((("nothing",), "expected some of down_proj, gate_proj.*got 'nothing'"), (("q_proj",), "read as one, got no k_proj")):
        with pytest.raises(ArgumentError, match=sentence):
            adapted(folder, targets=targets)
    with pytest.raises(ArgumentError, match="at least 1"):
        adapted(folder, rank=0)
    with pytest.raises(ArgumentError, match="a model with adapters"):
        save_adapters(from_pretrained(folder), tmp_path / "none", base="")
    assert not (tmp_path / "none").exists()
