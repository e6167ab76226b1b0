"""A checkpoint of a run: ``model.safetensors``, ``state.safetensors`` and ``state.json``, and nothing that is unpickled.

``state.json`` holds the options, the losses so far, and of the other files their sizes and SHA-256; its own last entry is the SHA-256 of the
rest. So a file that is missing, cut short, altered or of another save is recognized before anything of it is used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from fusible.cli.training.files import locate, replace_files
from fusible.cli.training.options import RECIPES, TrainOptions
from fusible.cli.training.record import Record
from fusible.errors import CheckpointError, expected

__all__ = ["CHECKPOINT_FILES", "Checkpoint", "has_checkpoint", "load_checkpoint", "save_checkpoint"]

_MODEL, _STATE, _MANIFEST = CHECKPOINT_FILES = ("model.safetensors", "state.safetensors", "state.json")
_FORMAT = {"format": "fusible train", "version": 1}
_SEAL = "sha256"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Everything needed to go on. ``model`` is its ``state_dict``, scaling state included; ``state``: optimizer moments and the random generator."""

    options: TrainOptions
    recipe: str
    text: dict[str, Any]
    record: Record
    model: Mapping[str, torch.Tensor]
    state: Mapping[str, torch.Tensor]


def has_checkpoint(folder: Path) -> bool:
    """Whether a run was saved in ``folder``."""
    return any(locate(folder, name).exists() for name in CHECKPOINT_FILES)


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Save into ``folder``, replacing the former checkpoint there as one step."""
    about = {"options": checkpoint.options.to_json(), "recipe": checkpoint.recipe}
    model = save_tensors(_plain(checkpoint.model), {"fusible": json.dumps({"model": "ByteGPT", **about}, sort_keys=True)})
    state = save_tensors(_plain(checkpoint.state))
    manifest = {**_FORMAT, **about, "text": checkpoint.text, "record": checkpoint.record.to_json()}
    manifest["files"] = {name: _fingerprint(content) for name, content in ((_MODEL, model), (_STATE, state))}
    manifest[_SEAL] = _seal(manifest)
    text = json.dumps(manifest, indent=1, allow_nan=False).encode()
    replace_files(folder, {_MODEL: model, _STATE: state, _MANIFEST: text})


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read and check all of a checkpoint. Raises ``CheckpointError`` for one that is not whole, or not of this program."""
    manifest = _read_manifest(folder)
    model, state = (_read_tensors(folder, name, manifest["files"][name]) for name in (_MODEL, _STATE))
    return Checkpoint(
        TrainOptions.from_json(manifest["options"]), manifest["recipe"], manifest["text"], Record.from_json(manifest["record"]), model, state
    )


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = locate(folder, _MANIFEST)
    try:
        manifest = json.loads(_read(folder, _MANIFEST))
    except ValueError:
        raise CheckpointError(expected("JSON", of=str(path), got="damaged text", do="use an intact checkpoint")) from None
    if not isinstance(manifest, dict) or manifest.pop(_SEAL, None) != _seal(manifest):
        raise CheckpointError(expected("the content that was saved", of=str(path), got="an altered one", do="use an intact checkpoint"))
    if any(manifest.get(key) != value for key, value in _FORMAT.items()):
        got = f"{manifest.get('format')!r} version {manifest.get('version')!r}"
        raise CheckpointError(expected("a checkpoint of 'fusible train' version 1", of=str(path), got=got, do="use the program that saved it"))
    fields = {"options": dict, "recipe": str, "text": dict, "record": dict, "files": dict}
    wrong = [name for name, kind in fields.items() if not isinstance(manifest.get(name), kind)]
    wrong += [name for name in (_MODEL, _STATE) if not wrong and not _is_fingerprint(manifest["files"].get(name))]
    if wrong or manifest["recipe"] not in RECIPES:
        raise CheckpointError(expected("legal entries", of=str(path), got=f"another {', '.join(wrong) or 'recipe'}", do="use an intact checkpoint"))
    return manifest


def _read_tensors(folder: Path, name: str, fingerprint: dict[str, Any]) -> dict[str, torch.Tensor]:
    content = _read(folder, name)
    path = locate(folder, name)
    if len(content) != fingerprint["bytes"]:
        raise CheckpointError(expected(f"{fingerprint['bytes']} bytes", of=str(path), got=len(content), do="use an intact checkpoint"))
    if _fingerprint(content) != fingerprint:
        raise CheckpointError(expected("the content that was saved", of=str(path), got="an altered one", do="use an intact checkpoint"))
    try:
        return {key: tensor.clone() for key, tensor in load_tensors(content).items()}
    except SafetensorError as error:
        raise CheckpointError(expected("a safetensors file", of=str(path), got=f"damaged bytes ({error})", do="use an intact checkpoint")) from None


def _read(folder: Path, name: str) -> bytes:
    path = locate(folder, name)
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(expected(f"the file {name}", of=f"the checkpoint {folder}", got=error.strerror, do="use a whole checkpoint")) from None


def _plain(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _fingerprint(content: bytes) -> dict[str, Any]:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _is_fingerprint(saved: Any) -> bool:
    return isinstance(saved, dict) and isinstance(saved.get("bytes"), int) and isinstance(saved.get("sha256"), str)


def _seal(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
