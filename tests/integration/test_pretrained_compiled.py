"""Models of families as compiled programs: what eager execution gives, whole sequences, tokens one after another, and gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pretrained_models import DECODERS, FAMILIES, drawn, given, saved

from fusible import from_config, from_pretrained
from fusible.errors import ArgumentError, NotServedError
from fusible.models.weight_formats import WEIGHT_FORMATS

pytest.importorskip("jaxlib")

QUICK = ("llama", "gemma2_window", "gpt2", "bert", "vit", "whisper", "t5")
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "deepseek_v3_yarn", "deepseek_v3_halves")
WITHIN = 4e-6
"""Of the largest number: two layers round some hundred times, each by 2^-24, and products in another order."""


def _close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=WITHIN * wanted.abs().max().item())


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAMILIES if name not in MIXTURES])
def test_a_model_of_a_family(name: str, tmp_path: Path) -> None:
    folder, (inputs, _) = saved(name, tmp_path), given(name)
    eager, compiled = from_pretrained(folder), from_pretrained(folder).compile()
    with torch.no_grad():
        found, wanted = compiled(*inputs), eager(*inputs)
    for x, y in zip(*((each if isinstance(each, tuple) else (each,)) for each in (found, wanted)), strict=True):
        _close(x, y)


@pytest.mark.parametrize(("name", "held"), [("llama", "bf16"), ("gemma2_window", "bf16"), ("qwen3", "mxfp8"), ("phi", "fp8"), ("llama", "mxfp4")])
def test_tokens_one_after_another(name: str, held: str, tmp_path: Path) -> None:
    """Written to the cache as it lies; Gemma's soft caps are formulas, which read it after that."""
    folder, tokens = saved(name, tmp_path), drawn(1, 12)[0]
    logits = []
    for executor in ("eager", "xla"):
        model = from_pretrained(folder, WEIGHT_FORMATS[held], dtype=torch.float32).compile(executor)
        cache, found = model.new_cache(1, 16), []
        with torch.no_grad():
            for piece in tokens.split([5] + [1] * 7):
                found.append(model.next_logits(piece, torch.tensor([len(piece)]), cache))
                cache.advance([len(piece)])
        logits.append(torch.cat(found))
    _close(logits[1], logits[0])


def test_gradients() -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 128,
        "max_position_embeddings": 64,
    }
    models = [from_config({**config, "num_key_value_heads": 2}, seed=1) for _ in range(2)]
    models[1].compile()
    tokens = torch.randint(128, (2, 16), generator=torch.Generator().manual_seed(0))
    for model in models:
        model(tokens).square().mean().backward()
    for (name, x), y in zip(models[1].named_parameters(), models[0].parameters(), strict=True):
        assert x.grad is not None and y.grad is not None, name
        assert (x.grad - y.grad).norm() <= 1e-5 * y.grad.norm(), name


def test_what_is_not_compiled_is_one_sentence(tmp_path: Path) -> None:
    assert set(MIXTURES) < set(DECODERS)
    model = from_pretrained(saved("mixtral", tmp_path))
    with pytest.raises(ArgumentError, match="the executor: expected one of eager, xla, got 'tvm'"):
        model.compile("tvm")
    with torch.no_grad(), pytest.raises(NotServedError, match=r"top_experts: .* not implemented for .*lazy"):
        model.compile()(drawn(1, 8))
