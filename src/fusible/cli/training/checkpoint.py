"""A checkpoint of a run: ``model.safetensors``, ``state.safetensors`` and ``state.json``, and nothing that is unpickled.

``state.json`` holds the options, the losses so far, and of the other files their sizes and SHA-256; its own last entry is the SHA-256 of the
rest. So a file that is missing, cut short, altered or of another save is recognized before anything of it is used.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from fusible.cli.training.memory import parameter_count
from fusible.cli.training.options import MAX_STEPS, RECIPES, TrainOptions
from fusible.cli.training.record import Record
from fusible.errors import CheckpointError, expected
from fusible.files import locate, parse_json, read_file, replace_files

__all__ = ["CHECKPOINT_FILES", "Checkpoint", "Manifest", "has_checkpoint", "load_checkpoint", "read_manifest", "save_checkpoint"]

_MODEL, _STATE, _MANIFEST = CHECKPOINT_FILES = ("model.safetensors", "state.safetensors", "state.json")
_FORMAT = {"format": "fusible train", "version": 1}
_SEAL = "sha256"
_MANIFEST_LIMIT = 2**20 + 32 * MAX_STEPS
"""Bytes of ``state.json``: a line for each loss, and the rest."""

_TENSORS_SLACK = 2**20
"""Bytes per layer, and once more, for the rest of a file: names, shapes and the scaling state."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Everything needed to resume. ``model``: its ``state_dict``, with the scaling state. ``state``: optimizer moments and the random generator.

    ``replaces``: the seals of the checkpoints that it replaces, in any folder of their command. They count as removed from the moment that this one
    is complete.
    """

    options: TrainOptions
    recipe: str
    text: dict[str, Any]
    record: Record
    model: Mapping[str, torch.Tensor]
    state: Mapping[str, torch.Tensor]
    replaces: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Manifest:
    """The checked content of ``state.json``. ``seal`` identifies it."""

    options: TrainOptions
    recipe: str
    text: dict[str, Any]
    record: Record
    files: dict[str, dict[str, Any]]
    replaces: tuple[str, ...]
    seal: str


def has_checkpoint(folder: Path) -> bool:
    """Whether a run was saved in ``folder``."""
    return any(os.path.lexists(locate(folder, name)) for name in CHECKPOINT_FILES)


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Save into ``folder``, replacing the former checkpoint there as one step.

    Raises ``FileError`` where the system refuses; the former checkpoint stays whole.
    """
    about = {"options": checkpoint.options.to_json(), "recipe": checkpoint.recipe}
    model = save_tensors(_plain(checkpoint.model), {"fusible": json.dumps({"model": "ByteGPT", **about}, sort_keys=True)})
    state = save_tensors(_plain(checkpoint.state))
    manifest = {**_FORMAT, **about, "text": checkpoint.text, "record": checkpoint.record.to_json()}
    manifest["files"] = {name: _fingerprint(content) for name, content in ((_MODEL, model), (_STATE, state))}
    if checkpoint.replaces:
        manifest["replaces"] = list(checkpoint.replaces)
    manifest[_SEAL] = _seal(manifest)
    text = json.dumps(manifest, indent=1, allow_nan=False).encode()
    replace_files(folder, {_MODEL: model, _STATE: state, _MANIFEST: text})


def load_checkpoint(folder: Path, manifest: Manifest | None = None) -> Checkpoint:
    """Read and check all of a checkpoint. Raises ``CheckpointError`` for one that is not whole, or not of this program."""
    said = read_manifest(folder) if manifest is None else manifest
    slack = _TENSORS_SLACK * (1 + said.options.layers)
    parameters = parameter_count(said.options)
    model = _read_tensors(folder, _MODEL, said.files[_MODEL], 4 * parameters + slack)
    state = _read_tensors(folder, _STATE, said.files[_STATE], 8 * parameters + slack)
    return Checkpoint(said.options, said.recipe, said.text, said.record, model, state, said.replaces)


