"""Random calls between guard pages give what float64 gives, at every level and on one thread and two."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from generated_calls import GENERATORS


def _sweep(first: int, count: int) -> dict[str, int]:
    program = Path(__file__).with_name("generated_calls.py")
    finished = subprocess.run([sys.executable, str(program), str(first), str(count)], capture_output=True, text=True, check=False, timeout=900)
    assert finished.returncode == 0, f"seed {finished.stderr.rsplit(chr(13), 1)[-1]}: exit {finished.returncode}"
    assert "wrong" not in finished.stdout, finished.stdout
    return {name: int(number) for name, number in re.findall(r"^(\w+) (\d+)$", finished.stdout, flags=re.MULTILINE)}


def test_some_calls_of_each_function_are_right() -> None:
    right = _sweep(0, 600)
    assert sum(right.values()) == 600
    assert right.keys() == GENERATORS.keys()


@pytest.mark.slow
def test_many_calls_of_each_function_are_right() -> None:
    right = _sweep(1_000_000, 45_000)
    print(right)
    assert sum(right.values()) == 45_000
    assert min(right.values()) > 2_000
