"""The table ``recipes``: training steps under the recipes of blocks, beside delayed scaling."""

from __future__ import annotations

from fusible.cli.bench.models import MODELS, describe_model, make_step, work_of
from fusible.cli.bench.table import Case, Measured, Settings

__all__ = ["recipes"]

_TARGETS = {"bf16": None, "current": None, "block": 1 / 1.1, "mxfp8": 1 / 1.1, "nvfp4": 1 / 1.5}
"""Block and MXFP8 take at most 1.1 times the step of tensor-scaled FP8, NVFP4 at most 1.5 times."""


def recipes(settings: Settings) -> Measured:
    """Steps of the models of ``training`` under each recipe, beside the same under delayed scaling."""
    measured = Measured(beside="delayed")
    for model in MODELS:
        delayed = make_step(model, "delayed", settings.quick)
        what, flops = describe_model(model, settings.quick), work_of(model, settings.quick)
        steps = {name: make_step(model, name, settings.quick) for name in _TARGETS}
        measured.rows += settings.measure([Case(f"{what}: {name}", delayed, step, _TARGETS[name], flops=flops) for name, step in steps.items()])
    return measured
