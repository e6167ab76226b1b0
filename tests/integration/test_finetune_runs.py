"""``fusible train --model`` as a user calls it: results that others load, folders that are not overwritten, and bad command lines."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from convert_families import peft, transformers
from finetune_models import SMALL, checkpoint, documents, metrics, new_model, small_run
from safetensors.torch import load_file

from fusible.cli import main
from fusible.errors import CheckpointError
from fusible.models import from_pretrained
from fusible.models.training import read_manifest

pytestmark = [pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a checkpoint ``base`` and documents."""
    made = tmp_path_factory.mktemp("finetune")
    checkpoint(made / "base")
    documents(made / "documents.jsonl")
    yield made


def test_transformers_loads_what_was_trained(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(small_run(place, out, "--steps", "2", "--eval-every", "1", "--recipe", "fp32")) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out / "model")
    tokens = transformers.AutoTokenizer.from_pretrained(out / "model")("The parameters", return_tensors="pt").input_ids
    ours = from_pretrained(out / "model")
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)
        assert (theirs(tokens).logits - new_model()(tokens).logits).abs().max() > 1e-2
    assert [each["step"] for each in metrics(out)["held_out_loss"]] == [1, 2]
    assert (out / "loss.png").read_bytes()[:4] == b"\x89PNG"


def test_peft_loads_adapters_and_merged_weights_are_written_beside(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(small_run(place, out, "--steps", "4", "--lora", "2", "--merge", "--recipe", "fp32")) == 0
    assert sorted(path.name for path in out.iterdir()) == ["adapter", "checkpoint", "loss.png", "metrics.json", "model"]
    tokens = torch.arange(3, 30)[None]
    theirs = peft.PeftModel.from_pretrained(new_model(), out / "adapter")
    with torch.no_grad():
        wanted = theirs(tokens).logits
        torch.testing.assert_close(from_pretrained(out / "model")(tokens), wanted, rtol=1e-5, atol=1e-5)
    assert (wanted - new_model()(tokens).logits).abs().max() > 1e-3
    assert all(p.numel() < 3000 for p in load_file(out / "checkpoint" / "parameters.safetensors").values())  # adapters alone


def test_a_new_model_begins_from_a_configuration(place: Path, tmp_path: Path) -> None:
    config = tmp_path / "tiny.json"
    config.write_text((place / "base" / "config.json").read_text())
    given = ["--model", str(config), "--tokenizer", str(place / "base"), "--data", str(tmp_path / "*.txt")]
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("a text that repeats itself, " * 60)
    assert main(["train", *given, *SMALL, "--steps", "8", "--out", str(tmp_path / "out")]) == 0
    loss = metrics(tmp_path / "out")["loss"]
    assert loss[-1] < loss[0] and metrics(tmp_path / "out")["data"]["training"]["documents"] == 3
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in (tmp_path / "out" / "model").iterdir()}


def refused(capsys: pytest.CaptureFixture[str], *given: str) -> str:
    capsys.readouterr()
    assert main(list(given)) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    return said.err


