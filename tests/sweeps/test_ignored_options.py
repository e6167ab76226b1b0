"""No option of a command that has models is taken and left out: each works alone, or is refused, in one sentence, where nothing reads it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from test_bad_command_lines import NEW

from fusible.cli import main
from fusible.cli.command import all_commands
from fusible.cli.main import _parser

COMMANDS = ("generate", "serve", "evaluate", "quantize", "train")
DIRECTORY, RUN, T5 = "generate new --prompt x", "generate run --prompt x", "generate t5 --prompt x"
MODEL = "train --model new.json --data text.txt --out made"
ADAPTERS = {"--lora-alpha": "1", "--lora-targets": "x", "--base-format": "fp8", "--merge": None}
OF_MODELS = {
    **{"--data": "text.txt", "--eval-data": "text.txt", "--eval-share": "0.1", "--eval-every": "1", "--tokenizer": "x", "--micro-batch": "1"},
    **{"--warmup": "1", "--min-lr": "0", "--weight-decay": "0", "--clip": "0", "--lora": "1", "--device": "cpu", "--moments": "fp8"},
}
OF_DEMO = {
    **{"--executor": "xla", "--bf16-layers": "first", "--fp8-format": "e4m3", "--layers": "1", "--hidden": "8", "--heads": "1", "--experts": "2"},
    **{"--top-k": "1", "--text": "text.txt", "--context-parallel": "2", "--context-way": "ring", "--pipeline-parallel": "2"},
}
OF_DIRECTORIES = {
    **{"--chat": None, "--system": "x", "--max-tokens": "1", "--top-p": "0.5", "--min-p": "0.5", "--repetition-penalty": "2", "--stop": "x"},
    **{"--format": "fp8", "--device": "cpu", "--max-memory": "1GiB"},
}
REFUSED: list[tuple[str, str, str | None]] = [
    (DIRECTORY, "--system", "x"),
    *((DIRECTORY, option, value) for option, value in {"--bytes": "1", "--recipe": "delayed"}.items()),
    *((RUN, option, value) for option, value in OF_DIRECTORIES.items()),
    *((T5, option, value) for option, value in {"--chat": None, "--system": "x", "--page-size": "4", "--max-memory": "1GiB"}.items()),
    ("serve new --port 0 --pages 4", "--max-memory", "1GiB"),
    ("evaluate new --text text.txt", "--overwrite", None),
    *(("train --out made", option, value) for option, value in {**OF_MODELS, **ADAPTERS}.items()),
    *((MODEL, option, value) for option, value in {**OF_DEMO, "--microbatches": "2"}.items() if "parallel" not in option),
    *((MODEL, option, value) for option, value in ADAPTERS.items()),
    (f"{MODEL} --eval-data text.txt", "--eval-share", "0.1"),
    (f"{MODEL} --eval-share 0", "--eval-every", "1"),
    ("train --out made", "--top-k", "1"),
    *(("train --out made", option, OF_DEMO[option]) for option in ("--bf16-layers", "--fp8-format", "--context-way")),
    *(("train --recipe fp32,nvfp4 --out made", option, OF_DEMO[option]) for option in ("--fp8-format",)),
    *(
        ("train --out made", option, value)
        for option, value in {"--sequence-parallel": None, "--microbatches": "2", "--shard-parameters": None}.items()
    ),
    ("train --resume run --overwrite", "--resume", None),
]
"""What a command line has, and an option that nothing would read beside it, with a value."""
ALWAYS = {
    "generate": "prompt temperature top-k seed page-size executor".split(),
    "serve": "host port name format device sequences context page-size pages tokens-per-step max-tokens concurrency queue-seconds request-seconds "
    "grace-seconds body-bytes".split(),
    "evaluate": "text formats window tokens device out".split(),
    "quantize": "format out shard-size".split(),
    "train": "recipe steps seq-len batch lr decay-steps seed tensor-parallel expert-parallel data-parallel model out save-every overwrite".split()
    + "context-parallel pipeline-parallel layers hidden heads experts text executor".split(),
}
"""The options that something reads whatever stands beside them, but for those of one kind of DIR or model, which ``REFUSED`` has too."""


def options_of(command: str) -> set[str]:
    parser = _parser(all_commands())
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    names = {name for action in commands.choices[command]._actions for name in action.option_strings if name.startswith("--")}
    return names - {"--help"}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_sorted(command: str) -> None:
    """A new option is put where it belongs: among those that are always read, or with a line beside which it is refused."""
    refused = {option for line, option, _ in REFUSED if line.split()[0] == command}
    assert {f"--{name}" for name in ALWAYS[command]} | refused == options_of(command)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("a text of some length. " * 20)
    (tmp_path / "run").mkdir()
    t5 = {"model_type": "t5", "vocab_size": 8, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    for name, config in (("new", NEW), ("t5", t5)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "new.json").write_text(json.dumps(NEW))
    return tmp_path


@pytest.mark.parametrize(("line", "option", "value"), REFUSED, ids=[f"{line} {option}" for line, option, _ in REFUSED])
def test_an_option_that_nothing_reads_is_refused(line: str, option: str, value: str | None, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(here.rglob("*"))
    words = line.split() + ([] if option in line.split() else [option]) + ([] if value is None else [value])
    assert main(words) == 2
    said = capsys.readouterr()
    assert option in said.err.partition(", got ")[0] and ": expected " in said.err and said.err.count("\n") == 1 and not said.out
    assert sorted(here.rglob("*")) == before
