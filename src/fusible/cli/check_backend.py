"""``fusible check-backend``: runs the conformance suite on a backend, or shows what it serves or how it differs from NVIDIA's module."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console

from fusible import tex
from fusible.cli.console import make_console, make_table
from fusible.cli.devices import device_named
from fusible.cli.lists import names_in
from fusible.conformance import Agreement, Difference, check_backend, compare_backend, compare_module, coverage_of, markdown, read_inventory
from fusible.conformance.table import FLOATS
from fusible.errors import ArgumentError, expected
from fusible.tex.interface.declare import DECLARATIONS

__all__ = ["check", "show", "show_differences"]

_MODULE = "tex"
"""The name for the module ``tex`` instead of a backend."""

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}


def check(arguments: argparse.Namespace) -> int:
    """The job of ``fusible check-backend``: 1 where something is wrong, else 0."""
    functions = None if arguments.only is None else list(names_in(arguments.only, "--only"))
    dtypes = _dtypes(arguments.dtype)
    device_named(arguments.device)
    if arguments.te_version is not None and not arguments.inventory:
        raise ArgumentError(expected("--inventory", of="--te-version", got="none", do="give both, or neither"))
    if arguments.inventory:
        return _inventory(arguments, functions)
    if arguments.matrix:
        return _matrix(arguments, functions, dtypes)
    rows = list(check_backend(arguments.name, functions, dtypes, arguments.device))
    wrong = any(row.wrong for row in rows)
    if arguments.json:
        print(json.dumps({"backend": arguments.name, "agrees": not wrong, "rows": [asdict(row) for row in rows]}, indent=1))
    else:
        show(arguments.name, rows, make_console())
    return int(wrong)


def _inventory(arguments: argparse.Namespace, functions: list[str] | None) -> int:
    version = read_inventory(arguments.te_version).version
    known = {*read_inventory(version).all, *DECLARATIONS, *dir(tex)}
    unknown = sorted(name for name in functions or () if name.partition(".")[0] not in known)
    if unknown:
        what = f"names of transformer_engine_torch {version} or of tex"
        raise ArgumentError(expected(what, of="--only", got=", ".join(unknown), do="look them up in dir(tex)"))
    rows = compare_module(tex, version) if arguments.name == _MODULE else compare_backend(arguments.name, version)
    rows = [row for row in rows if functions is None or row.name in functions]
    wrong = any(row.wrong for row in rows)
    if arguments.json:
        made = [{**asdict(row), "wrong": row.wrong} for row in rows]
        print(json.dumps({"backend": arguments.name, "version": version, "agrees": not wrong, "rows": made}, indent=1))
    else:
        asked = len(read_inventory(version).all) if functions is None else len(dict.fromkeys(functions))
        show_differences(arguments.name, version, rows, make_console(), asked)
    return int(wrong)


def _matrix(arguments: argparse.Namespace, functions: list[str] | None, dtypes: list[torch.dtype] | None) -> int:
    rows = list(coverage_of(arguments.name, functions, dtypes, arguments.device))
    made = {"backend": arguments.name, "rows": [asdict(row) for row in rows]}
    print(json.dumps(made, indent=1) if arguments.json else markdown(arguments.name, rows))
    return 0


def show_differences(name: str, version: str, rows: list[Difference], console: Console, asked: int) -> None:
    """Print a table of the differences, and their counts, among as many names as were ``asked`` for."""
    table = make_table("name", "what", "detail", "why", title=f"{name} beside transformer_engine_torch {version}")
    for row in rows:
        table.add_row(row.name, row.kind, row.detail, row.why or "no known reason")
    console.print(table)
    counts = {kind: sum(row.kind == kind for row in rows) for kind in dict.fromkeys(row.kind for row in rows)}
    listed = ", ".join(f"{n} {kind}" for kind, n in counts.items()) or "no difference"
    console.print(f"{asked} {'name' if asked == 1 else 'names'}: {listed}; {sum(row.wrong for row in rows)} for no known reason")


def _dtypes(text: str | None) -> list[torch.dtype] | None:
    if text is None:
        return None
    names = names_in(text, "--dtype")
    unknown = [name for name in names if name not in _DTYPES]
    if unknown:
        raise ArgumentError(expected(" or ".join(_DTYPES), of="--dtype", got=", ".join(unknown), do="name some of these"))
    return [_DTYPES[name] for name in names]


def show(name: str, rows: list[Agreement], console: Console) -> None:
    """Print a table of the rows, and their counts."""
    table = make_table("function", "dtype", ">samples", ">from float64", ">from torch", "verdict", "why", title=f"backend {name}")
    for row in rows:
        shares: Any = ("-" if share is None else f"{share:.2f}" for share in (row.float64, row.reference))
        table.add_row(row.function, row.dtype, str(row.samples), *shares, row.verdict, row.detail)
    console.print(table)
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in dict.fromkeys(row.verdict for row in rows)}
    console.print(f"{len({row.function for row in rows})} functions: {', '.join(f'{n} {verdict}' for verdict, n in counts.items()) or 'nothing'}")