def test_a_folder_with_a_run_is_not_overwritten_unless_asked(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(small_run(place, out, "--steps", "2")) == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert "go on with it by --resume" in refused(capsys, *small_run(place, out, "--steps", "1"))
    assert "at least the 2 steps" in refused(capsys, "train", "--resume", str(out), "--steps", "1")
    assert "as the resumed run has it" in refused(capsys, "train", "--resume", str(out), "--lr", "1")
    assert "--resume or --overwrite" in refused(capsys, "train", "--resume", str(out), "--overwrite")
    other = documents(tmp_path / "other.jsonl", 4)
    assert "the documents and the tokenizer" in refused(capsys, "train", "--resume", str(out), "--steps", "3", "--data", str(other))
    assert "no such option" in refused(capsys, "train", "--resume", str(out), "--layers", "2")
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert main(small_run(place, out, "--steps", "1", "--overwrite", "--lora", "2")) == 0
    assert metrics(out)["steps"] == 1 and not (out / "model").exists()
    assert main(["train", "--resume", str(out), "--merge"]) == 0 and (out / "model" / "config.json").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"resid_pdrop": 0.1, "attn_pdrop": 0.25}, "attn_pdrop 0.25, resid_pdrop 0.1"),
        ({"resid_pdrop": None, "attn_pdrop": None, "embd_pdrop": None}, "attn_pdrop 0.1, embd_pdrop 0.1, resid_pdrop 0.1"),
    ],
)
def test_dropout_that_is_not_applied_is_said(changes: dict, said: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = checkpoint(tmp_path / "base", "gpt2")
    entries = {**json.loads((base / "config.json").read_text()), **changes}
    (base / "config.json").write_text(json.dumps({name: value for name, value in entries.items() if value is not None}))
    words = small_run(place, tmp_path / "out", "--steps", "1", "--model", str(base))
    assert main(words) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert (f"Not applied in training, of the model's configuration: {said}." in told) if said else "Not applied" not in told


def test_other_weights_beneath_adapters_are_refused(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(small_run(place, out, "--steps", "1", "--lora", "2")) == 0
    checkpoint(tmp_path / "moved")
    assert main(["train", "--resume", str(out), "--steps", "2", "--model", str(tmp_path / "moved")]) == 0
    new_model(seed=1).save_pretrained(tmp_path / "moved")
    assert "beneath its adapters" in refused(capsys, "train", "--resume", str(out), "--steps", "3", "--model", str(tmp_path / "moved"))


BAD: dict[str, tuple[list[str], str]] = {
    "context": (["--seq-len", "65"], "--seq-len: expected at most 64, the context of the model"),
    "short": (["--seq-len", "64", "--eval-share", "0.001"], "the --eval-share of 0.001"),
    "weights": (["--model", "nothing"], "nothing"),
    "targets": (["--lora", "2", "--lora-targets", "q_proj"], "read as one"),
    "alone": (["--base-format", "fp8"], "--base-format: expected --lora with it"),
    "merge alone": (["--merge"], "--merge: expected --lora with it"),
    "micro": (["--micro-batch", "3"], "--micro-batch: expected a divisor of the 4 windows"),
    "blocks": (["--seq-len", "40", "--recipe", "mxfp8"], "--seq-len: expected a multiple of 32"),
    "recipes": (["--recipe", "bf16,delayed"], "--recipe"),
    "pattern": (["--data", "none-*.txt"], "a pattern that fits files"),
    "demo": (["--hidden", "8"], "--hidden: expected no such option"),
    "device": (["--device", "tape"], "--device: expected a device that torch has here, got 'tape'"),
    "processes": (["--tensor-parallel", "2"], "the number of processes: expected the 1 that were started"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_lines_are_refused_before_anything_is_written(
    case: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    more, sentence = BAD[case]
    assert sentence in refused(capsys, *small_run(place, tmp_path / "out", "--steps", "1", *more))
    assert not list(tmp_path.iterdir())


def test_options_of_models_need_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--lora: expected --model with it" in refused(capsys, "train", "--lora", "2")
    assert "--model: expected --data with it" in refused(capsys, "train", "--model", "somewhere")


def test_a_tokenizer_of_more_tokens_than_the_model_is_refused(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((place / "base" / "config.json").read_text())
    (tmp_path / "small.json").write_text(json.dumps({**config, "vocab_size": 512}))
    given = small_run(place, tmp_path / "out", "--model", str(tmp_path / "small.json"), "--tokenizer", str(place / "base"))
    assert "a tokenizer of at most the model's 512 tokens" in refused(capsys, *given)


def test_ctrl_c_saves_and_says_how_to_go_on(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    steps = iter(range(100))
    monkeypatch.setattr("fusible.cli.training.progress.Lines.step", lambda *_: os.kill(os.getpid(), signal.SIGINT) if next(steps) == 1 else None)
    assert main(small_run(place, out, "--steps", "9")) == 130
    assert "Interrupted and saved after step 2 of 9" in capsys.readouterr().err
    assert read_manifest(out / "checkpoint")["record"]["loss"] and not (out / "model").exists()
    with pytest.raises(CheckpointError):
        read_manifest(out)
