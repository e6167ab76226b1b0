"""Subcommands, and where they are found."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

from fusible.cli import commands

__all__ = ["Command", "all_commands"]


@dataclass(frozen=True)
class Command:
    """One subcommand: a file in ``fusible.cli.commands`` that binds ``COMMAND``.

    ``arguments(parser)`` declares its options. ``job`` names the function that does the work, ``"module:function"``; it takes the parsed
    options and returns the exit code. It is imported when the command is run, so that ``fusible --help`` does not wait for torch. Where the options
    choose among several, ``job`` gives the name for them.
    """

    name: str
    summary: str
    description: str
    arguments: Callable[[argparse.ArgumentParser], None]
    job: str | Callable[[argparse.Namespace], str]

    def run(self, options: argparse.Namespace) -> int:
        """Load the job and do it."""
        name = self.job if isinstance(self.job, str) else self.job(options)
        module, function = name.split(":")
        return getattr(importlib.import_module(module), function)(options)


def all_commands() -> list[Command]:
    """Every command, by name."""
    modules = [importlib.import_module(f"{commands.__name__}.{found.name}") for found in pkgutil.iter_modules(commands.__path__)]
    return sorted((module.COMMAND for module in modules), key=lambda command: command.name)
