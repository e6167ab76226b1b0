"""``fusible bench``: measures the tables that were asked for, prints each when it is done, and writes all as JSON."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from fusible import __version__
from fusible.cli.bench.machine import Limits, describe_machine, measure_limits
from fusible.cli.bench.options import TABLES, BenchOptions
from fusible.cli.bench.printing import QUICK, print_machine, print_table
from fusible.cli.bench.table import Measured, Settings
from fusible.cli.bench.timing import using_threads
from fusible.cli.console import make_console
from fusible.cli.info import native_kernels
from fusible.errors import ArgumentError, expected
from fusible.files import replace_file
from fusible.knobs import is_held_to, of_level, with_variables

__all__ = ["bench"]


def bench(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code.

    The JSON has ``fusible`` (the version), ``machine`` (``describe_machine``), ``limits`` (``Limits``), ``options`` (``rounds``, ``quick``), with
    ``--quick`` a ``note`` that says what the figures are not, and ``tables``: by name ``title``, ``rows`` (the fields of ``Row``, ``ratio`` and
    ``met``) and ``notes``.
    """
    options = BenchOptions.from_command_line(arguments)
    if options.level is not None and not is_held_to(options.level):
        return _at_level(options, options.level)
    console = make_console(sys.stderr if options.json == "-" else None)
    with using_threads(options.threads_used):
        machine = describe_machine()
        with console.status("what the machine can do"):
            limits = measure_limits(options.quick)
        report = _head(options, machine, limits)
        print_machine(machine, limits, console)
        if options.quick:
            console.print(f"{QUICK}\n")
        settings = Settings(options.rounds, options.quick, options.threads_used, limits)
        for name in options.tables:
            with console.status(name):
                measured = _measure(name, settings)
            print_table(name, TABLES[name], measured, console, judged=not options.quick)
            report["tables"][name] = {"title": TABLES[name], **measured.to_json()}
            if options.json not in (None, "-"):
                replace_file(Path(options.json), f"{json.dumps(report, indent=1)}\n".encode())
    if options.json == "-":
        print(json.dumps(report, indent=1))
    return 0


def _at_level(options: BenchOptions, level: str) -> int:
    """Run the command in a process of its own: libraries ask once, at the start, which instructions they may use."""
    usable = native_kernels().get("levels_usable", [])
    if level not in usable:
        wanted = f"one of {', '.join(usable)}" if usable else "native kernels"
        raise ArgumentError(expected(wanted, of="--level", got=level, do="name one of this CPU's"))
    return subprocess.run([sys.executable, "-m", "fusible", *options.command_line()], env=with_variables(of_level(level)), check=False).returncode


def _head(options: BenchOptions, machine: dict[str, Any], limits: Limits) -> dict[str, Any]:
    return {
        "fusible": __version__,
        "machine": machine,
        "limits": {"gflops": limits.gflops, "gbytes": limits.gbytes},
        "options": {"rounds": options.rounds, "quick": options.quick},
        **({"note": QUICK} if options.quick else {}),
        "tables": {},
    }


def _measure(name: str, settings: Settings) -> Measured:
    torch.manual_seed(0)
    return getattr(importlib.import_module(f"fusible.cli.bench.{name}"), name)(settings)
