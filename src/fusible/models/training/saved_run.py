"""The state of a run on a disk: tensors in safetensors and a manifest in JSON, replaced as one, and nothing that is unpickled.

The manifest holds what the caller says, of the other files their sizes and SHA-256, and the SHA-256 of all that. So a file that is missing, cut
short, altered or of another save is recognized before anything of it is used.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from fusible.errors import CheckpointError, expected
from fusible.files import Replacement, locate, map_file, parse_json, put, read_file
from fusible.models.checkpoints.header import CODES, read_header
from fusible.models.checkpoints.shard_writer import bytes_of
from fusible.models.training.shards import Shard, is_shard, join_shards

__all__ = ["MANIFEST", "file_pieces", "fingerprint", "has_run", "load_run", "read_manifest", "save_run", "sealed"]

MANIFEST = "training.json"
_SEAL, _FILES = "sha256", "files"
_LIMIT = 2**28
"""Bytes of a manifest: a line for the loss of each step, and the rest."""
_PIECE = 1 << 26
_INTACT = "use an intact checkpoint"


def has_run(folder: Path) -> bool:
    """Whether a run was saved in ``folder``."""
    return os.path.lexists(locate(folder, MANIFEST))


def save_run(folder: Path, said: Mapping[str, Any], tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Write a run's ``tensors``, by file and name, and what its manifest says, replacing the former state in ``folder`` as one step.

    The tensors are written as they are, one behind the other, without a copy of all. Raises ``FileError`` where the system refuses; the former state
    stays whole then, as it does where the process is killed.
    """
    replacement = Replacement(folder, MANIFEST)
    try:
        files = {name: _written(replacement, name, of_file) for name, of_file in tensors.items()}
        replacement.complete({MANIFEST: sealed(said, files)})
    except BaseException:
        replacement.abandon()
        raise


def sealed(said: Mapping[str, Any], files: Mapping[str, Any]) -> bytes:
    """The content of a manifest that says so, of files with these sizes and SHA-256."""
    manifest = {**said, _FILES: dict(files)}
    return json.dumps({**manifest, _SEAL: _seal(manifest)}, indent=1, allow_nan=False).encode()


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a saved run says. Raises ``CheckpointError`` where it is not what was saved."""
    path = locate(folder, MANIFEST)
    manifest = parse_json(read_file(path, limit=_LIMIT, do="name the --out of a run that was saved"), of=str(path))
    seal = manifest.pop(_SEAL, None) if isinstance(manifest, dict) else None
    if seal is None or seal != _seal(manifest):
        raise CheckpointError(expected("the content that was saved", of=str(path), got="an altered one", do=_INTACT))
    return manifest


def load_run(folder: Path, manifest: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a saved run, by name, whole where several processes each wrote parts. Raises ``CheckpointError`` where they are not those that
    were saved."""
    found: dict[str, torch.Tensor] = {}
    shards: dict[str, Shard] = {}
    for name, told in manifest[_FILES].items():
        if Path(name).name != name:
            raise CheckpointError(expected("files beside it", of=str(locate(folder, MANIFEST)), got=repr(name), do=_INTACT))
        content = _content(path := locate(folder, name), told)
        tensors = _tensors(content, path)
        if is_shard(name):
            shards[name] = Shard(content, tensors)
        else:
            found |= tensors
    return {**found, **join_shards(folder, shards)}


def fingerprint(path: Path) -> str:
    """The SHA-256 of a file."""
    return hashlib.sha256(map_file(path)).hexdigest()


def _seal(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _written(replacement: Replacement, name: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Write one file of safetensors and flush it to the disk; its size and SHA-256."""
    digest, size = hashlib.sha256(), 0
    with replacement.file(name) as stream:
        for piece in file_pieces(tensors):
            put(stream, piece)
            digest.update(piece)
            size += len(piece)
    return {"bytes": size, "sha256": digest.hexdigest()}


def file_pieces(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> Iterator[bytes | memoryview]:
    """The bytes of a file of safetensors: the header, padded so that tensors begin at multiples of 8, then tensors, those of large elements first."""
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in ordered:
        header[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        content = bytes_of(tensor)
        for first in range(0, content.numel(), _PIECE):
            yield content[first : first + _PIECE].numpy().data


def _content(path: Path, told: Mapping[str, Any]) -> Any:
    content = map_file(path, do="use a whole checkpoint")
    if len(content) != told["bytes"]:
        raise CheckpointError(expected(f"{told['bytes']} bytes", of=str(path), got=len(content), do=_INTACT))
    if hashlib.sha256(content).hexdigest() != told["sha256"]:
        raise CheckpointError(expected("the content that was saved", of=str(path), got="an altered one", do=_INTACT))
    return content


def _tensors(content: Any, path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, entry in read_header(content, path).entries.items():
        if entry.numel:
            flat = torch.frombuffer(content, dtype=torch.uint8, count=entry.nbytes, offset=entry.start)
            found[name] = flat.clone().view(entry.dtype).view(entry.shape)
        else:
            found[name] = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
    return found
