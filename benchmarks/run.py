"""``make bench``: runs every table, prints it, and writes it as JSON with the machine it was measured on."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import executors, experts, lazy_compiler, overhead, processes
from fusible.cli.bench.machine import describe_machine
from fusible.machine import keep_freed_memory

__all__ = ["main"]

TABLES: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "dispatch": overhead.dispatch,
    "small_sequential": overhead.small_sequential,
    "small_decoder": overhead.small_decoder,
    "grouped_gemm": experts.grouped_gemm,
    "router": experts.router,
    "executors": executors.executors,
    "processes": processes.processes,
    "lazy_recording": lazy_compiler.lazy_recording,
    "lazy_calls": lazy_compiler.lazy_calls,
    "lazy_gpt2": lazy_compiler.lazy_gpt2,
}


def show(console: Console, name: str, doc: str, rows: list[dict[str, Any]]) -> None:
    """Print one table."""
    table = Table(title=name, caption=doc, title_justify="left", caption_justify="left")
    for column in rows[0]:
        table.add_column(column, justify="left" if isinstance(rows[0][column], str) else "right")
    for row in rows:
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("tables", nargs="*", choices=[[], *TABLES], help="the tables to run (default: all)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    keep_freed_memory()
    console = Console()
    results: dict[str, Any] = {"machine": describe_machine()}
    for name in options.tables or TABLES:
        results[name] = TABLES[name]()
        show(console, name, (TABLES[name].__doc__ or "").splitlines()[0], results[name])
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
