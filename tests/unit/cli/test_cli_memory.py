"""What a command needs is known before anything is allocated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fusible.cli import main
from fusible.cli.training.checkpoint import save_checkpoint
from fusible.cli.training.memory import needed_memory, parameter_count
from fusible.cli.training.model import ByteGPT
from fusible.cli.training.options import RECIPES, TrainOptions
from fusible.cli.training.text import read_text
from fusible.cli.training.trainer import Trainer

SMALL = TrainOptions(steps=1, layers=1, hidden=16, heads=2, seq_len=8, batch=2)


@pytest.mark.parametrize(("layers", "hidden", "experts"), [(1, 16, 0), (3, 32, 0), (2, 64, 0), (2, 32, 3)])
def test_parameters_are_counted_without_making_them(layers: int, hidden: int, experts: int) -> None:
    options = TrainOptions(layers=layers, hidden=hidden, experts=experts)
    assert parameter_count(options) == sum(parameter.numel() for parameter in ByteGPT(options, "bf16").parameters())


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_memory_that_is_needed_grows_with_every_size(recipe: str) -> None:
    least = needed_memory(TrainOptions(), recipe)
    for sizes in ({"layers": 5}, {"hidden": 256}, {"seq_len": 256}, {"batch": 32}):
        assert needed_memory(TrainOptions(**sizes), recipe) > least
    assert needed_memory(TrainOptions(experts=4), recipe) < needed_memory(TrainOptions(experts=4, top_k=3), recipe)
    assert least < 2**27  # of the defaults, which run in a few hundred MiB, libraries included


@pytest.mark.parametrize(
    "words",
    ["--hidden 10000000", "--layers 10000000", "--batch 10000000000", "--seq-len 1000000000000", "--hidden 80000000000000000000"],
)
@pytest.mark.parametrize("recipe", ["bf16", "fp32", "mxfp8", "nvfp4", "fp32,delayed"])
def test_a_run_that_fits_nowhere_is_refused_before_it_begins(tmp_path: Path, capsys, monkeypatch, words: str, recipe: str) -> None:
    monkeypatch.setattr(ByteGPT, "__init__", lambda *_: pytest.fail("it was made"))
    assert main(["train", *words.split(), "--recipe", recipe, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert ": expected a run that fits in the " in said and said.endswith(" GiB; give smaller sizes.\n") and words in said
    assert not (tmp_path / "out").exists()


def test_a_cache_that_fits_nowhere_is_refused(tmp_path: Path, capsys) -> None:
    with torch.random.fork_rng():
        save_checkpoint(tmp_path, Trainer(SMALL, "bf16", read_text(None, SMALL.seq_len)).checkpoint())
    for extra in ([], ["--page-size", "16"]):
        assert main(["generate", str(tmp_path), "--bytes", "1000000000000", *extra]) == 2
        assert ": expected at most the " in capsys.readouterr().err
