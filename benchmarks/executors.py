"""A training step by both executors, beside torch's two ways."""

from __future__ import annotations

import gc
from typing import Any

from fusible.cli.bench.models import MODELS, describe_model, make_step
from fusible.cli.bench.timing import side_by_side

__all__ = ["executors"]

CONTESTANTS = {
    "torch eager": ("torch", "eager"),
    "torch.compile": ("torch compiled", "eager"),
    **{f"{contestant} {executor}": (contestant, executor) for contestant in ("bf16", "delayed", "current", "mxfp8") for executor in ("eager", "xla")},
}


def executors() -> list[dict[str, Any]]:
    """Milliseconds of a training step: torch in bf16, eager and compiled, and Fusible in bf16, FP8 and MXFP8 by each of its executors. No target."""
    rows = []
    for model in MODELS:
        steps = {name: make_step(model, contestant, False, executor) for name, (contestant, executor) in CONTESTANTS.items()}
        times = side_by_side(steps, rounds=7)
        rows.append({"model": describe_model(model, False), **{name: seconds * 1e3 for name, seconds in times.items()}})
        gc.collect()
    return rows
