"""Frameworks that know Transformer Engine, as their users install them, under ``fusible run --device cpu``: they train, in 8 bits for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).with_name("programs")


def trained(program: str, *arguments: str, options: tuple[str, ...] = ()) -> dict[str, Any]:
    """What a program prints last: its ``losses``, how many ``linears`` of Transformer Engine's it has, and the ``products`` of quantized operands.
    ``options``: of ``fusible run``."""
    command = [sys.executable, "-m", "fusible", "run", "--device", "cpu", *options, str(PROGRAMS / program), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def check_quantized(found: dict[str, Any], plain: dict[str, Any], first: int = 0) -> None:
    """Three products a linear layer and step, all of quantized operands, and the losses of the same model in bf16, to some roundings of 8 bits.
    ``first``: layers that get data, which has no gradient."""
    steps = len(plain["losses"])
    assert plain["products"] == 0 < found["linears"] and found["products"] == (3 * found["linears"] - first) * steps
    assert found["losses"][-1] < found["losses"][0]
    assert max(abs(a / b - 1) for a, b in zip(found["losses"], plain["losses"], strict=True)) < 0.03


@pytest.fixture(scope="module")
def in_bf16() -> dict[str, dict[str, Any]]:
    """By model, what it comes to in bf16: made once."""
    return {}


@pytest.mark.parametrize("mode", ["delayed", "e4m3", "mxfp8"])
@pytest.mark.parametrize("model", ["llama", "gpt2", "qwen3", "mixtral"])
def test_accelerate_trains_models_of_transformers(model: str, mode: str, in_bf16: dict[str, dict[str, Any]]) -> None:
    if model not in in_bf16:
        in_bf16[model] = trained("accelerate_model.py", model, "bf16")
    check_quantized(trained("accelerate_model.py", model, mode), in_bf16[model])


def test_lightning_trains_with_its_plugin() -> None:
    plain = trained("lightning_model.py", "auto", "bf16-mixed")
    check_quantized(trained("lightning_model.py", "gpu", "transformer-engine"), plain, first=1)


WITHOUT = ("--replace-package",)
"""NVIDIA's package is as if it were not there: its modules are Fusible's."""


@pytest.mark.parametrize("mode", ["delayed", "mxfp8"])
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_accelerate_trains_without_nvidias_package(model: str, mode: str) -> None:
    plain = trained("accelerate_model.py", model, "bf16", options=WITHOUT)
    check_quantized(trained("accelerate_model.py", model, mode, options=WITHOUT), plain)


def test_lightning_trains_without_nvidias_package() -> None:
    plain = trained("lightning_model.py", "auto", "bf16-mixed", options=WITHOUT)
    check_quantized(trained("lightning_model.py", "gpu", "transformer-engine", options=WITHOUT), plain, first=1)
