"""What ``fusible info`` shows."""

from __future__ import annotations

import io
import json

from rich.console import Console

from fusible import tex
from fusible.cli import main
from fusible.cli.info import show, show_coverage
from fusible.knobs import KNOBS

FACTS = {
    "fusible": "0.1.0",
    "python": "3.11.7",
    "platform": "Linux-x86_64",
    "packages": {"torch": "2.13.0", "jaxlib": None},
    "cpu": {"model": "A processor", "cores": 2, "capability": "AVX2"},
    "cuda": [],
    "threads": 2,
    "native": {"available": True, "reason": "", "cpu_features": {"avx2": True, "avx512f": False}, "levels": ["generic", "avx2"]},
    "backends": {
        "found": [
            {"name": "cpu", "vendor": "Fusible", "priority": 50, "available": False, "reason": "it was not built", "current": False},
            {"name": "torch", "vendor": "PyTorch", "priority": 0, "available": True, "reason": None, "current": True},
        ],
        "error": None,
        "failed": {"the plugin moore": "ImportError: no driver"},
    },
    "environment": [{"name": "TE_BACKEND", "set": "torch", "takes": "a name", "meaning": "forces a backend", "error": None}],
}


def test_the_tables_are_readable_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    show(FACTS, Console(file=stream, width=100))
    lines = [" ".join(line.split()) for line in stream.getvalue().splitlines() if line.strip()]
    assert [line for line in lines if "─" not in line] == [
        "what found",
        "fusible 0.1.0, Python 3.11.7, Linux-x86_64",
        "packages torch 2.13.0, jaxlib not installed",
        "CPU A processor, 2 cores, AVX2, torch uses 2 threads",
        "GPU none that torch can use",
        "native available yes",
        "native reason -",
        "native cpu features avx2",
        "native levels generic, avx2",
        "backend vendor priority state why not",
        "cpu Fusible 50 unavailable it was not built",
        "torch PyTorch 0 in force",
        "the plugin moore did not load: ImportError: no driver",
        "variable set to takes meaning",
        "TE_BACKEND 'torch' a name forces a backend",
    ]
    assert "\x1b" not in stream.getvalue()


def test_json_is_one_object_with_every_backend_and_every_variable(capsys) -> None:
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["backends"] == {"found": tex.list_backends(), "error": None, "failed": {}}
    assert [row["name"] for row in facts["environment"]] == list(KNOBS)
    assert facts["native"]["available"] in (True, False)


def test_a_variable_that_cannot_be_read_is_shown_not_raised(capsys, monkeypatch) -> None:
    monkeypatch.setenv("FUSIBLE_NUM_THREADS", "many")
    assert main(["info", "--json"]) == 0
    rows = {row["name"]: row["error"] for row in json.loads(capsys.readouterr().out)["environment"]}
    assert rows["FUSIBLE_NUM_THREADS"] == (
        "the environment variable FUSIBLE_NUM_THREADS: expected a number of threads up to 1024, got 'many'; set it so or unset it."
    )
    assert main(["info"]) == 0


def test_every_tex_function_is_shown_with_who_serves_it_and_why_others_do_not(capsys) -> None:
    assert main(["info", "--tex", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"tex": tex.coverage()}
    stream = io.StringIO()
    covered = {"gelu": {"cpu": None, "torch": None}, "prim_add": {"cpu": "not implemented by it", "torch": None}, "x": {"cpu": "a", "torch": "a"}}
    show_coverage(covered, Console(file=stream, width=100))
    lines = [" ".join(line.split()) for line in stream.getvalue().splitlines() if line.strip()]
    assert [line for line in lines if "─" not in line] == [
        "function cpu torch",
        "gelu yes yes",
        "prim.add 1 yes",
        "x 2 2",
        "1: not implemented by it",
        "2: a",
        "2 of 3 functions are served here, for some arguments at least",
    ]
