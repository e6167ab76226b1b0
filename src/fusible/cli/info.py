"""``fusible info``: the backends, kernels, versions and settings on this machine."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
from typing import Any

import torch
from rich.console import Console

from fusible import __version__, tex
from fusible.cli.console import make_console, make_table
from fusible.errors import FusibleError
from fusible.knobs import KNOBS
from fusible.machine import cpu_model
from fusible.tex.backends import cpu

__all__ = ["collect", "info", "native_kernels", "show", "show_coverage"]

_PACKAGES = ("torch", "jaxlib", "numpy", "triton", "transformer_engine")


def info(arguments: argparse.Namespace) -> int:
    """The job of ``fusible info``."""
    if arguments.tex:
        return _tex(arguments.json)
    facts = collect()
    if arguments.json:
        print(json.dumps(facts, indent=1))
    else:
        show(facts, make_console())
    return 0


def _tex(as_json: bool) -> int:
    covered = tex.coverage()
    if as_json:
        print(json.dumps({"tex": covered}, indent=1))
    else:
        show_coverage(covered, make_console())
    return 0


def show_coverage(covered: dict[str, dict[str, str | None]], console: Console) -> None:
    """Print the result of ``tex.coverage()``: a row per function, a column per backend, and the numbered reasons below."""
    backends = list(next(iter(covered.values()), {}))
    reasons: dict[str, int] = {}
    table = make_table("function", *backends)
    for name, row in covered.items():
        words = ("yes" if reason is None else str(reasons.setdefault(reason, len(reasons) + 1)) for reason in row.values())
        table.add_row(name.replace("prim_", "prim."), *words)
    console.print(table)
    for reason, number in reasons.items():
        console.print(f"{number}: {reason}")
    served = sum(None in row.values() for row in covered.values())
    console.print(f"{served} of {len(covered)} functions are served here, for some arguments at least")


def collect() -> dict[str, Any]:
    """Versions, threads, CPU, native kernels, backends and environment variables, as an object of JSON."""
    return {
        "fusible": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "cpu": {"model": cpu_model(), "cores": os.cpu_count(), "capability": torch.backends.cpu.get_cpu_capability()},
        "cuda": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "threads": torch.get_num_threads(),
        "native": native_kernels(),
        "backends": _backends(),
        "environment": _environment(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def native_kernels() -> dict[str, Any]:
    """The facts about the native kernels, or why there are none."""
    try:
        return cpu.info()
    except FusibleError as error:
        return {"available": False, "reason": str(error)}


def _backends() -> dict[str, Any]:
    """``found``: the result of ``tex.list_backends()``. ``error``: why the backend that the environment asks for cannot be used, or None. ``failed``:
    the plugins that did not load, each with its reason."""
    failed = tex.registry.failed_plugins()
    try:
        return {"found": tex.list_backends(), "error": None, "failed": failed}
    except FusibleError as error:
        return {"found": [], "error": str(error), "failed": failed}


def _environment() -> list[dict[str, Any]]:
    """A dict per variable that Fusible reads: its name, text or None, the values that it takes, its meaning, and the error in its text or None."""
    rows = []
    for name, knob in KNOBS.items():
        try:
            knob.get()
            error = None
        except FusibleError as problem:
            error = str(problem)
        rows.append({"name": name, "set": knob.text, "takes": knob.takes, "meaning": knob.doc, "error": error})
    return rows


def show(facts: dict[str, Any], console: Console) -> None:
    """Print the result of ``collect``."""
    versions = ", ".join(f"{name} {version or 'not installed'}" for name, version in facts["packages"].items())
    cpu, native = facts["cpu"], facts["native"]
    table = make_table("what", "found")
    table.add_row("fusible", f"{facts['fusible']}, Python {facts['python']}, {facts['platform']}")
    table.add_row("packages", versions)
    table.add_row("CPU", f"{cpu['model']}, {cpu['cores']} cores, {cpu['capability']}, torch uses {facts['threads']} threads")
    table.add_row("GPU", ", ".join(facts["cuda"]) or "none that torch can use")
    for name, value in native.items():
        table.add_row(f"native {name.replace('_', ' ')}", _words(value))
    console.print(table)
    _show_backends(facts["backends"], console)
    _show_environment(facts["environment"], console)


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(name for name, there in value.items() if there) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(str(item) for item in value) or "none"
    return str(value) or "-"


def _show_backends(backends: dict[str, Any], console: Console) -> None:
    table = make_table("backend", "vendor", ">priority", "state", "why not")
    for row in backends["found"]:
        state = "in force" if row["current"] else "available" if row["available"] else "unavailable"
        table.add_row(row["name"], row["vendor"], str(row["priority"]), state, row["reason"] or "")
    console.print(table)
    for plugin, reason in backends["failed"].items():
        console.print(f"{plugin} did not load: {reason}")
    if backends["error"]:
        console.print(f"The environment's choice cannot be followed: {backends['error']}")


def _show_environment(rows: list[dict[str, Any]], console: Console) -> None:
    table = make_table("variable", "set to", "takes", "meaning")
    for row in rows:
        table.add_row(row["name"], "-" if row["set"] is None else repr(row["set"]), row["takes"], row["error"] or row["meaning"])
    console.print(table)
