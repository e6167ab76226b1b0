"""The consoles that commands print to."""

from __future__ import annotations

import sys
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

__all__ = ["make_console", "make_table"]

_PIPED_WIDTH = 160


def make_console(stream: TextIO | None = None) -> Console:
    """A console on ``stream`` (default: standard output): coloured and as wide as a terminal, or plain and of fixed width."""
    output: TextIO = stream or sys.stdout
    width = None if output.isatty() else _PIPED_WIDTH
    return Console(file=output, width=width, highlight=False, soft_wrap=False)


def make_table(*columns: str, title: str | None = None) -> Table:
    """An empty table with these columns. A column named ``">name"`` is right-aligned."""
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left", overflow="fold")
    return table
