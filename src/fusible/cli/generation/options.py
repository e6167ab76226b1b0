"""Mistakes of the Python API, said of the options of a command line."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from fusible.errors import ArgumentError, expected, subject
from fusible.models.generation import Sampling

__all__ = ["check_counts", "named_as_options", "sampling_of"]


@contextmanager
def named_as_options() -> Iterator[None]:
    """Errors about the argument ``top_k`` are about ``--top-k``."""
    try:
        yield
    except ArgumentError as error:
        text = str(error)
        if error.argument is None or subject(text) != error.argument:
            raise
        raise ArgumentError(text.replace(error.argument, f"--{error.argument.replace('_', '-')}", 1)) from None


def check_counts(counts: Mapping[str, int | None]) -> None:
    """Raise ``ArgumentError`` for a number below 1, by its option."""
    for option, value in counts.items():
        if value is not None and value < 1:
            raise ArgumentError(expected("at least 1", of=option, got=value, do="give a larger number"))


def sampling_of(arguments: argparse.Namespace, default: Sampling) -> Sampling:
    """What the command line says, and ``default`` for what it does not."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    with named_as_options():
        return replace(default, **{name: value for name in names if (value := getattr(arguments, name)) is not None})
