"""docs/clients.md, as the tests of clients declare it: a row for each that is marked ``client``."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["PAGE", "Row", "declared", "text"]

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "clients.md"


@dataclass(frozen=True)
class Row:
    """What one test holds of one client. ``clients``: names of packages. ``works``: "yes", or "no: " and why not."""

    test: str
    clients: tuple[str, ...]
    feature: str
    recipes: tuple[str, ...]
    command: str
    works: str

    def printed(self, versions: Mapping[str, str], works: str) -> str:
        numbers = ", ".join(versions[client] for client in self.clients)
        cells = [" with ".join(self.clients), numbers, self.feature, ", ".join(self.recipes) or "-", works.replace("|", "\\|"), f"`{self.command}`"]
        return f"| {' | '.join(cells)} |"


def row(test: str, *clients: str, feature: str, command: str, recipes: Iterable[str] = (), works: str = "yes") -> Row:
    """What a mark says: its arguments are these, but for the name of the test."""
    return Row(test, clients, feature, tuple(recipes), command, works)


def declared() -> list[Row]:
    """The rows of all marked tests, file by file."""
    found = []
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        module = importlib.import_module(path.stem)
        for name, function in vars(module).items():
            for mark in getattr(function, "pytestmark", ()):
                if mark.name == "client":
                    found.append(row(f"{path.name}::{name}", *mark.args, **mark.kwargs))
    return found


def versions() -> dict[str, str]:
    """By package, the version that the environment of these tests is made with: those that the Makefile names."""
    return dict(re.findall(r"([\w-]+)==([\w.]+)", (ROOT / "Makefile").read_text()))


def text(rows: Iterable[Row], failures: Mapping[str, str] = {}) -> str:
    """The page. ``failures``: by test, why it failed."""
    known = versions()
    lines = [line.printed(known, f"no: {failures[line.test]}" if line.test in failures else line.works) for line in rows]
    return _HEAD.format(torch=known["torch"]) + "\n".join(sorted(lines, key=_order)) + "\n" + _FOOT


def _order(line: str) -> Any:
    """By client, and as they come within one."""
    return line.split("|")[1].strip().lower()


_HEAD = """\
# Clients

Frameworks and programs that know Transformer Engine, unmodified, beside Fusible on a machine without a GPU: torch {torch} as the registry gives it,
the clients in the versions below, models of a few layers from a seed. The tests of `tests/clients` write this page (`make clients-page`), and fail
where it says something else than they do (`make test-clients`).

In a row that works each of its recipes trains. Under a recipe of 8 bits and fewer, every product of a linear layer is one of quantized operands,
counted in each step, and the losses are those of the same program in bf16 to within 3 % of the first. A command is the one that the test runs, with
your program as `train.py`.

| client | version | feature | recipes | works | command |
|---|---|---|---|---|---|
"""

_FOOT = """
Each command takes more for itself. `--capability 10.0` after `fusible run` is a GPU on which MXFP8 is NVIDIA's default recipe; `--replace-package`
puts Fusible's own modules in the place of NVIDIA's package, as they are where that is not installed. What is served, and how, is in
[NVIDIA's names](compat.md).
"""
