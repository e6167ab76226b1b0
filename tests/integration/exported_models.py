"""How far a model and its exported form may be apart, and running what was exported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

__all__ = ["FORMATS", "RUNNING", "bound", "elsewhere"]

import fusible
from fusible.models.weight_formats import WEIGHT_FORMATS

FORMATS: dict[str, fusible.Recipe | None] = {name: WEIGHT_FORMATS[name] for name in ("bf16", "fp8", "block", "mxfp8", "nvfp4")}
"""The recipes by the names of the formats in which they hold weights; "bf16" stands for weights as they are."""

_SUMS = 512
"""More than the numbers that are summed up in one product of these models, times the products one behind another."""


def bound(logits: torch.Tensor) -> float:
    """Both are in fp32, and sum the same numbers in another order."""
    return _SUMS * torch.finfo(torch.float32).eps * logits.abs().max().item()


RUNNING = {
    "program": "run = torch.export.load(sys.argv[1]).module()",
    "package": "run = torch._inductor.aoti_load_package(sys.argv[1])",
}
"""What makes a function of a file of each kind."""

_PROGRAM = """
import sys
import torch
{made}
with torch.no_grad():
    logits = [run(tokens) for tokens in torch.load(sys.argv[2])]
torch.save(logits, sys.argv[3])
assert "fusible" not in sys.modules
"""


def elsewhere(kind: str, path: Path, tokens: list[torch.Tensor]) -> list[torch.Tensor]:
    """The logits of a file, computed by another process, which knows nothing of Fusible."""
    given, found = path.with_suffix(".given"), path.with_suffix(".found")
    torch.save(tokens, given)
    command = [sys.executable, "-c", _PROGRAM.format(made=RUNNING[kind]), str(path), str(given), str(found)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return torch.load(found)
