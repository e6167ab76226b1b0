"""Checkpoints whose parameters have the names that a family gave up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusible.models.checkpoints import Checkpoint
from fusible.models.transformer_engine import Stored

__all__ = ["with_older_names"]


def with_older_names(checkpoint: Checkpoint, older: Sequence[tuple[str, str]]) -> Stored:
    """``checkpoint`` by the names of today. ``older``: ends of these, and what they are in older files."""
    found = {f"{name.removesuffix(then)}{now}": name for name in checkpoint.names for now, then in older if name.endswith(then)}
    return _Renamed(checkpoint, found) if found else checkpoint


@dataclass(frozen=True)
class _Renamed:
    checkpoint: Checkpoint
    names: Mapping[str, str]

    def __contains__(self, name: object) -> bool:
        return name in self.names or name in self.checkpoint

    def shape(self, name: str) -> tuple[int, ...]:
        return self.checkpoint.shape(self.names.get(name, name))

    def tensor(self, name: str) -> Any:
        return self.checkpoint.tensor(self.names.get(name, name))

    def release(self, name: str) -> None:
        self.checkpoint.release(self.names.get(name, name))
