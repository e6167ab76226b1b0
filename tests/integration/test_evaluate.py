"""What number formats cost: figures against a plain computation, and ``fusible evaluate`` on a directory."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import tokenizers
import torch
from convert_families import WORDS
from pretrained_models import reference, saved

import fusible
from fusible.cli import main
from fusible.models.evaluation import evaluate, token_windows
from fusible.models.pretrained import language_model_from

TEXT = "".join(chr(97 + (i * i + i // 7) % 26) for i in range(400))


def folder_with_tokenizer(folder: Path) -> Path:
    """A small Llama whose tokens are letters."""
    return with_tokenizer(saved("llama", folder))


def with_tokenizer(place: Path, further: int = 0) -> Path:
    """A model's directory, with a tokenizer whose tokens are letters, and ``further`` ones behind them Chinese signs."""
    letters = {chr(97 + i): i + 3 for i in range(26)} | {chr(0x4E00 + i): i + 29 for i in range(further)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"<unk>": 0, **letters}, merges=[], unk_token="<unk>"))
    made.save(str(place / "tokenizer.json"))
    return place


def test_windows_follow_one_another_and_each_foretells_the_next() -> None:
    windows = token_windows(torch.arange(11), 3)
    assert windows.tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    with pytest.raises(fusible.errors.ArgumentError, match="the text: expected more than 11 tokens, a window, got 11 tokens"):
        token_windows(torch.arange(11), 11)


def test_figures_are_those_of_a_plain_computation(tmp_path: Path) -> None:
    """Of transformers' model and one whose weights are held in MXFP8, in float64."""
    folder = saved("llama", tmp_path)
    model, plain = language_model_from(folder, fusible.MXFP8BlockScaling()), language_model_from(folder)
    windows = token_windows(torch.randint(WORDS, (65,), generator=torch.Generator().manual_seed(0)), 16)
    found = evaluate(model, plain, windows)
    with torch.no_grad():
        ours = model(windows[:, :-1]).double().log_softmax(-1).flatten(0, 1)
        theirs = reference("llama")(windows[:, :-1]).logits.double().log_softmax(-1).flatten(0, 1)
    likelihood = ours[torch.arange(64), windows[:, 1:].flatten()].mean().item()
    assert found.perplexity == pytest.approx(math.exp(-likelihood), rel=1e-4)
    assert found.divergence == pytest.approx((theirs.exp() * (theirs - ours)).sum(-1).mean().item(), rel=1e-3)
    assert found.agreement == (ours.argmax(-1) == theirs.argmax(-1)).double().mean().item() < 1
    assert found.nbytes == fusible.parameter_bytes(model) < 0.6 * fusible.parameter_bytes(plain)
    assert found.tokens_per_second > 0


def test_a_model_beside_itself_differs_by_nothing(tmp_path: Path) -> None:
    model = language_model_from(saved("llama", tmp_path))
    found = evaluate(model, model, token_windows(torch.arange(40), 8))
    assert found.divergence == 0 and found.agreement == 1


def test_the_command_prints_a_table_and_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, text, out = folder_with_tokenizer(tmp_path), tmp_path / "text", tmp_path / "out"
    text.write_text(TEXT)
    command = ["evaluate", str(folder), "--text", str(text), "--formats", "bf16,fp8,mxfp8", "--window", "32", "--out", str(out)]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "384 tokens in windows of 32" in printed and "perplexity" in printed
    figures = json.loads((out / "quality.json").read_text())
    assert list(figures) == ["bf16", "fp8", "mxfp8"]
    assert figures["bf16"]["divergence"] == 0 and figures["mxfp8"]["divergence"] > 0
    assert figures["mxfp8"]["nbytes"] < figures["bf16"]["nbytes"]
    rows = (out / "quality.md").read_text().splitlines()
    assert len(rows) == 5 and all(row.count("|") == 7 for row in rows)
    assert (out / "quality.png").read_bytes().startswith(b"\x89PNG")
    assert main(command) == 2
    assert "--out: expected a directory without a table" in capsys.readouterr().err
    assert main([*command, "--overwrite"]) == 0


BAD = {
    "a format that is none": (["--formats", "bf16,int3"], "--formats: expected bf16, fp8"),
    "a window of nothing": (["--window", "0"], "--window: expected at least 1, got 0"),
    "a window beyond the context": (["--window", "200"], "--window: expected at most 128, the context of the model, got 200"),
    "fewer tokens than a window has": (
        ["--window", "128", "--tokens", "100"],
        "--tokens: expected at least 128, the tokens of a window, got 100; give",
    ),
    "a text that is too short": (["--window", "401"], "--text: expected more than 401 tokens, a window, got 400 tokens; give a longer text"),
    "nowhere to write": (["--overwrite"], "--overwrite: expected --out beside it, got none"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options_are_one_sentence(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options, message = BAD[name]
    folder, text = folder_with_tokenizer(tmp_path), tmp_path / "text"
    text.write_text(TEXT)
    assert main(["evaluate", str(folder), "--text", str(text), *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_text_that_is_none_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, text = folder_with_tokenizer(tmp_path), tmp_path / "text"
    text.write_bytes(b"abc\xff")
    assert main(["evaluate", str(folder), "--text", str(text)]) == 2
    assert "--text: expected a text in UTF-8" in capsys.readouterr().err
    for place in ("none", "."):
        assert main(["evaluate", str(folder), "--text", str(tmp_path / place)]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"--text {tmp_path / place}: expected a ") and error.endswith("; name a text file.\n")
