"""Whole tensors of the shards that several processes wrote by ``torch.distributed.checkpoint``, each what it has."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fusible.errors import CheckpointError, expected
from fusible.files import locate, parse_json

__all__ = ["Shard", "is_shard", "join_shards"]

_SHARD = re.compile(r"shard-\d{5}-model-00001-of-00001\.safetensors")
_PIECES = "DCP_SHARDING_INFO"
"""The entry of a shard's header that says where its tensors begin in the whole ones."""


class Shard(NamedTuple):
    """A file's ``content``, which is known to be one of safetensors, and the ``tensors`` in it."""

    content: Any
    tensors: Mapping[str, torch.Tensor]


def is_shard(name: str) -> bool:
    """Whether a file of that name is one of several processes'."""
    return _SHARD.fullmatch(name) is not None


def join_shards(folder: Path, shards: Mapping[str, Shard]) -> dict[str, torch.Tensor]:
    """Whole tensors of the pieces in ``shards``, by the names of files in ``folder``. Raises ``CheckpointError`` where some are missing."""
    pieces: dict[str, list[tuple[list[int], torch.Tensor]]] = defaultdict(list)
    for file, (content, tensors) in shards.items():
        begins = _begins(folder, file, content)
        for name, tensor in tensors.items():
            pieces[name].append((begins[name], tensor))
    return {name: _whole(f"{name} in {folder}", of_name) for name, of_name in pieces.items()}


def _whole(of: str, pieces: Sequence[tuple[list[int], torch.Tensor]]) -> torch.Tensor:
    dimensions, dtype = {piece.ndim for _, piece in pieces}, pieces[0][1].dtype
    if len(dimensions) > 1 or any(piece.dtype != dtype for _, piece in pieces):
        raise CheckpointError(expected("pieces of one tensor", of=of, got="others", do="use an intact checkpoint"))
    places = [[(begin, begin + size) for begin, size in zip(begins, piece.shape, strict=True)] for begins, piece in pieces]
    shape = [max(stop for _, stop in along) for along in zip(*places, strict=True)]
    if math.prod(shape) != sum(piece.numel() for _, piece in pieces):
        raise CheckpointError(expected("all of it", of=of, got="some pieces", do="use an intact checkpoint"))
    whole = torch.zeros(shape, dtype=dtype, device="cpu")
    for place, (_, piece) in zip(places, pieces, strict=True):
        whole[tuple(slice(*along) for along in place)] = piece
    return whole


def _begins(folder: Path, name: str, content: Any) -> dict[str, list[int]]:
    """Where the tensors of a shard begin in the whole ones."""
    of = str(locate(folder, name))
    header = parse_json(content[8 : 8 + int.from_bytes(content[:8], "little")], of=of)
    about = header.pop("__metadata__", {}) if isinstance(header, dict) else {}
    places = parse_json(about.get(_PIECES, "{}"), of=of)
    found: dict[str, Any] = (
        {tensor: place.get("saved_offsets") for tensor, place in places.items() if isinstance(place, dict)} if isinstance(places, dict) else {}
    )
    if found.keys() != header.keys() or not all(_is_place(begins, header[tensor]["shape"]) for tensor, begins in found.items()):
        raise CheckpointError(expected("a place for each tensor", of=of, got="others", do="use an intact checkpoint"))
    return found


def _is_place(begins: Any, shape: Sequence[int]) -> bool:
    return isinstance(begins, list) and len(begins) == len(shape) and all(type(begin) is int and begin >= 0 for begin in begins)
