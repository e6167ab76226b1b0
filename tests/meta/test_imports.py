"""What importing a room brings with it, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"torch", "jaxlib", "jax", "matplotlib", "rich", "triton"}


@pytest.mark.parametrize(
    ("statement", "may"),
    [
        ("import fusible", set()),
        ("import fusible.lazy", set()),
        ("import fusible.errors, fusible.knobs", set()),
        ("from fusible.cli.main import main", set()),
        ("import fusible.tex", {"torch", "triton"}),
        ("import transformer_engine_fl_torch", {"torch", "triton"}),
        ("import fusible.pytorch", {"torch", "triton"}),
        ("from fusible import Sequential", {"torch", "triton"}),
    ],
)
def test_an_import_brings_no_more_than_it_needs(statement: str, may: set[str]) -> None:
    code = f"import sys\n{statement}\nprint(*sorted({HEAVY!r} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) <= may
