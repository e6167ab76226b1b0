"""Checkpoints are written one tensor at a time, into a folder that is there whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from fusible.errors import ArgumentError, CheckpointError, check_number, check_path, expected
from fusible.files import NewFolder, read_file
from fusible.models.checkpoints.checkpoint import CONFIG, Checkpoint, quantization_of
from fusible.models.checkpoints.layouts import WeightLayout
from fusible.models.checkpoints.schemes import scheme_of
from fusible.models.checkpoints.shard_writer import ShardWriter, bytes_of
from fusible.tex.formats import is_quantized

__all__ = ["SHARD_SIZE", "other_files", "write_checkpoint"]

SHARD_SIZE = 5_000_000_000
"""Bytes of tensors in a file, as transformers has it."""

_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


def write_checkpoint(
    directory_out: str | PathLike[str],
    config: Mapping[str, Any],
    tensors: Mapping[str, Any] | Iterable[tuple[str, Any]],
    *,
    shard_size: int = SHARD_SIZE,
    like: Checkpoint | None = None,
    files: Mapping[str, Path] | None = None,
    count: int | None = None,
) -> None:
    """Write a checkpoint that transformers and vLLM read: ``config.json`` and tensors in safetensors, several files where they take more than
    ``shard_size`` bytes, with their index.

    ``tensors``: by name, plain ones and quantized ones, taken one by one; no more than one is held. Quantized ones are stored as the
    ``quantization_config`` of ``config`` says. ``like``: a checkpoint whose scales are taken as they are stored there, in their types and shapes,
    where a tensor has the same ones; what is read from it and written again is so the same to the bit. It is ``tensors`` itself where that is a
    checkpoint.
    ``files``: others, by name, that are copied. ``count``: how many tensors there are, where ``tensors`` are pairs; it saves empty bytes in headers.

    The folder appears when all of it is on the disk. Raises ``FileError`` where there is one with files in it already, ``CheckpointError`` for a
    quantized tensor that the config's scheme does not store, and writes nothing then.
    """
    check_path(directory_out, "directory_out of write_checkpoint")
    check_number(shard_size, "shard_size of write_checkpoint", least=1)
    like = tensors if like is None and isinstance(tensors, Checkpoint) else like
    pairs: Iterable[tuple[str, Any]] = tensors.items() if isinstance(tensors, Mapping) else tensors  # pyright: ignore[reportAssignmentType]
    count = len(tensors) if isinstance(tensors, Mapping) else count
    layouts, told = _layouts(config, like), config
    with NewFolder(Path(directory_out)) as folder:
        with ShardWriter(folder, shard_size, count) as writer:
            for name, tensor in pairs:
                stored, note = _stored(name, tensor, layouts, like)
                writer.add(name, stored, note)
                if like is not None and is_quantized(tensor) and quantization_of(told) is None:
                    told = {**config, "quantization_config": dict(like.quantization_config)}  # which was in a file of its own
        writer.finish()
        for name, path in (files or {}).items():
            folder.write(name, read_file(path))
        folder.write(CONFIG, json.dumps(told, indent=2).encode() + b"\n")


def other_files(directory: Path) -> dict[str, Path]:
    """What beside weights and the config belongs to a checkpoint, by name: tokenizers, templates, generation settings, code, licenses."""
    found = sorted(path for path in directory.iterdir() if path.is_file() and not path.name.startswith("."))
    return {path.name: path for path in found if path.name != CONFIG and not path.name.endswith(_WEIGHTS)}


def _layouts(config: Mapping[str, Any], like: Checkpoint | None) -> tuple[WeightLayout, ...]:
    told = quantization_of(config)
    if told is not None:
        return tuple(scheme_of(told).layouts(told))
    return () if like is None else like.layouts


def _stored(name: str, tensor: Any, layouts: tuple[WeightLayout, ...], like: Checkpoint | None) -> tuple[dict[str, torch.Tensor], str | None]:
    """The tensors that ``tensor`` is stored as, by name, and what the metadata say of it."""
    if not isinstance(tensor, torch.Tensor) and not is_quantized(tensor):
        raise ArgumentError(expected("a tensor", of=f"{name} of write_checkpoint", got=type(tensor).__qualname__, do="pass tensors by their names"))
    if not is_quantized(tensor):
        return {name: tensor}, None
    source = None if like is None else like.weights.get(name)
    preferred = () if source is None or source.layout not in layouts else (source.layout,)
    layout = next((layout for layout in (*preferred, *layouts) if layout.holds(tensor)), None)
    if layout is None:
        wanted, do = "a tensor of a format that the config's quantization_config stores", "dequantize it, or write another quantization_config"
        raise CheckpointError(expected(wanted, of=name, got=f"{tensor!r}"[:120], do=do))
    parts = layout.encode(tensor)
    if like is not None and source is not None and source.layout == layout:
        parts |= _as_stored(tensor, like, name)
    return {f"{name}{suffix}": part for suffix, part in parts.items()}, layout.note(tensor)


def _as_stored(tensor: Any, like: Checkpoint, name: str) -> dict[str, torch.Tensor]:
    """The scales of ``like``'s weight as they are stored, where ``tensor`` has the same; else none."""
    source, metadata = like.tensor(name), tensor.get_metadata()
    theirs = source.get_metadata()
    scales = [field for field in source._TENSORS if "scale" in field or "amax" in field]
    same = type(source) is type(tensor) and all(_alike(metadata[field], theirs[field]) for field in scales)
    _, *others = like.weights[name].layout.suffixes or ("",)
    return {suffix: part for suffix, part in like.parts(name).items() if suffix in others} if same else {}


def _alike(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether two tensors have the same bytes."""
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and one.dtype is other.dtype and torch.equal(bytes_of(one), bytes_of(other))
