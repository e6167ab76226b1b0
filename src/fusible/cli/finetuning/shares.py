"""How several processes share the training of a model: what can be shared out, and what they must have alike."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import torch

from fusible import __version__
from fusible.cli.finetuning.data import Data
from fusible.cli.finetuning.options import FinetuneOptions
from fusible.cli.training.ranks import Layout
from fusible.errors import ArgumentError, expected
from fusible.models import LanguageModel
from fusible.quantized import QuantizedTensor

__all__ = ["check_shares", "facts_of"]


def check_shares(options: FinetuneOptions, layout: Layout) -> None:
    """Raise ``ArgumentError`` for a run that cannot be shared out so."""
    if options.batch % layout.batches:
        wanted = f"a multiple of {layout.batches}, the processes that share it"
        raise ArgumentError(expected(wanted, of="--batch", got=options.batch, do="give another size or number of processes"))
    windows = options.batch // layout.batches
    if options.micro_batch is not None and windows % options.micro_batch:
        wanted = f"a divisor of the {windows} windows of each process"
        raise ArgumentError(expected(wanted, of="--micro-batch", got=options.micro_batch, do="choose another"))
    rows = (options.micro_batch or windows) * options.seq_len
    if layout.sequence and rows % layout.tensor:
        wanted = f"a multiple of {layout.tensor}, the processes that share it"
        raise ArgumentError(expected(wanted, of="--micro-batch times --seq-len", got=rows, do="give another size or number of processes"))
    shared = [("--shard-parameters", layout.shard), ("--tensor-parallel", layout.tensor > 1), ("--expert-parallel", layout.experts > 1)]
    beside = [flag for flag, on in shared if on]
    if options.lora and beside:
        of, do = "--lora on several processes", "leave one of them out"
        raise ArgumentError(expected("--data-parallel alone", of=of, got=beside[0], do=do))
    if options.device != "cpu" and layout != Layout():
        raise ArgumentError(expected("cpu", of="--device on several processes", got=repr(options.device), do="leave it out, or start one process"))


def facts_of(options: FinetuneOptions, layout: Layout, data: Data, base: Mapping[str, str], model: LanguageModel, done: int) -> dict[str, str]:
    """What every process must have alike after ``done`` steps, each as a text that can be shown."""
    fixed = {name: str(value) for name, value in vars(options).items() if name not in options.CHANGED or name in ("steps", "merge")}
    versions = {"version of fusible": __version__, "version of torch": torch.__version__}
    told = {
        "steps that are done": str(done),
        "layout": repr(layout),
        "data": json.dumps(data.described),
        "weights": _digest(model),
        "weights beneath": json.dumps(dict(base)),
    }
    return {**versions, **fixed, **told}


def _digest(model: LanguageModel) -> str:
    """Of the parameters that are held as plain tensors."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, QuantizedTensor):
            digest.update(f"{name} {list(parameter.shape)} {torch.hash_tensor(parameter.detach()).item()}".encode())
    return digest.hexdigest()
