"""The table ``training``: whole steps, and the memory that they take."""

from __future__ import annotations

import torch

from fusible.cli.bench.memory import peak_memory
from fusible.cli.bench.models import CONTESTANTS, MODELS, Step, describe_model, make_step, plain_dtype, work_of
from fusible.cli.bench.table import Case, Measured, Row, Settings

__all__ = ["training"]

_TARGETS = {"mlp": {"torch": 1 / 0.9, "torch compiled": 1.0}, "gpt": {"torch": 1.0, "torch compiled": 1.0}}
"""At most 0.9 of eager torch's time for the MLP, and otherwise no more than torch's."""
_LONG = ("torch compiled", "current")
"""Contestants whose memory is not measured in a quick run."""


def training(settings: Settings) -> Measured:
    """Steps in FP8, by delayed and by current scaling, beside torch's, eager and compiled, in the dtype of ``plain_dtype``; then the peak of the
    memory that steps take."""
    measured = Measured()
    if plain_dtype() is torch.float32:
        measured.notes.append("Torch computes in float32 here, in which its products are several times as fast as in bfloat16.")
    for model in MODELS:
        measured.rows += settings.measure(_cases(model, settings.quick, measured))
    for model in ("mlp",) if settings.quick else MODELS:
        _memory(model, settings, measured)
    return measured


def _cases(model: str, quick: bool, measured: Measured) -> list[Case]:
    what = describe_model(model, quick)
    steps = {name: make_step(model, name, quick) for name in CONTESTANTS if not (quick and name == "torch compiled")}
    if quick:
        measured.notes.append(f"{what}: torch.compile is left out of --quick.")
    elif reason := _refused(steps["torch compiled"]):
        measured.notes.append(f"{what}: torch.compile is left out, for it fails: {reason}")
        del steps["torch compiled"]
    targets = _TARGETS[model]
    theirs = [name for name in steps if name in targets]
    flops = work_of(model, quick)
    return [
        Case(f"{what}: {ours}, beside {name}", steps[name], steps[ours], targets[name], flops=flops)
        for name in theirs
        for ours in steps
        if ours not in targets
    ]


def _refused(step: Step) -> str | None:
    """Why a compiled step cannot be taken, or None."""
    try:
        step()
    except Exception as error:  # a compiler fails in ways of its own
        torch.compiler.reset()
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no reason given'])[0]}"
    return None


def _memory(model: str, settings: Settings, measured: Measured) -> None:
    what = describe_model(model, settings.quick)
    contestants = [name for name in CONTESTANTS if not (settings.quick and name in _LONG)]
    peaks = {name: peak_memory(model, name, settings.threads, settings.quick) for name in contestants}
    for name, peak in peaks.items():
        if isinstance(peak, str):
            measured.notes.append(f"{what}: the memory of {name} is left out: {peak}")
    found = {name: peak / 1e6 for name, peak in peaks.items() if not isinstance(peak, str)}
    theirs = [name for name in found if name in _TARGETS[model]]
    for name in theirs:
        for ours in found:
            if ours not in theirs:
                measured.rows.append(Row(f"{what}: memory, {ours}, beside {name}", "MB", found[name], found[ours], 1.0))
