"""``generate`` beside transformers' own, on its models: padded batches, ends of texts, penalties; and a server of such a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from pretrained_models import drawn, reference, saved
from serve_tiny import served, serving

from fusible.models import from_pretrained
from fusible.models.generation import Engine, Request, Sampling, generate

COUNT = 20
LENGTHS = (5, 17, 2, 11)


def padded(left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their mask, int64 ``[prompts, longest]``."""
    rows, masks = [], []
    for length in LENGTHS:
        row, gap = drawn(length, seed=length), torch.zeros(max(LENGTHS) - length, dtype=torch.int64)
        rows.append(torch.cat([gap, row] if left else [row, gap]))
        masks.append(torch.cat([gap, torch.ones_like(row)] if left else [torch.ones_like(row), gap]))
    return torch.stack(rows), torch.stack(masks)


def theirs(name: str, tokens: torch.Tensor, mask: torch.Tensor, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        return reference(name).generate(tokens, attention_mask=mask, do_sample=False, max_new_tokens=COUNT, pad_token_id=0, **options)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "qwen2_window", "deepseek_v3"])
def test_padded_prompts_give_the_tensor_of_transformers(name: str, tmp_path: Path) -> None:
    model = from_pretrained(saved(name, tmp_path))
    tokens, mask = padded(left=True)
    made = generate(model, tokens, COUNT, attention_mask=mask, page_size=8)
    assert isinstance(made, torch.Tensor)
    ends = [int(made[1, max(LENGTHS) + 4]), int(made[3, max(LENGTHS) + 9])]  # tokens that come in the middle of two texts
    for stop in ([], ends):
        wanted = theirs(name, tokens, mask, eos_token_id=stop or None)
        given = generate(model, tokens, COUNT, attention_mask=mask, stop_tokens=stop, page_size=8)
        assert isinstance(given, torch.Tensor) and torch.equal(given, wanted)
    behind, its_mask = padded(left=False)
    other = generate(model, behind, COUNT, attention_mask=its_mask)
    assert isinstance(other, torch.Tensor) and torch.equal(other[:, max(LENGTHS) :], made[:, max(LENGTHS) :])


def test_penalties_are_those_of_transformers(tmp_path: Path) -> None:
    model = from_pretrained(saved("llama", tmp_path))
    for length in LENGTHS:
        prompt = drawn(1, length, seed=length)
        wanted = theirs("llama", prompt, torch.ones_like(prompt), repetition_penalty=1.5, eos_token_id=None)
        assert torch.equal(generate(model, prompt, COUNT, Sampling(0, repetition_penalty=1.5)), wanted)  # type: ignore[arg-type]
        assert not torch.equal(generate(model, prompt, COUNT), wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["llama", "gemma2_window", "mixtral", "deepseek_v3_yarn"])
def test_prompts_that_begin_alike_share_what_they_have_in_common(name: str, tmp_path: Path) -> None:
    model = from_pretrained(saved(name, tmp_path))
    common = drawn(24, seed=0).tolist()
    prompts = [[*common, *drawn(length, seed=length).tolist()] for length in (1, 5, 9, 2)]
    engine = Engine(model, sequences=4, capacity=64, page_size=8, tokens_per_step=16)
    for prompt in prompts:
        engine.add(Request(tuple(prompt), COUNT, Sampling(0)))
    made: list[list[int]] = [[] for _ in prompts]
    for event in engine.run():
        made[event.id].append(event.token or 0)
    assert engine.counts.reused >= 3 * 24
    assert made == [generate(model, [prompt], COUNT)[0] for prompt in prompts]


def test_a_server_of_a_model_of_transformers(tmp_path: Path) -> None:
    model: Any = from_pretrained(saved("llama", tmp_path))
    prompts = [drawn(length, seed=length).tolist() for length in LENGTHS]
    wanted = generate(model, prompts, COUNT)
    with serving(served(model)) as running, openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        choices = client.completions.create(model="tiny", prompt=prompts, max_tokens=COUNT, temperature=0, logprobs=0).choices
        told = [choice.logprobs.tokens if choice.logprobs else [] for choice in choices]
    named = [[running.service.served.tokenizer.token_text(token) for token in row] for row in wanted]
    ends = running.service.served.tokenizer.stop_tokens
    cut = [next((at for at, token in enumerate(row) if token in ends), COUNT) for row in wanted]
    assert told == [row[:at] for row, at in zip(named, cut, strict=True)]
