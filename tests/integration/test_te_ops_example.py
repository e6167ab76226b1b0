"""The example of fusible operations: it trains under each recipe without NVIDIA's package, and as that package does where it is installed."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys

import pytest
from doc_pages import ROOT
from te_names_hidden import HIDE

EXAMPLE = ROOT / "examples" / "te_ops.py"
RECIPES = ["bf16", "delayed", "current", "block", "mxfp8", "nvfp4", "custom"]


def losses(*options: str, before: str = "") -> dict[str, list[float]]:
    """By recipe: what ``fusible run`` of the example in a process of its own prints. Every forward pass must be the fused one."""
    words = ["run", *options, str(EXAMPLE)]
    program = f"{before}\nfrom fusible.cli.main import main\nraise SystemExit(main({words!r}))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stderr == "", done.stderr[-4000:]
    found = {}
    for line in done.stdout.splitlines():
        match = re.fullmatch(r"(\w+) +((?:\d\.\d{4} ){10})\(10 fused passes\)", line)
        assert match, line
        found[match[1]] = [float(number) for number in match[2].split()]
    return found


@pytest.fixture(scope="module")
def ours() -> dict[str, list[float]]:
    return losses(before=f"{HIDE}\nimport importlib.util\nassert importlib.util.find_spec('transformer_engine') is None")


def test_the_loss_falls_under_each_recipe_without_nvidias_package(ours: dict[str, list[float]]) -> None:
    assert list(ours) == RECIPES
    for name, found in ours.items():
        assert found == sorted(found, reverse=True) and found[-1] < 0.95 * found[0], name
        assert name == "bf16" or found != ours["bf16"], name


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="NVIDIA's Python package is not installed")
def test_nvidias_package_trains_alike(ours: dict[str, list[float]]) -> None:
    theirs = losses("--device", "cpu")
    assert list(theirs) == RECIPES
    # Both round the block's output to bf16; what they round within, weights and activations in few bits, moves a mean over 2**15 squares by less.
    for name in RECIPES:
        assert ours[name] == pytest.approx(theirs[name], rel=2.0**-9), name
