"""The job of ``fusible evaluate``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from fusible.cli.console import make_console, make_table
from fusible.cli.devices import device_named
from fusible.cli.evaluation.plot import draw_qualities
from fusible.cli.lists import check_names, names_in
from fusible.errors import ArgumentError, expected
from fusible.files import read_file, replace_files
from fusible.models.checkpoints.checkpoint import read_config
from fusible.models.evaluation import Quality, evaluate, token_windows
from fusible.models.families import check_causal
from fusible.models.pretrained import language_model_from, stored_formats_in
from fusible.models.stored_formats import StoredFormats
from fusible.models.text import Tokenizer
from fusible.models.weight_formats import WEIGHT_FORMATS
from fusible.pytorch import Recipe

__all__ = ["as_markdown", "evaluate_formats"]

_FILES = "quality.json", "quality.md", "quality.png"
_STORED = "as stored"
"""The row of a model that has weights in several formats, or in one that has no name here, or quantized ones beside others."""


def evaluate_formats(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    asked = None if arguments.formats is None else names_in(arguments.formats, "--formats")
    if asked is not None:
        check_names(asked, WEIGHT_FORMATS, "--formats")
    for option, value in (("--window", arguments.window), ("--tokens", arguments.tokens)):
        if value < 1:
            raise ArgumentError(expected("at least 1", of=option, got=value, do="give a larger number"))
    if arguments.out is not None:
        check_free(Path(arguments.out), arguments.overwrite)
    elif arguments.overwrite:
        raise ArgumentError(expected("--out beside it", of="--overwrite", got="none", do="give --out OUT, or leave it out"))
    device = device_named(arguments.device)
    windows = _windows(arguments)
    check_causal(read_config(Path(arguments.folder)), f"DIR {arguments.folder}")
    rows = _rows(asked, stored_formats_in(arguments.folder))
    reference = language_model_from(arguments.folder, dtype=torch.bfloat16, device=device)
    if arguments.window > reference.context:
        wanted = f"at most {reference.context}, the context of the model"
        raise ArgumentError(expected(wanted, of="--window", got=arguments.window, do="give a smaller one"))
    found: dict[str, Quality] = {}
    for row, recipe in rows.items():
        model = reference if recipe is None else language_model_from(arguments.folder, recipe, dtype=torch.bfloat16, device=device)
        found[row] = evaluate(model, reference, windows)
    show(found, f"{Path(arguments.folder).name}: {windows[:, 1:].numel():,} tokens in windows of {arguments.window}")
    if arguments.out is not None:
        made = {name: asdict(quality) for name, quality in found.items()}
        contents = json.dumps(made, indent=1).encode(), as_markdown(found).encode(), draw_qualities(found)
        replace_files(Path(arguments.out), dict(zip(_FILES, contents, strict=True)))
    return 0


def _rows(asked: Sequence[str] | None, stored: StoredFormats) -> dict[str, Recipe | None]:
    """By the name of each row of the table the recipe that its weights are held by; None for the model as it is stored, which a quantized one is
    evaluated as unless formats are ``asked`` for. A format that some of the weights do not take says so in its name."""
    if asked is None and stored.counts:
        (name, *others) = stored.counts
        return {_STORED if others or stored.plain or name not in WEIGHT_FORMATS else name: None}
    rows: dict[str, Recipe | None] = {}
    for name in WEIGHT_FORMATS if asked is None else asked:
        stored.check(name, of="--formats", do="leave it out, or evaluate the model that was quantized")
        others = stored.others(name)
        rows[f"{name} ({stored.total - others} of {stored.total} weights)" if others else name] = WEIGHT_FORMATS[name]
    return rows


def check_free(out: Path, overwrite: bool) -> None:
    """Raise ``ArgumentError`` where a table is there that nobody said may be replaced."""
    there = [name for name in _FILES if (out / name).exists()]
    if there and not overwrite:
        do = "name another directory, or write over it by --overwrite"
        raise ArgumentError(expected("a directory without a table", of="--out", got=str(out / there[0]), do=do))


def _windows(arguments: argparse.Namespace) -> torch.Tensor:
    """The first ``--tokens`` of the text, in windows. Raises ``ArgumentError`` where they are fewer than one."""
    tokens = Tokenizer.from_folder(arguments.folder).encode(_text(Path(arguments.text)))
    if arguments.tokens < arguments.window:
        wanted, do = f"at least {arguments.window}, the tokens of a window", "give more, or a smaller --window"
        raise ArgumentError(expected(wanted, of="--tokens", got=arguments.tokens, do=do))
    if len(tokens) <= arguments.window:
        wanted, got = f"more than {arguments.window} tokens, a window", f"{len(tokens)} tokens"
        raise ArgumentError(expected(wanted, of="--text", got=got, do="give a longer text, or a smaller --window"))
    return token_windows(torch.tensor(tokens[: arguments.tokens + 1], device="cpu"), arguments.window)


def _text(path: Path) -> str:
    content = read_file(path, of=f"--text {path}", do="name a text file", error=ArgumentError, missing=ArgumentError)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ArgumentError(expected("a text in UTF-8", of="--text", got=f"{path}, whose byte {error.start} is none", do="convert it")) from None


_COLUMNS = "format", "perplexity", "KL, nats", "same token", "weights, MB", "tokens/s"


def _cells(name: str, quality: Quality) -> tuple[str, ...]:
    agreement, size = f"{100 * quality.agreement:.2f} %", f"{quality.nbytes / 1e6:,.1f}"
    return name, f"{quality.perplexity:.4f}", f"{quality.divergence:.2e}", agreement, size, f"{quality.tokens_per_second:.1f}"


def show(found: Mapping[str, Quality], title: str) -> None:
    """Print the table."""
    first, *others = _COLUMNS
    table = make_table(first, *(f">{name}" for name in others), title=title)
    for name, quality in found.items():
        table.add_row(*_cells(name, quality))
    make_console().print(table)


def as_markdown(found: Mapping[str, Quality]) -> str:
    """The table as a page has it."""
    rows = [_COLUMNS, ("---", *["---:"] * (len(_COLUMNS) - 1)), *(_cells(name, quality) for name, quality in found.items())]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
