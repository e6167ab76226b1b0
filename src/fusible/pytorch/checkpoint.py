"""``LoadPlanner``: scaling states in checkpoints of ``torch.distributed.checkpoint``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from fusible.errors import CheckpointError, expected
from fusible.quantized import QuantizedTensor

__all__ = ["LoadPlanner"]

_STATE = re.compile(r"(.*\.)?(scaling_state\.\d+|_extra_state)")


@dataclass
class _Parts:
    """A quantized tensor that is read in parts: those that came so far, by their places, and how many elements are missing."""

    whole: QuantizedTensor
    came: list[tuple[ReadItem, torch.Tensor]]
    missing: int

    def assemble(self) -> None:
        """Write what came to the tensor: the bytes, where all are rows of its format with one scale; else the values, which are quantized."""
        rows = sorted(((item.dest_offsets[0], part) for item, part in self.came), key=lambda place: place[0])
        quantized = [part for _, part in rows if isinstance(part, QuantizedTensor) and part.shape[1:] == self.whole.shape[1:]]
        joined = QuantizedTensor.joined(quantized) if len(quantized) == len(rows) else None
        if joined is None:
            joined = torch.empty(self.whole.shape, dtype=self.whole.dtype, device="cpu")
            for item, part in self.came:
                joined[tuple(slice(begin, begin + length) for begin, length in zip(item.dest_offsets, item.lengths, strict=True))] = part
        self.whole.copy_(joined)
        self.came.clear()


@dataclass
class _Incoming:
    """Stands for the memory that a part is read into: a storage reader asks for the size and copies, and a part of a quantized tensor has none."""

    item: ReadItem
    parts: _Parts

    def detach(self) -> _Incoming:
        return self

    def size(self) -> torch.Size:
        return torch.Size(self.item.lengths)

    def copy_(self, tensor: torch.Tensor) -> None:
        self.parts.came.append((self.item, tensor))


class LoadPlanner(DefaultLoadPlanner):
    """``dcp.load(state_dict, planner=LoadPlanner(state_dict))``: also reads the scaling states that the checkpoint has and ``state_dict`` has not.

    A model that has not been called under delayed scaling has no scaling state to write into, and ``torch.distributed.checkpoint`` reads what it
    finds a place for. This makes the places, in ``state_dict`` or the dictionaries inside. States of another size, for another window of amaxes, are
    read too. A quantized tensor that several processes wrote in parts is put together from the bytes of the parts; where these have formats or scales
    of their own, or are not whole rows, from the values, which are quantized as the one here is. Options are ``DefaultLoadPlanner``'s. Raises
    ``CheckpointError`` for a state at the top of a dictionary that was not given.
    """

    def __init__(self, state_dict: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._state_dict = state_dict
        self._parts: dict[tuple[str, Any], _Parts] = {}

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        for name, saved in metadata.state_dict_metadata.items() if metadata is not None else ():
            if isinstance(saved, TensorStorageMetadata) and _STATE.fullmatch(name):
                path = (metadata.planner_data or {}).get(name, (name,))  # type: ignore[union-attr]
                self._make_place(state_dict, path, torch.empty(saved.size, dtype=saved.properties.dtype, device="cpu"))
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        whole = self.lookup_tensor(read_item.dest_index)
        if not isinstance(whole, QuantizedTensor) or tuple(read_item.lengths) == tuple(whole.shape):
            return super().resolve_tensor(read_item)
        key = read_item.dest_index.fqn, read_item.dest_index.offset
        parts = self._parts.setdefault(key, _Parts(whole, [], whole.numel()))
        return cast(torch.Tensor, _Incoming(read_item, parts))

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        parts = self._parts.get((read_item.dest_index.fqn, read_item.dest_index.offset))
        if parts is not None:
            parts.missing -= torch.Size(read_item.lengths).numel()
            if not parts.missing:
                parts.assemble()

    def _make_place(self, state_dict: dict[str, Any], path: Sequence[Any], place: torch.Tensor) -> None:
        """Put ``place`` at a path of keys through nested dictionaries; nothing where they lead elsewhere."""
        *outer, last = path
        into: Any = state_dict
        for key in outer:
            into = into.get(key) if isinstance(into, dict) else None
        if not isinstance(into, dict):
            return
        into[last] = place
        if not outer and self._state_dict is not None:
            self._state_dict[last] = place  # dcp.load works on a copy of the outermost dictionary
        elif not outer:
            do = "give the dictionary to load: LoadPlanner(state_dict)"
            raise CheckpointError(expected("the dictionary that is loaded", of="LoadPlanner", got=f"none to put {last!r} in", do=do))
