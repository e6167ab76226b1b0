"""The options of a training run as a value."""

from __future__ import annotations

import pytest

from fusible.cli.training.options import TrainOptions
from fusible.errors import ArgumentError, CheckpointError


def test_options_come_back_from_json() -> None:
    options = TrainOptions(recipes=("delayed", "bf16"), steps=7, lr=1e-3, text="/a", bf16_layers=("last", "head"), fp8_format="e4m3")
    assert TrainOptions.from_json(options.to_json()) == options


_BAD_PRECISION = [{"bf16_layers": "head"}, {"bf16_layers": ["middle"]}, {"bf16_layers": [["head"]]}, {"fp8_format": "e5m2"}, {"fp8_format": 1}]


@pytest.mark.parametrize(
    "change",
    [{"steps": 0}, {"steps": 1.5}, {"recipes": "bf16"}, {"recipes": ["none"]}, {"text": 3}, {"more": 1}, {"lr": True}, *_BAD_PRECISION],
    ids=str,
)
def test_other_json_is_refused(change: dict) -> None:
    with pytest.raises(CheckpointError):
        TrainOptions.from_json({**TrainOptions().to_json(), **change})


def test_json_without_an_option_is_refused() -> None:
    saved = TrainOptions().to_json()
    del saved["seed"]
    with pytest.raises(CheckpointError, match="options"):
        TrainOptions.from_json(saved)


def test_a_checkpoint_of_before_an_option_was_there_ran_without_it() -> None:
    saved = TrainOptions(steps=7).to_json()
    del saved["bf16_layers"], saved["fp8_format"]
    assert TrainOptions.from_json(saved) == TrainOptions(steps=7)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"bf16_layers": "head,middle"}, "--bf16-layers: expected first, last or head, comma-separated, got 'middle'; name each once."),
        ({"bf16_layers": "head,head"}, "--bf16-layers: expected first, last or head, comma-separated, got head,head; name each once."),
        (
            {"bf16_layers": "first,last,head", "layers": 2},
            "--bf16-layers: expected something left to quantize, got first,last,head of --layers 2; give more layers, or name fewer.",
        ),
        (
            {"bf16_layers": "last,head", "layers": 1},
            "--bf16-layers: expected something left to quantize, got last,head of --layers 1; give more layers, or name fewer.",
        ),
        ({"fp8_format": "e5m2"}, "--fp8-format: expected hybrid or e4m3, got 'e5m2'; name one of these."),
    ],
)
def test_a_precision_that_is_none_is_refused(given: dict, sentence: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        TrainOptions.from_command_line(given)
    assert str(raised.value) == sentence


@pytest.mark.parametrize(
    ("names", "layers", "kept"),
    [((), 3, []), (("first",), 3, [0]), (("last",), 3, [2]), (("first", "last"), 3, [0, 2]), (("first", "last"), 1, [0]), (("head",), 3, [])],
)
def test_the_first_and_the_last_block_are_those_that_were_named(names: tuple[str, ...], layers: int, kept: list[int]) -> None:
    options = TrainOptions(bf16_layers=names, layers=layers)
    assert [layer for layer in range(layers) if options.in_bf16(layer)] == kept


def test_the_command_line_gives_what_was_named() -> None:
    options = TrainOptions.from_command_line({"recipe": "bf16, current", "seq_len": 8, "out": "elsewhere", "json": False})
    assert options == TrainOptions(recipes=("bf16", "current"), seq_len=8)


def test_a_resumed_run_keeps_its_options_but_for_steps_and_the_place_of_the_text() -> None:
    saved = TrainOptions(recipes=("delayed",), hidden=64)
    assert saved.continued({}) == saved
    assert saved.continued({"steps": 900, "hidden": 64, "recipe": "delayed"}) == TrainOptions(recipes=("delayed",), hidden=64, steps=900)
    with pytest.raises(ArgumentError, match="--hidden: expected 64, as the resumed run has it, got 128; leave it out."):
        saved.continued({"hidden": 128})
    with pytest.raises(ArgumentError, match="--bf16-layers: expected none, as the resumed run has it, got head; leave it out."):
        saved.continued({"bf16_layers": "head"})
    with pytest.raises(ArgumentError, match="--seed: expected 0, as the resumed run has it, got 1; leave it out."):
        saved.continued({"seed": 1})
    with pytest.raises(ArgumentError, match="--recipe: expected delayed, as the resumed run has it, got bf16; leave it out."):
        saved.continued({"recipe": "bf16"})
