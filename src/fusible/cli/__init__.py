"""The command line: ``fusible <command>``. A command is a file in ``commands``; the code that does its work is imported when it runs."""

from __future__ import annotations

from fusible.cli.main import main

__all__ = ["main"]
