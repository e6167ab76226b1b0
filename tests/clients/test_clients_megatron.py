"""Megatron-core with its Transformer Engine layers, as its users launch it: in every recipe, and in two processes by each of its ways to share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("programs") / "megatron_model.py"
RECIPES: dict[str, dict[str, Any]] = {
    "delayed": {"fp8": "hybrid", "fp8_recipe": "delayed"},
    "tensorwise": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
    "mxfp8": {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
}
DENSE: dict[str, Any] = {}
EXPERTS: dict[str, Any] = {"experts": 4}
ALONE: dict[str, dict[str, Any]] = {
    "bf16": DENSE,
    **RECIPES,
    "experts bf16": EXPERTS,
    # Megatron's own checkpoints of grouped layers want what delayed scaling alone has.
    **{f"experts {name}": {**EXPERTS, **recipe, "saved": name == "delayed"} for name, recipe in RECIPES.items()},
}
"""By name, the runs of one process."""
SHARED: dict[str, dict[str, Any]] = {
    "data bf16": DENSE,
    "tensor bf16": {"tensor": 2},
    **{f"tensor {name}": {"tensor": 2, **recipe} for name, recipe in RECIPES.items()},
    **{f"context {kind}": {"context": 2, "more": {"cp_comm_type": kind}} for kind in ("p2p", "a2a", "all_gather")},
    "context mxfp8": {"context": 2, "more": {"cp_comm_type": "p2p"}, **RECIPES["mxfp8"]},
    "expert bf16": {**EXPERTS, "expert": 2},
    **{f"expert {name}": {**EXPERTS, "expert": 2, **RECIPES[name], "saved": name == "delayed"} for name in ("delayed", "mxfp8")},
}
"""Those of two."""


def trained(processes: int, runs: dict[str, dict[str, Any]], capability: str) -> dict[str, dict[str, Any]]:
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), str(PROGRAM), json.dumps(list(runs.values()))]
    command = [sys.executable, "-m", "fusible", "run", "--device", "cpu", "--capability", capability, *launch]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, env=environment)
    assert done.returncode == 0, done.stderr[-6000:]
    return dict(zip(runs, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    return trained(1, ALONE, "10.0")


@pytest.fixture(scope="module")
def shared() -> dict[str, dict[str, Any]]:
    return trained(2, SHARED, "10.0")


def check(found: dict[str, Any], plain: dict[str, Any]) -> None:
    """Three products a layer and step, all of quantized operands where there is a recipe, and the losses of bf16 to some roundings of 8 bits."""
    steps = len(plain["losses"])
    assert plain["products"] == 0 < found["linears"] == plain["linears"] and found["products"] == 3 * found["linears"] * steps
    assert found["losses"][-1] < found["losses"][0]
    assert max(abs(a / b - 1) for a, b in zip(found["losses"], plain["losses"], strict=True)) < 0.03


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["", "experts "], ids=["dense", "experts"])
def test_a_model_trains_in_8_bits(alone: dict[str, dict[str, Any]], kind: str, recipe: str) -> None:
    check(alone[f"{kind}{recipe}"], alone[f"{kind}bf16"])


@pytest.mark.parametrize("run", [name for name in SHARED if name.startswith(("tensor ", "expert ")) and not name.endswith("bf16")])
def test_two_processes_train_in_8_bits(shared: dict[str, dict[str, Any]], run: str) -> None:
    check(shared[run], shared[f"{run.split()[0]} bf16"])


@pytest.mark.parametrize("kind", ["p2p", "a2a", "all_gather"])
def test_two_processes_that_share_sequences_train_as_one(
    alone: dict[str, dict[str, Any]], shared: dict[str, dict[str, Any]], kind: str
) -> None:
    """The model and its data are those of one process: the losses differ by roundings to bf16, at most 2^-8 each."""
    one, two = alone["bf16"]["losses"], shared[f"context {kind}"]["losses"]
    assert max(abs(a / b - 1) for a, b in zip(one, two, strict=True)) < 2**-8
    check(shared["context mxfp8"], shared["context p2p"])