def read_manifest(folder: Path) -> Manifest:
    """Read and check ``state.json`` alone. Raises ``CheckpointError`` where it is not one."""
    path = locate(folder, _MANIFEST)
    manifest = parse_json(read_file(path, limit=_MANIFEST_LIMIT, do="use a whole checkpoint"), of=str(path))
    seal = manifest.pop(_SEAL, None) if isinstance(manifest, dict) else None
    if seal is None or seal != _seal(manifest):
        raise CheckpointError(expected("the content that was saved", of=str(path), got="an altered one", do="use an intact checkpoint"))
    if any(manifest.get(key) != value for key, value in _FORMAT.items()):
        got = f"{manifest.get('format')!r} version {manifest.get('version')!r}"
        raise CheckpointError(expected("a checkpoint of 'fusible train' version 1", of=str(path), got=got, do="use the program that saved it"))
    _check_entries(manifest, path)
    try:
        options, record = TrainOptions.from_json(manifest["options"]), Record.from_json(manifest["record"])
    except CheckpointError as error:
        raise CheckpointError(expected("legal entries", of=str(path), got=f"others ({error})", do="use an intact checkpoint")) from None
    return Manifest(options, manifest["recipe"], manifest["text"], record, manifest["files"], tuple(manifest.get("replaces", ())), seal)


def _check_entries(manifest: dict[str, Any], path: Path) -> None:
    fields = {"options": dict, "recipe": str, "text": dict, "record": dict, "files": dict}
    known = {*_FORMAT, *fields, "replaces"}
    wrong = [name for name, kind in fields.items() if not isinstance(manifest.get(name), kind)]
    wrong += sorted(set(manifest) - known)
    if not wrong and (set(manifest["files"]) != {_MODEL, _STATE} or not all(map(_is_fingerprint, manifest["files"].values()))):
        wrong.append("files")
    replaced = manifest.get("replaces", [])
    if not isinstance(replaced, list) or not all(isinstance(seal, str) for seal in replaced):
        wrong.append("replaces")
    if not wrong and not _is_text(manifest["text"]):
        wrong.append("text")
    if wrong or manifest["recipe"] not in RECIPES:
        raise CheckpointError(expected("legal entries", of=str(path), got=f"another {', '.join(wrong) or 'recipe'}", do="use an intact checkpoint"))


def _read_tensors(folder: Path, name: str, fingerprint: dict[str, Any], limit: int) -> dict[str, torch.Tensor]:
    path = locate(folder, name)
    content = read_file(path, limit=limit, do="use a whole checkpoint")
    if len(content) != fingerprint["bytes"]:
        raise CheckpointError(expected(f"{fingerprint['bytes']} bytes", of=str(path), got=len(content), do="use an intact checkpoint"))
    if _fingerprint(content) != fingerprint:
        raise CheckpointError(expected("the content that was saved", of=str(path), got="an altered one", do="use an intact checkpoint"))
    try:
        return {key: tensor.clone() for key, tensor in load_tensors(content).items()}
    except SafetensorError as error:
        raise CheckpointError(expected("a safetensors file", of=str(path), got=f"damaged bytes ({error})", do="use an intact checkpoint")) from None


def _plain(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _fingerprint(content: bytes) -> dict[str, Any]:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _is_fingerprint(saved: Any) -> bool:
    return isinstance(saved, dict) and set(saved) == {"bytes", "sha256"} and type(saved["bytes"]) is int and isinstance(saved["sha256"], str)


def _is_text(saved: dict[str, Any]) -> bool:
    """Whether ``saved`` has the form of ``Text.describe``."""
    kinds = {"source": str, "sha256": str, "bytes": int, "training_bytes": int, "held_out_bytes": int}
    return set(saved) == set(kinds) and all(type(saved[name]) is kind for name, kind in kinds.items())


def _seal(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
