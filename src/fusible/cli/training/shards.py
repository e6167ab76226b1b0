"""Checkpoints that several processes write together, each its own shards, by ``torch.distributed.checkpoint``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from fusible.distributed import save_sharded
from fusible.files import Replacement, map_file, parse_json

if TYPE_CHECKING:
    from fusible.cli.training.ranks import Ranks

__all__ = ["Shards", "fingerprint_of", "save_together"]


class Shards(NamedTuple):
    """What this process has of the parameters of ``model``, and of an optimizer's ``moments`` by their kinds: as ``save_sharded`` takes them."""

    model: nn.Module
    parameters: Mapping[str, torch.Tensor]
    moments: Mapping[str, Mapping[str, torch.Tensor]]


def save_together(folder: Path, shards: Shards, ranks: Ranks, first: str, rest: Callable[[dict[str, Any]], dict[str, bytes]]) -> None:
    """Save into ``folder``, replacing the former checkpoint there as one step. Every process calls it; the first makes the checkpoint valid when all
    have written their shards.

    ``rest``: what else is written, by the names of files, told the fingerprints of the shards; ``first``: the file by whose name a folder is refused.
    Raises ``FileError``, in all, where the system refuses; the former checkpoint stays whole.
    """
    replacement: Replacement | None = None
    try:
        with ranks.telling():
            if ranks.first:
                replacement = Replacement(folder, first)
        saving = Replacement.place(folder)
        own = {name: fingerprint_of(map_file(saving / name)) for name in save_sharded(saving, *shards)}
        files = {
            name: fingerprint
            for of_rank in ranks.texts(json.dumps(own))
            for name, fingerprint in parse_json(of_rank, of="the shards of a rank").items()
        }
        with ranks.telling():
            if replacement is not None:
                replacement.complete(rest(files))
    except BaseException:
        if replacement is not None:
            replacement.abandon()
        raise


def fingerprint_of(content: Any) -> dict[str, Any]:
    """By what a manifest recognizes a file of that content."""
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
