"""A checkpoint of a run: ``model.safetensors``, ``state.safetensors`` and ``state.json``, and nothing that is unpickled.

Several processes write shards of the parameters and moments in the place of ``model.safetensors``, each its own, by ``torch.distributed.checkpoint``.
Whoever loads them, on whichever processes, sees no difference.

``state.json`` holds the options, the losses so far, and of the other files their sizes and SHA-256; its own last entry is the SHA-256 of the
rest. So a file that is missing, cut short, altered or of another save is recognized before anything of it is used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from fusible.cli.run_files import CHECKPOINT_FILES
from fusible.cli.run_options import MAX_STEPS
from fusible.cli.training.memory import parameter_count
from fusible.cli.training.options import RECIPES, TrainOptions
from fusible.cli.training.record import Record
from fusible.cli.training.shards import Shards, fingerprint_of, save_together
from fusible.errors import CheckpointError, expected
from fusible.files import locate, parse_json, read_file, replace_files
from fusible.models.training.shards import Shard, is_shard, join_shards

if TYPE_CHECKING:
    from fusible.cli.training.ranks import Ranks

__all__ = [
    "Checkpoint",
    "MOMENT_KINDS",
    "Manifest",
    "RNG_STATE",
    "load_checkpoint",
    "read_manifest",
    "save_checkpoint",
    "save_shards",
]

_MODEL, _STATE, _MANIFEST = CHECKPOINT_FILES
_FORMAT = {"format": "fusible train", "version": 1}
_SEAL = "sha256"
_MANIFEST_LIMIT = 2**20 + 32 * MAX_STEPS
"""Bytes of ``state.json``: a line for each loss, and the rest."""

RNG_STATE = "torch_rng_state"
MOMENT_KINDS = ("step", "exp_avg", "exp_avg_sq")
"""Of an optimizer; that of a parameter is saved by its name and the kind."""
_TENSORS_SLACK = 2**20
"""Bytes per layer, and once more, for the rest of a file: names, shapes and the scaling state."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Everything needed to resume. ``model``: its ``state_dict``, with the scaling state. ``state``: optimizer moments and the random generator.
    ``shards``: where several processes save together, what is not in these.

    ``replaces``: the seals of the checkpoints that it replaces, in any folder of their command. They count as removed from the moment that this one
    is complete.
    """

    options: TrainOptions
    recipe: str
    text: dict[str, Any]
    record: Record
    model: Mapping[str, torch.Tensor]
    state: Mapping[str, torch.Tensor]
    shards: Shards | None = None
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


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Save into ``folder``, replacing the former checkpoint there as one step.

    Raises ``FileError`` where the system refuses; the former checkpoint stays whole.
    """
    model = save_tensors(_plain(checkpoint.model), {"fusible": json.dumps({"model": "ByteGPT", **_about(checkpoint)}, sort_keys=True)})
    files = {_MODEL: model, _STATE: save_tensors(_plain(checkpoint.state))}
    replace_files(folder, {**files, _MANIFEST: _manifest(checkpoint, {name: fingerprint_of(content) for name, content in files.items()})})


def save_shards(folder: Path, checkpoint: Checkpoint, ranks: Ranks) -> None:
    """The same by several processes, all of which call it."""
    assert checkpoint.shards is not None

    def rest(files: dict[str, Any]) -> dict[str, bytes]:
        content = save_tensors(_plain({**checkpoint.model, **checkpoint.state}))
        return {_STATE: content, _MANIFEST: _manifest(checkpoint, {**files, _STATE: fingerprint_of(content)})}

    save_together(folder, checkpoint.shards, ranks, _STATE, rest)


def _about(checkpoint: Checkpoint) -> dict[str, Any]:
    return {"options": checkpoint.options.to_json(), "recipe": checkpoint.recipe}


