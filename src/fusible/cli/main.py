"""``main``: from the words of the command line to a command, and from an exception to a sentence and an exit code."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from fusible import __version__
from fusible.cli.command import Command, all_commands
from fusible.errors import FusibleError, expected
from fusible.knobs import FUSIBLE_RETURN_MEMORY
from fusible.machine import keep_freed_memory

__all__ = ["main"]

_DONE, _USER_ERROR, _INTERRUPTED = 0, 2, 130


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence."""

    def error(self, message: str) -> NoReturn:
        sentence = message[:1].upper() + message[1:]
        self.exit(_USER_ERROR, _short(f"{sentence.rstrip('.')}: see '{self.prog} --help'.\n"))


def _parser(commands: Sequence[Command]) -> argparse.ArgumentParser:
    parser = _Parser(prog="fusible", description="8-bit training and inference of transformers on every machine.")
    parser.add_argument("--version", action="version", version=f"fusible {__version__}")
    choices = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for command in commands:
        own = choices.add_parser(command.name, help=command.summary, description=command.description, allow_abbrev=False)
        command.arguments(own)
        own.set_defaults(run=command.run, parser=own)
    return parser


def _short(text: str) -> str:
    """The sentence with long words shortened: a path or a value that would fill the screen keeps its first 60 and last 2 characters."""
    return re.sub(r"(\S{60})\S{200,}?(\S{2})(?=\s)", r"\1...\2", text)


def _drop_output() -> None:
    """Discard buffered output. The interpreter would try to write it again at exit, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: this process's) and return the exit code: 0, 2 for a user's error, 130 when interrupted.

    An error is one sentence on the standard error stream. ``--help`` and malformed options raise ``SystemExit``, as argparse does.
    """
    options, unknown = _parser(all_commands()).parse_known_args(argv)
    if unknown:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        if argv is None and not FUSIBLE_RETURN_MEMORY.get():  # the process is the command's
            keep_freed_memory()
        code = options.run(options)
        sys.stdout.flush()  # a full disk is reported here, and not when the interpreter exits
        return code
    except FusibleError as error:
        print(_short(str(error)), file=sys.stderr)
        return _USER_ERROR
    except BrokenPipeError:
        _drop_output()
        return _DONE
    except OSError as error:
        # fusible.files reads and writes every file and names it in errors. So an error without a name is of the standard output.
        of, got = error.filename or "the standard output", error.strerror or error
        print(_short(expected("room and permission to write", of=of, got=got, do="name another place")), file=sys.stderr)
        if not error.filename:
            _drop_output()
        return _USER_ERROR
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return _INTERRUPTED
