"""The options of a training run as a value."""

from __future__ import annotations

import pytest

from fusible.cli.training.options import TrainOptions
from fusible.errors import ArgumentError, CheckpointError


def test_options_come_back_from_json() -> None:
    options = TrainOptions(recipes=("delayed", "bf16"), steps=7, lr=1e-3, text="/a")
    assert TrainOptions.from_json(options.to_json()) == options


@pytest.mark.parametrize(
    "change", [{"steps": 0}, {"steps": 1.5}, {"recipes": "bf16"}, {"recipes": ["none"]}, {"text": 3}, {"more": 1}, {"lr": True}], ids=str
)
def test_other_json_is_refused(change: dict) -> None:
    with pytest.raises(CheckpointError):
        TrainOptions.from_json({**TrainOptions().to_json(), **change})


def test_json_without_an_option_is_refused() -> None:
    saved = TrainOptions().to_json()
    del saved["seed"]
    with pytest.raises(CheckpointError, match="options"):
        TrainOptions.from_json(saved)


def test_the_command_line_gives_what_was_named() -> None:
    options = TrainOptions.from_command_line({"recipe": "bf16, current", "seq_len": 8, "out": "elsewhere", "json": False})
    assert options == TrainOptions(recipes=("bf16", "current"), seq_len=8)


def test_a_resumed_run_keeps_its_options_but_for_steps_and_the_place_of_the_text() -> None:
    saved = TrainOptions(recipes=("delayed",), hidden=64)
    assert saved.continued({}) == saved
    assert saved.continued({"steps": 900, "hidden": 64, "recipe": "delayed"}) == TrainOptions(recipes=("delayed",), hidden=64, steps=900)
    with pytest.raises(ArgumentError, match="Expected 64, as the resumed run has it, of --hidden, got 128: leave it out."):
        saved.continued({"hidden": 128})
    with pytest.raises(ArgumentError, match="Expected delayed, as the resumed run has it, of --recipe, got bf16: leave it out."):
        saved.continued({"recipe": "bf16"})
