"""Every option of every command answers a wrong value in one sentence that names it, with exit code 2, and writes nothing."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import tokenizers
import torch

from fusible.cli import main
from fusible.cli.command import all_commands
from fusible.cli.main import _parser
from fusible.models import from_config, save_pretrained
from fusible.models.checkpoints import write_checkpoint

SMALL = "--steps 1 --layers 1 --hidden 8 --heads 1 --seq-len 8 --batch 1 --text text.txt --out made".split()
TRAINED = "--model new.json --tokenizer words --data text.txt --steps 1 --seq-len 8 --batch 2 --eval-share 0.2 --out made".split()
ADAPTED = [*TRAINED[2:], "--model", "new", "--lora", "2"]
BASES: dict[str, tuple[list[str], list[str]]] = {
    "bench": (["--quick", "--only", "casts"], []),
    "check-backend": (["--only", "gelu"], ["torch"]),
    "evaluate": ("--text text.txt --formats bf16 --window 4 --tokens 8".split(), ["new"]),
    "export": (["--out", "made.onnx"], ["new"]),
    "generate": (["--bytes", "1"], ["trained"]),
    "info": ([], []),
    "quantize": (["--format", "fp8", "--out", "made"], ["model"]),
    "run": ([], ["script.py"]),
    "scale": (["--model", "llama-7b", "--gpus", "8", "--recipe", "bf16"], []),
    "serve": (["--port", "0"], ["trained"]),
    "trace": ([], ["script.py"]),
    "train": (SMALL, []),
}
"""Of each command the options and the positional arguments that a wrong one is put among."""
INSTEAD = {
    **dict.fromkeys(
        ("model", "data", "eval-data", "eval-share", "eval-every", "tokenizer", "micro-batch", "warmup", "min-lr", "weight-decay"), TRAINED
    ),
    **dict.fromkeys(("clip", "lora", "moments"), TRAINED),
    **dict.fromkeys(("lora-alpha", "lora-targets", "base-format"), ADAPTED),
}
"""The options of ``train`` that a model is trained with, and what they are put among."""
NUMBERS = ["x", "", "2.5.1", "-1", "nan", "-inf", "1e400", "0x10", "[1]", "1,2", "None", "é", "9" * 5000]
NAMES = ["x", ",", "none.none", "é", "a b", "None", "bf16,,x", "-", "x" * 3000]
FILES = ["none/none", "text.txt/none", "x" * 3000, "trained", "é/é"]
KINDS = {"N": NUMBERS, "X": NUMBERS, "FILE": FILES, "DIR": FILES, "SCRIPT": FILES, "SIZE": NUMBERS}
"""By what the help calls a value: wrong ones; any other is a name."""
RIGHT = {
    ("generate", "--prompt"): "any text is one",
    ("generate", "DIR", "trained"): "it is one",
    ("bench", "--json"): "the tables are refused first",
    ("generate", "--seed", "-1"): "torch's generators take it",
    ("serve", "--name"): "any text is one",
    ("serve", "--format"): "the directory is refused first",
    ("train", "--out", "trained"): "it may be written to",
    ("train", "--resume", "trained"): "it is one",
    ("train", "--out", "none/none"): "folders are made",
    ("train", "--out", "é/é"): "folders are made",
    ("evaluate", "--out"): "folders are made",
    ("quantize", "--out", "none/none"): "folders are made",
    ("quantize", "--out", "é/é"): "folders are made",
}


LISTS = {
    ("bench", "--only"): "casts", ("check-backend", "--only"): "gelu", ("check-backend", "--dtype"): "float32", ("train", "--recipe"): "delayed",
    ("train", "--bf16-layers"): "first", ("train", "--lora-targets"): "o_proj",
}  # fmt: skip
"""A right value of each option that takes several names."""


NEW = {"model_type": "llama", "vocab_size": 8, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
NEW |= {"max_position_embeddings": 16}


class Line(NamedTuple):
    command: str
    option: str
    value: str

    @property
    def words(self) -> list[str]:
        options, positional = BASES[self.command]
        if self.command == "train":
            options = INSTEAD.get(self.option.removeprefix("--"), options)
        if not self.option.startswith("-"):
            return [self.command, *options, self.value]
        kept = list(options)
        if self.option in kept:
            at = kept.index(self.option)
            del kept[at : at + 2]
        return [self.command, *kept, f"{self.option}={self.value}", *positional]


def _actions() -> Iterator[tuple[str, argparse.Action]]:
    parser = _parser(all_commands())
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for name, own in commands.choices.items():
        yield from ((name, action) for action in own._actions if action.nargs != 0 and action.nargs not in (argparse.REMAINDER, "..."))


def _lines() -> Iterator[Line]:
    for command, action in _actions():
        option = next((text for text in action.option_strings if text.startswith("--")), str(action.metavar or action.dest))
        for value in KINDS.get(str(action.metavar or action.dest).partition("[")[0], NAMES):
            if (command, option) not in RIGHT and (command, option, value) not in RIGHT:
                yield Line(command, option, value)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("a text of some length. " * 200)
    (tmp_path / "script.py").write_text("pass\n")
    write_checkpoint("model", {"model_type": "llama"}, {"model.layers.0.mlp.up_proj.weight": torch.ones(32, 32)})
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "text": 1}, unk_token="a"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (tmp_path / "words").mkdir()
    words.save("words/tokenizer.json")
    (tmp_path / "new.json").write_text(json.dumps(NEW))
    save_pretrained(from_config(NEW), "new")
    words.save("new/tokenizer.json")
    assert main(["train", *SMALL[:-1], "trained"]) == 0
    capsys.readouterr()
    return tmp_path


def _answer(line: Line, capsys: pytest.CaptureFixture[str], here: Path) -> str:
    """What is wrong with the answer, or nothing."""
    before = sorted(str(path) for path in here.rglob("*"))
    try:
        code = main(line.words)
    except SystemExit as stop:
        code = stop.code
    said = capsys.readouterr()
    shown = line.option.lstrip("-")
    form = r".*: expected .*, got .*; .*\.|.*: see 'fusible .*--help'\.|Backend .* not found\. .*"
    wrong = [
        (code == 2, f"exit code {code}"),
        (said.out == "", f"says {said.out[:80]!r}"),
        (said.err.count("\n") == 1, f"no one line: {said.err[-300:]!r}"),
        (re.fullmatch(form, said.err.strip()) is not None, f"no sentence: {said.err[:300]!r}"),
        (shown.lower() in said.err.lower() or line.value[:40] in said.err or line.value.split(",")[0] in said.err, f"no name: {said.err[:300]!r}"),
        (len(said.err) < 1500, f"{len(said.err)} characters"),
        (before == sorted(str(path) for path in here.rglob("*")), "something was written"),
    ]
    return "; ".join(text for holds, text in wrong if not holds)


def test_every_command_is_swept() -> None:
    assert {command for command, _ in _actions()} <= set(BASES) == {command.name for command in all_commands()}


def test_every_list_is_known() -> None:
    found = {(command, max(action.option_strings, key=len)) for command, action in _actions() if "[," in str(action.metavar)}
    assert found == set(LISTS)


def test_a_list_refuses_an_empty_name(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    for (command, option), good in LISTS.items():
        for value in ("", " ", ",", f"{good},", f",{good}", f"{good},,{good}", f"{good}, ,"):
            line = Line(command, option, value)
            assert _answer(line, capsys, here) == "", line
            assert main(line.words) == 2 and "both sides of each comma" in capsys.readouterr().err


def test_every_option_refuses_what_it_cannot_take(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    lines = list(_lines())
    answers = {line: _answer(line, capsys, here) for line in lines}
    print(f"{len(lines)} command lines")
    unclear = [f"{line.command} {line.option}={line.value[:30]!r}: {answer}" for line, answer in answers.items() if answer]
    assert not unclear, "\n".join(unclear)
    assert len(lines) > 200
