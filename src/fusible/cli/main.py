"""``main``: from the words of the command line to a command, and from an exception to a sentence and an exit code."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from fusible import __version__
from fusible.cli.command import Command, all_commands
from fusible.errors import FusibleError

__all__ = ["main"]

_DONE, _USER_ERROR, _INTERRUPTED = 0, 2, 130


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence."""

    def error(self, message: str) -> NoReturn:
        sentence = message[:1].upper() + message[1:]
        self.exit(_USER_ERROR, f"{sentence.rstrip('.')}: see '{self.prog} --help'.\n")


def _parser(commands: Sequence[Command]) -> argparse.ArgumentParser:
    parser = _Parser(prog="fusible", description="8-bit training and inference of transformers on every machine.")
    parser.add_argument("--version", action="version", version=f"fusible {__version__}")
    choices = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for command in commands:
        own = choices.add_parser(command.name, help=command.summary, description=command.description, allow_abbrev=False)
        command.arguments(own)
        own.set_defaults(run=command.run, parser=own)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: this process's) and return the exit code: 0, 2 for a user's error, 130 when interrupted.

    An error is one sentence on the standard error stream. ``--help`` and malformed options raise ``SystemExit``, as argparse does.
    """
    options, unknown = _parser(all_commands()).parse_known_args(argv)
    if unknown:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return options.run(options)
    except FusibleError as error:
        print(error, file=sys.stderr)
        return _USER_ERROR
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _DONE
    except OSError as error:
        print(f"Could not use {error.filename or 'a file'}: {error.strerror or error}.", file=sys.stderr)
        return _USER_ERROR
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return _INTERRUPTED
