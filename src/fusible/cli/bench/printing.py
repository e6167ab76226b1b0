"""Benchmarks as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape

from fusible.cli.bench.machine import Bound, Limits
from fusible.cli.bench.table import Measured, Row
from fusible.cli.console import make_table

__all__ = ["QUICK", "print_machine", "print_table"]

_BUSY = 0.5
_UNITS = {"products": "GFLOP/s", "bandwidth": "GB/s", "overhead": "us"}


def print_machine(machine: Mapping[str, Any], limits: Limits, console: Console) -> None:
    """What the figures are measured on, and the limits that shares are of."""
    memory = f", {machine['memory_bytes'] / 2**30:.0f} GiB" if machine["memory_bytes"] else ""
    kernels = f"native kernels of level {machine['level']}" if machine["level"] else "no native kernels"
    torch = f"torch {machine['torch']} of {machine['torch_level']}"
    console.print(f"{machine['cpu']}, {machine['cores']} cores{memory}; {machine['threads']} threads, {kernels}, {torch}.")
    console.print(f"At best here: matrix products {limits.gflops:.0f} GFLOP/s, reading {limits.gbytes:.1f} GB/s.")
    if machine["load"] and machine["load"] > _BUSY:
        busy = f"The load over the last minute was {machine['load']}: where others compute too, figures of several threads say little."
        console.print(busy)
    console.print()


QUICK = (
    "With --quick the sizes are those of a smoke test: what follows shows that every contestant runs. The times are of call overhead and noise, and "
    "the ratios say nothing of speed: do not quote them."
)


def print_table(name: str, title: str, measured: Measured, console: Console, *, judged: bool = True) -> None:
    """The rows, and the notes below them. ``judged``: say which targets are missed."""
    table = make_table(name, f">{measured.beside}", ">fusible", "", ">ratio", ">target", "bound by", title=f"{name}: {title}")
    for row in measured.rows:
        figures = (_figure(row.torch), _figure(row.fusible), row.unit, f"{row.ratio:.2f}", _target(row, judged))
        table.add_row(escape(row.what), *figures, _bound(row.bound))
    console.print(table)
    for note in measured.notes:
        console.print(f"  {note}", markup=False)
    console.print()


def _figure(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _target(row: Row, judged: bool) -> str:
    if row.target is None:
        return ""
    return f"{'missed ' if judged and not row.met else ''}{'<=' if row.unit == 'MB' else '>='} {row.target:.2f}"


def _bound(bound: Bound | None) -> str:
    if bound is None:
        return ""
    share = f", {100 * bound.share:.0f} %" if bound.share is not None else ""
    rate = f"{bound.rate:.1f}" if bound.rate < 100 else f"{bound.rate:.0f}"
    return f"{bound.by} {rate} {_UNITS[bound.by]}{share}"
