"""The text: bytes to learn, bytes held out, and the windows that a step or an evaluation reads."""

from __future__ import annotations

import hashlib
import importlib
from dataclasses import dataclass
from typing import Any

import torch

from fusible.errors import ArgumentError, expected
from fusible.files import read_file
from fusible.machine import available_memory
from fusible.models.training.schedule import hash_seed

__all__ = ["Text", "read_text"]

_HELD_OUT = 0.1
_MAX_WINDOWS = 512
_COPIES = 3
"""Copies of a text in memory while it is read: two as bytes, and one that torch may write to."""


@dataclass(frozen=True, eq=False)
class Text:
    """``training`` and ``held_out``: uint8 ``[bytes]``, the last tenth of the text held out. ``sha256`` is of the whole."""

    source: str
    sha256: str
    training: torch.Tensor
    held_out: torch.Tensor

    def batch(self, seed: int, step: int, count: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``(bytes, next bytes)``, int64 ``[count, length]`` each: ``count`` windows drawn at random, the same for the same seed and step."""
        generator = torch.Generator().manual_seed(hash_seed(seed, step))
        starts = torch.randint(len(self.training) - length, (count,), generator=generator, device="cpu")
        return _windows(self.training, starts, length)

    def evaluation(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``(bytes, next bytes)``, int64 ``[windows, length]``: the held-out part in windows side by side, at most 512 spread evenly over it."""
        count = (len(self.held_out) - 1) // length
        wanted = min(count, _MAX_WINDOWS)
        starts = torch.tensor([i * count // wanted * length for i in range(wanted)], device="cpu")
        return _windows(self.held_out, starts, length)

    def unigram_loss(self) -> float:
        """The loss of a unigram model on the held-out part, in nats per byte. Its probabilities are the training part's byte counts plus one."""
        counts = torch.bincount(self.training.long(), minlength=256).double() + 1
        return -(counts / counts.sum()).log()[self.held_out.long()].mean().item()

    def describe(self) -> dict[str, Any]:
        """For ``metrics.json`` and checkpoints."""
        sizes = {"bytes": len(self.training) + len(self.held_out), "training_bytes": len(self.training), "held_out_bytes": len(self.held_out)}
        return {"source": self.source, "sha256": self.sha256, **sizes}


def read_text(path: str | None, length: int) -> Text:
    """The text of a file, or the interpreter's documentation topics, for windows of ``length`` bytes.

    Raises ``ArgumentError`` for a file that cannot be read or is too short for one held-out window.
    """
    source, content = (path, _read_file(path)) if path is not None else ("pydoc_data.topics", _documentation())
    held_out = int(len(content) * _HELD_OUT)
    if held_out < length + 1:
        needed = round((length + 1) / _HELD_OUT)
        do = "give a longer text or a shorter --seq-len"
        raise ArgumentError(expected(f"at least {needed} bytes", of=f"the text {source}", got=len(content), do=do))
    everything = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return Text(source, hashlib.sha256(content).hexdigest(), everything[:-held_out], everything[-held_out:])


def _windows(content: torch.Tensor, starts: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    read = content[starts[:, None] + torch.arange(length + 1, device="cpu")].long()
    return read[:, :-1], read[:, 1:]


def _documentation() -> bytes:
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        got = "an interpreter without them"
        raise ArgumentError(expected("the documentation topics", of="this Python", got=got, do="give --text FILE")) from None
    return "\n".join(topics[name] for name in sorted(topics)).encode()


def _read_file(path: str) -> bytes:
    return read_file(path, of=f"--text {path}", do="give another", error=ArgumentError, missing=ArgumentError, limit=available_memory() // _COPIES)
