"""Which job ``fusible train`` does: the demo, or the training of a model of the user's. Imports no torch: the help reads it."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from fusible.cli.finetuning.options import OWN, FinetuneOptions
from fusible.cli.run_files import has_model_run
from fusible.cli.training.options import TrainOptions
from fusible.errors import ArgumentError, expected

__all__ = ["job_of"]

_DEMO, _MODEL = "fusible.cli.training.job:train", "fusible.cli.finetuning.job:finetune"
_COMMON = frozenset(("steps", "seq_len", "batch", "lr", "decay_steps", "seed", "recipe"))
_OF_PROCESSES: dict[str, Any] = {"context_parallel": 1, "context_way": "all_to_all", "pipeline_parallel": 1}
"""Options of the demo alone that are always there, with what they are where nobody gives them."""


def job_of(arguments: argparse.Namespace) -> str:
    """The function that does it. Raises ``ArgumentError`` for options of the one beside the other."""
    values = vars(arguments)
    saved = arguments.resume is not None and has_model_run(Path(arguments.resume))
    if "model" not in values and not saved:
        for name in OWN:
            if name in values and name not in _COMMON:
                raise ArgumentError(expected("--model with it", of=FinetuneOptions.flag(name), got="none", do="name a model, or leave it out"))
        return _DEMO
    demo = {field.name for field in fields(TrainOptions)} - _COMMON | {"microbatches"}
    wrong = [name for name in sorted(demo) if name in values] + [name for name, value in _OF_PROCESSES.items() if values.get(name, value) != value]
    if wrong:
        got, do = "it beside --model", "leave it out: it is for the model that --model is not given for"
        raise ArgumentError(expected("no such option", of=FinetuneOptions.flag(wrong[0]), got=got, do=do))
    return _MODEL
