"""The options of a benchmark, as a value that refuses illegal combinations. Imports no torch: the command line's help reads it."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from fusible.cli.lists import check_names, names_in
from fusible.errors import ArgumentError, expected
from fusible.knobs import CPU_LEVELS

__all__ = ["BenchOptions", "TABLES"]

TABLES = {
    "casts": "to FP8 and back",
    "gemm": "matrix products of FP8 operands",
    "formats": "casts to every number format, and products in it",
    "matvec": "an FP8 weight and a few rows of bfloat16",
    "producers": "norms, activations, attention and Adam",
    "training": "steps of an MLP and of a GPT, and their memory",
    "recipes": "the same steps under every recipe, beside delayed scaling",
    "generation": "tokens of a decoder of 1.1 billion parameters",
    "peers": "the same decoder beside llama.cpp, where it is installed",
}
"""The tables in their order, and what each is of. The module of a table is named as it is, and so is the function in it that measures."""


@dataclass(frozen=True)
class BenchOptions:
    """What is measured. ``json`` is a path, ``"-"`` for standard output, or None; ``threads`` None stands for two, or fewer where there are fewer;
    ``level`` is that of the CPU that is measured, or None for the best that it has."""

    tables: tuple[str, ...] = tuple(TABLES)
    rounds: int = 9
    quick: bool = False
    threads: int | None = None
    json: str | None = None
    level: str | None = None

    def __post_init__(self) -> None:
        check_names(self.tables, TABLES, "--only")
        for flag, value in {"--rounds": self.rounds, "--threads": self.threads}.items():
            if value is not None and value < 1:
                raise ArgumentError(expected("at least 1", of=flag, got=value, do="give a larger number"))
        if self.level is not None and self.level not in CPU_LEVELS:
            raise ArgumentError(expected(f"one of {', '.join(CPU_LEVELS)}", of="--level", got=repr(self.level), do="name one of these"))
        self._check_file()

    def _check_file(self) -> None:
        """Find out before minutes are spent that the figures cannot be written."""
        if self.json in (None, "-"):
            return
        path = Path(self.json)
        if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
            raise ArgumentError(expected("a file that can be written", of="--json", got=self.json, do="name another"))

    @classmethod
    def from_command_line(cls, arguments: argparse.Namespace) -> Self:
        """The options of the parsed command line; each table once, in the order of ``TABLES``."""
        asked = TABLES if arguments.only is None else list(names_in(arguments.only, "--only"))
        order = [*TABLES, *asked]
        tables = tuple(sorted(set(asked), key=order.index))
        return cls(tables, arguments.rounds, arguments.quick, arguments.threads, arguments.json, arguments.level)

    def command_line(self) -> list[str]:
        """The words that ask for these options."""
        found = ["bench", "--only", ",".join(self.tables), "--rounds", str(self.rounds), *(["--quick"] if self.quick else [])]
        for flag, value in {"--threads": self.threads, "--json": self.json, "--level": self.level}.items():
            found += [] if value is None else [flag, str(value)]
        return found

    @property
    def threads_used(self) -> int:
        """The threads that torch and the native kernels get."""
        return self.threads or min(2, os.cpu_count() or 1)
