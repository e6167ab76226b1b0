"""The subcommands, one file each: every module here binds ``COMMAND`` (``fusible.cli.command.Command``)."""

from __future__ import annotations