def _manifest(checkpoint: Checkpoint, files: Mapping[str, dict[str, Any]]) -> bytes:
    manifest = {**_FORMAT, **_about(checkpoint), "text": checkpoint.text, "record": checkpoint.record.to_json(), "files": files}
    if checkpoint.replaces:
        manifest["replaces"] = list(checkpoint.replaces)
    manifest[_SEAL] = _seal(manifest)
    return json.dumps(manifest, indent=1, allow_nan=False).encode()


def load_checkpoint(folder: Path, manifest: Manifest | None = None) -> Checkpoint:
    """Read and check all of a checkpoint. Raises ``CheckpointError`` for one that is not whole, or not of this program."""
    said = read_manifest(folder) if manifest is None else manifest
    slack = _TENSORS_SLACK * (1 + said.options.layers)
    parameters = parameter_count(said.options)
    limits = {_MODEL: 4 * parameters + slack, _STATE: 8 * parameters + slack}
    contents = {name: _read(folder, name, fingerprint, limits.get(name, 12 * parameters + slack)) for name, fingerprint in said.files.items()}
    shards = {name: contents.pop(name) for name in said.files if name not in limits}
    tensors = join_shards(folder, {name: Shard(content, _tensors(folder, name, content)) for name, content in shards.items()})
    for name, content in contents.items():
        tensors |= _tensors(folder, name, content)
    state = {name: tensors.pop(name) for name in list(tensors) if name == RNG_STATE or name.rpartition(".")[2] in MOMENT_KINDS}
    return Checkpoint(said.options, said.recipe, said.text, said.record, tensors, state, replaces=said.replaces)


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
    if not wrong and not (_are_files(manifest["files"]) and all(map(_is_fingerprint, manifest["files"].values()))):
        wrong.append("files")
    replaced = manifest.get("replaces", [])
    if not isinstance(replaced, list) or not all(isinstance(seal, str) for seal in replaced):
        wrong.append("replaces")
    if not wrong and not _is_text(manifest["text"]):
        wrong.append("text")
    if wrong or manifest["recipe"] not in RECIPES:
        raise CheckpointError(expected("legal entries", of=str(path), got=f"another {', '.join(wrong) or 'recipe'}", do="use an intact checkpoint"))


def _are_files(names: Collection[str]) -> bool:
    others = set(names) - {_STATE}
    return _STATE in names and bool(others) and (others == {_MODEL} or all(map(is_shard, others)))


def _read(folder: Path, name: str, fingerprint: dict[str, Any], limit: int) -> bytes:
    path = locate(folder, name)
    content = read_file(path, limit=limit, do="use a whole checkpoint")
    if len(content) != fingerprint["bytes"]:
        raise CheckpointError(expected(f"{fingerprint['bytes']} bytes", of=str(path), got=len(content), do="use an intact checkpoint"))
    if fingerprint_of(content) != fingerprint:
        raise CheckpointError(expected("the content that was saved", of=str(path), got="an altered one", do="use an intact checkpoint"))
    return content


def _tensors(folder: Path, name: str, content: bytes) -> dict[str, torch.Tensor]:
    try:
        return {key: tensor.clone() for key, tensor in load_tensors(content).items()}
    except SafetensorError as error:
        of = str(locate(folder, name))
        raise CheckpointError(expected("a safetensors file", of=of, got=f"damaged bytes ({error})", do="use an intact checkpoint")) from None


def _plain(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _is_fingerprint(saved: Any) -> bool:
    return isinstance(saved, dict) and set(saved) == {"bytes", "sha256"} and type(saved["bytes"]) is int and isinstance(saved["sha256"], str)


def _is_text(saved: dict[str, Any]) -> bool:
    """Whether ``saved`` has the form of ``Text.describe``."""
    kinds = {"source": str, "sha256": str, "bytes": int, "training_bytes": int, "held_out_bytes": int}
    return set(saved) == set(kinds) and all(type(saved[name]) is kind for name, kind in kinds.items())


def _seal(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
