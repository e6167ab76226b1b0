"""Fusible's own way to store quantized tensors of any format: the tensors that one consists of, and in the file's metadata what else makes it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fusible.errors import CheckpointError, expected
from fusible.files import parse_json
from fusible.models.checkpoints.header import Entry
from fusible.models.checkpoints.layouts.layout import Parts, Weight, WeightLayout
from fusible.quantized import from_plain, to_plain
from fusible.tex.formats import is_quantized

__all__ = ["OwnLayout"]


@dataclass(frozen=True)
class OwnLayout(WeightLayout):
    """``w:rowwise_data`` and so on for a weight ``w``, and a JSON text under ``w`` in the metadata: what ``quantized.flatten_state_dict`` gives."""

    suffixes: tuple[str, ...] = ()

    def find(self, entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> Iterator[Weight]:
        stored: dict[str, dict[str, str]] = {}
        for each in entries:
            name, mark, part = each.partition(":")
            if mark and name in metadata:
                stored.setdefault(name, {})[f":{part}"] = each
        for name, names in stored.items():
            told = parse_json(metadata[name], of=f"the metadata of {name}")
            shape = told.get("shape") if isinstance(told, dict) else None
            if not isinstance(shape, list) or not all(type(part) is int for part in shape):
                raise CheckpointError(expected("a header with a shape", of=f"the metadata of {name}", got=repr(shape)[:80], do="save it again"))
            yield Weight(name, tuple(shape), self, names, metadata[name])

    def shape(self, parts: Parts) -> tuple[int, ...] | None:
        return None

    def decode(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype, note: str) -> Any:
        plain = {suffix.removeprefix(":"): tensor for suffix, tensor in parts.items()}
        return from_plain(plain, parse_json(note, of="the metadata of a weight"))

    def holds(self, tensor: Any) -> bool:
        return is_quantized(tensor)

    def encode(self, tensor: Any) -> dict[str, torch.Tensor]:
        tensors, _ = to_plain(tensor)
        return {f":{part}": each.detach() for part, each in tensors.items()}

    def note(self, tensor: Any) -> str | None:
        return json.dumps(to_plain(tensor)[1])
