"""Runs of ``fusible train --model`` that are interrupted, killed while they train or save, and resumed: the same to the bit."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_models import checkpoint, documents, metrics, small_run
from safetensors.torch import load_file

from fusible.cli import main
from fusible.cli.finetuning.options import FinetuneOptions
from fusible.models.training import load_run, read_manifest, save_run

WAYS = {
    "delayed": ["--recipe", "delayed"],
    "nvfp4": ["--recipe", "nvfp4"],  # whose gradients are rounded at random
    "moments in 8 bits": ["--moments", "fp8"],
    "adapters": ["--lora", "4", "--base-format", "fp8", "--recipe", "delayed"],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a checkpoint ``base`` and documents."""
    made = tmp_path_factory.mktemp("finetune")
    checkpoint(made / "base")
    documents(made / "documents.jsonl")
    yield made


@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_is_resumed_is_to_the_bit_the_run_at_once(way: str, place: Path, tmp_path: Path) -> None:
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert main([*small_run(place, whole, "--steps", "6"), *WAYS[way]]) == 0
    assert main([*small_run(place, parted, "--steps", "3"), *WAYS[way]]) == 0
    assert main(["train", "--resume", str(parted), "--steps", "6"]) == 0
    assert metrics(whole)["loss"] == metrics(parted)["loss"] and len(metrics(whole)["loss"]) == 6
    assert metrics(whole)["held_out_loss"][-1] == metrics(parted)["held_out_loss"][-1]
    for name in ("parameters.safetensors", "state.safetensors"):
        assert (whole / "checkpoint" / name).read_bytes() == (parted / "checkpoint" / name).read_bytes(), name


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_to_the_bit(place: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert main(small_run(place, whole, "--steps", "40")) == 0
    program = [sys.executable, "-m", "fusible", *small_run(place, killed, "--steps", "40", "--save-every", "1")]
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    with subprocess.Popen(program, env=environment, stdout=subprocess.DEVNULL) as run:
        while not (killed / "checkpoint" / "training.json").exists() and run.poll() is None:
            time.sleep(0.01)
        time.sleep(0.2)
        run.kill()
    assert run.returncode == -signal.SIGKILL and not (killed / "metrics.json").exists()
    assert main(["train", "--resume", str(killed)]) == 0
    assert metrics(whole)["loss"] == metrics(killed)["loss"]
    assert (whole / "model" / "model.safetensors").read_bytes() == (killed / "model" / "model.safetensors").read_bytes()


def test_a_state_is_whole_however_its_saving_is_cut_short(tmp_path: Path) -> None:
    """A child saves two states by turns until it is killed; what is read is one of the two."""
    generator = torch.Generator().manual_seed(0)
    states = [{"a": torch.randn(3, 50000, generator=generator), "b": torch.tensor([number])} for number in range(2)]
    states[0]["c"] = torch.arange(5, dtype=torch.uint8)
    draw = random.Random(0)
    save_run(tmp_path, {"number": 0}, {"x.safetensors": states[0]})
    for _ in range(8):
        child = os.fork()
        if not child:
            while True:
                for number, state in enumerate(states):
                    save_run(tmp_path, {"number": number}, {"x.safetensors": state})
        time.sleep(draw.uniform(0.0, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        manifest = read_manifest(tmp_path)
        found = load_run(tmp_path, manifest)
        wanted = states[manifest["number"]]
        assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert load_file(tmp_path / "x.safetensors").keys() >= {"a", "b"} or (tmp_path / ".saved").exists()


@pytest.mark.parametrize("name", ["training.json", "parameters.safetensors", "state.safetensors"])
def test_a_damaged_state_is_refused(name: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(small_run(place, out, "--steps", "1")) == 0
    path = out / "checkpoint" / name
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)
    capsys.readouterr()
    assert main(["train", "--resume", str(out), "--steps", "2"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and name in said and "use an intact checkpoint" in said
    path.unlink()
    assert main(["train", "--resume", str(out), "--steps", "2"]) == 2


def test_options_that_the_first_runs_lack_are_what_those_had() -> None:
    options = FinetuneOptions("model", ("text.txt",), device="cuda")
    saved = options.to_json()
    assert FinetuneOptions.from_json(saved) == options
    del saved["device"]
    assert FinetuneOptions.from_json(saved).device == "cpu"


CHANGED: dict[str, tuple[dict[str, Any], str]] = {
    "another": ({"rms_norm_eps": 0.5}, "rms_norm_eps 1e-06 in the model's configuration, as it was"),
    "none": ({"rope_parameters": None}, "got null;"),
    "new": ({"attention_multiplier": 2.0}, "attention_multiplier none in the model's configuration"),
    "of the file": ({"transformers_version": "4.0", "dtype": "bfloat16"}, ""),
}


@pytest.mark.parametrize("kind", ["whole", "adapters", "begun at random"])
@pytest.mark.parametrize("change", CHANGED)
def test_another_configuration_of_the_model_is_refused(
    kind: str, change: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    shutil.copytree(place / "base", base)
    model = base / "config.json" if kind == "begun at random" else base
    assert main(small_run(place, out, "--steps", "1", "--model", str(model), *(["--lora", "2"] if kind == "adapters" else []))) == 0
    entries = json.loads((base / "config.json").read_text())
    entries, said = {**entries, **CHANGED[change][0]}, CHANGED[change][1]
    (base / "config.json").write_text(json.dumps(entries))
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert main(["train", "--resume", str(out), "--steps", "2"]) == (2 if said else 0)
    told = capsys.readouterr().err
    if said:
        assert said in told and before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}, told


def test_a_run_goes_on_from_what_it_has_written_and_from_a_state_without_a_configuration(place: Path, tmp_path: Path) -> None:
    base, out = checkpoint(tmp_path / "base"), tmp_path / "out"
    entries = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**entries, "unused": [float("inf"), float("nan"), 10**30]}))  # which JSON has no numbers for
    assert main(small_run(place, out, "--steps", "1", "--model", str(base))) == 0
    assert main(["train", "--resume", str(out), "--steps", "2", "--model", str(out / "model")]) == 0
    manifest = read_manifest(out / "checkpoint")
    tensors = load_run(out / "checkpoint", manifest)
    del manifest["config"]  # as the first versions wrote it
    save_run(out / "checkpoint", manifest, {"parameters.safetensors": tensors})
    assert main(["train", "--resume", str(out), "--steps", "3"]) == 0
