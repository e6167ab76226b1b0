"""``fusible check-backend``: the conformance suite on one backend, as a table."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console

from fusible.cli.console import make_console, make_table
from fusible.cli.lists import names_in
from fusible.conformance import Agreement, check_backend
from fusible.conformance.table import FLOATS
from fusible.errors import ArgumentError, expected

__all__ = ["check", "show"]

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}


def check(given: argparse.Namespace) -> int:
    """The job of ``fusible check-backend``: 1 where something is wrong, else 0."""
    functions = None if given.only is None else list(names_in(given.only, "--only"))
    dtypes = _dtypes(given.dtype)
    _check_device(given.device)
    rows = list(check_backend(given.name, functions, dtypes, given.device))
    wrong = any(row.wrong for row in rows)
    if given.json:
        print(json.dumps({"backend": given.name, "agrees": not wrong, "rows": [asdict(row) for row in rows]}, indent=1))
    else:
        show(given.name, rows, make_console())
    return int(wrong)


def _dtypes(text: str | None) -> list[torch.dtype] | None:
    if text is None:
        return None
    names = names_in(text, "--dtype")
    unknown = [name for name in names if name not in _DTYPES]
    if unknown:
        raise ArgumentError(expected(" or ".join(_DTYPES), of="--dtype", got=", ".join(unknown), do="name some of these"))
    return [_DTYPES[name] for name in names]


def _check_device(name: str) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError):
        raise ArgumentError(expected("a device that torch has here", of="--device", got=repr(name), do="name another, such as cpu")) from None


def show(name: str, rows: list[Agreement], console: Console) -> None:
    """Print a table of the rows, and what they come to."""
    table = make_table("function", "dtype", ">samples", ">from float64", ">from torch", "verdict", "why", title=f"backend {name}")
    for row in rows:
        shares: Any = ("-" if share is None else f"{share:.2f}" for share in (row.float64, row.reference))
        table.add_row(row.function, row.dtype, str(row.samples), *shares, row.verdict, row.detail)
    console.print(table)
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in dict.fromkeys(row.verdict for row in rows)}
    console.print(f"{len({row.function for row in rows})} functions: {', '.join(f'{n} {verdict}' for verdict, n in counts.items()) or 'nothing'}")
