"""The ways that torch has for a model and its optimizer: ``way(pair, fresh pair, path) -> the pair that goes on``, or None for the fresh one."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from fusible.pytorch.checkpoint import LoadPlanner

Pair = tuple[nn.Module, torch.optim.Optimizer]


def _state_dict(old: Pair, new: Pair, path: Path) -> None:
    for mine, theirs in zip(old, new, strict=True):
        theirs.load_state_dict(mine.state_dict())


def _file(old: Pair, new: Pair, path: Path) -> None:
    torch.save([part.state_dict() for part in old], path / "both.pt")
    for part, state in zip(new, torch.load(path / "both.pt", weights_only=True), strict=True):
        part.load_state_dict(state)


def _by_names(**options: bool) -> Callable[[Pair, Pair, Path], None]:
    def way(old: Pair, new: Pair, path: Path) -> None:
        chosen = StateDictOptions(**options)
        model, optimizer = get_state_dict(*old, options=chosen)
        set_state_dict(*new, model_state_dict=model, optim_state_dict=optimizer, options=chosen)

    return way


def _dcp(old: Pair, new: Pair, path: Path) -> None:
    dcp.save(dict(zip("ab", get_state_dict(*old), strict=True)), checkpoint_id=path / "dcp", no_dist=True)
    state = dict(zip("ab", get_state_dict(*new), strict=True))
    dcp.load(state, checkpoint_id=path / "dcp", no_dist=True, planner=LoadPlanner())
    set_state_dict(*new, model_state_dict=state["a"], optim_state_dict=state["b"])


def _deepcopy(old: Pair, new: Pair, path: Path) -> Pair:
    return copy.deepcopy(old)


def _pickle(old: Pair, new: Pair, path: Path) -> Pair:
    file = io.BytesIO()
    torch.save(old, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


WAYS: dict[str, Callable[[Pair, Pair, Path], Any]] = {
    "state_dict": _state_dict,
    "torch.save": _file,
    "get_state_dict": _by_names(),
    "flat": _by_names(flatten_optimizer_state_dict=True),
    "full": _by_names(full_state_dict=True, cpu_offload=True),
    "dcp": _dcp,
    "deepcopy": _deepcopy,
    "pickle": _pickle,
}
