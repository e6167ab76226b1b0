"""The command line: ``fusible <command>``. A command is a file in ``commands``; its work is loaded when it is run."""

from __future__ import annotations

from fusible.cli.main import main

__all__ = ["main"]
