"""Generation by models of transformers' checkpoints: the tokens that transformers generates, in any company."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pretrained_models import DECODERS, drawn, reference, saved
from test_evaluate import folder_with_tokenizer

from fusible.cli import main
from fusible.models import LanguageModel, from_pretrained
from fusible.models.generation import Engine, Request, Sampling

GREEDY = Sampling(0)
COUNT = 32


def generated(model: LanguageModel, prompts: list[torch.Tensor], *, sequences: int = 2, page_size: int = 8) -> list[list[int]]:
    """Greedily, ``COUNT`` tokens behind each prompt."""
    engine = Engine(model, sequences=sequences, capacity=96, page_size=page_size, tokens_per_step=16)
    texts = {engine.add(Request(tuple(prompt.tolist()), COUNT, GREEDY)): list[int]() for prompt in prompts}
    while engine.busy:
        for event in engine.step():
            if event.token is not None:
                texts[event.id].append(event.token)
    return list(texts.values())


def wanted(name: str, prompts: list[torch.Tensor]) -> list[list[int]]:
    model = reference(name)
    options = {"do_sample": False, "max_new_tokens": COUNT, "min_new_tokens": COUNT, "pad_token_id": 0, "eos_token_id": None}
    with torch.no_grad():
        return [model.generate(p[None], attention_mask=torch.ones_like(p[None]), **options)[0, len(p) :].tolist() for p in prompts]


@pytest.mark.parametrize("name", DECODERS)
def test_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Five prompts of different lengths, two at a time, read in pieces while others go on."""
    prompts = [drawn(length, seed=length) for length in (3, 19, 1, 30, 8)]
    assert generated(from_pretrained(saved(name, tmp_path)), prompts) == wanted(name, prompts)


@pytest.mark.parametrize("name", ["llama", "gemma2_window", "gpt2"])
def test_compiled_programs_generate_the_same_tokens(name: str, tmp_path: Path) -> None:
    """In company: prompts that are read in pieces while others go on, texts that end."""
    pytest.importorskip("jaxlib")
    prompts = [drawn(length, seed=length) for length in (3, 19, 1)]
    eager, compiled = (generated(from_pretrained(saved(name, tmp_path)).compile(by), prompts) for by in ("eager", "xla"))
    assert compiled == eager


def test_the_command_goes_on_from_a_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_with_tokenizer(tmp_path)
    options = ["--prompt", "abc", "--temperature", "0", "--max-tokens", "8"]
    assert main(["generate", str(folder), *options]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("abc") and "8 tokens in" in printed.err
    assert main(["generate", str(folder), *options, "--executor", "xla"]) == 0
    assert capsys.readouterr().out == printed.out
    assert main(["generate", str(folder), *options, "--format", "mxfp8"]) == 0
    assert capsys.readouterr().out.startswith("abc")
    assert main(["generate", str(folder), *options, "--format", "int3"]) == 2
    assert "--format: expected one of bf16, fp8, block, mxfp8, nvfp4, mxfp4, got 'int3'" in capsys.readouterr().err
