"""Converted models, and parts of them, that another process reads from a pickle."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from convert_families import BY_NAME, RECIPES

import fusible

READ = """
import pickle, sys
import torch

with open(sys.argv[1], "rb") as opened:
    model, inputs, wanted = pickle.load(opened)
with torch.no_grad():
    assert torch.equal(model(**inputs)[0], wanted)
"""
"""What knows nothing of transformers and of Fusible but what a pickle names."""


@pytest.mark.parametrize("kind", ["a part of a model", "a model of which the attention alone is converted"])
def test_a_process_that_has_converted_nothing_computes_by_what_it_reads(kind: str, tmp_path: Path) -> None:
    """Of GPT-2, in which nothing is joined."""
    model: Any = BY_NAME["gpt2"].make()
    inputs = {name: value for name, value in BY_NAME["gpt2"].inputs().items() if name != "labels"}
    if kind == "a part of a model":
        model = fusible.convert(model, RECIPES["current"]).transformer
    else:
        fusible.convert(model, include=lambda _, module: module is model)
        assert [layer.kind for layer in fusible.conversion_report(model).converted] == ["attention"]
    with torch.no_grad():
        wanted = model(**inputs)[0]
    (tmp_path / "pickle").write_bytes(pickle.dumps((model, inputs, wanted)))
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", READ, tmp_path / "pickle"], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
