"""A program that trains one step of NVIDIA's modules on tex, with its imports and choices in the order that it is told; prints what came of it.

``python te_orders.py ORDER``, of the words below joined by commas.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from contextlib import suppress
from types import ModuleType
from typing import Any

import torch

from fusible import compat, tex


def attempt() -> None:
    """Import the package while nobody has its kernels: it refuses, or warns and is there without its part for torch."""
    with warnings.catch_warnings(), suppress(RuntimeError):
        warnings.simplefilter("ignore")
        importlib.import_module("transformer_engine")
    assert "transformer_engine.pytorch" not in sys.modules


def install() -> None:
    compat.install()


def again() -> None:
    """Take the names back and give them anew."""
    compat.uninstall()
    compat.install()


def choose() -> None:
    tex.set_backend("torch")


def load() -> None:
    importlib.import_module("transformer_engine.pytorch")


STEPS = {step.__name__: step for step in (attempt, install, again, choose, load)}


def train(te: ModuleType) -> dict[str, Any]:
    torch.manual_seed(0)
    recipe = importlib.import_module("transformer_engine.common.recipe").Float8CurrentScaling()
    model = te.LayerNormMLP(32, 64, activation="swiglu")
    operations = te.ops.Sequential(te.ops.RMSNorm(32), te.ops.Linear(32, 32))
    optimizer = te.optimizers.FusedAdam([*model.parameters(), *operations.parameters()], lr=1e-2)
    losses = []
    with tex.record() as calls:
        for _ in range(2):
            x = torch.randn(16, 32, device="cuda")
            with te.autocast(recipe=recipe):
                loss = operations(model(x)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return {"losses": losses, "calls": sorted({(call.function, call.backend) for call in calls})}


if __name__ == "__main__":
    with compat.cuda_on_cpu():
        for word in sys.argv[1].split(","):
            STEPS[word]()
        print(json.dumps(train(importlib.import_module("transformer_engine.pytorch"))))
