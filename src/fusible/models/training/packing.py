"""Windows of equal length, packed with documents one behind the other, and the order in which they are learned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from fusible.errors import ArgumentError, expected
from fusible.models.training.corpus import Corpus
from fusible.models.training.schedule import hash_seed

__all__ = ["Order", "PackedBatch", "Windows", "pack"]

IGNORED = -100
"""The target of a token that is not to be foretold."""


class PackedBatch(NamedTuple):
    """``tokens``, ``targets``: int64 ``[windows * length]``, the second ``IGNORED`` where nothing is to be foretold; ``seq_lens``: int32
    ``[sequences]``: documents, and parts of those that windows cut. A sequence sees nothing of another."""

    tokens: torch.Tensor
    targets: torch.Tensor
    seq_lens: torch.Tensor


@dataclass(frozen=True, eq=False)
class Windows:
    """``tokens``, ``targets``: int32 ``[windows, length]``; ``begins``: bool ``[windows, length]``, whether a sequence begins."""

    tokens: torch.Tensor
    targets: torch.Tensor
    begins: torch.Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def length(self) -> int:
        """Tokens in a window."""
        return self.tokens.shape[1]

    @property
    def learned(self) -> int:
        """How many tokens of all windows are to be foretold."""
        return int((self.targets != IGNORED).sum())

    def counted(self, places: torch.Tensor) -> int:
        """How many tokens of some of the windows are."""
        return int((self.targets[places] != IGNORED).sum())

    def batch(self, places: torch.Tensor, counted: torch.Tensor | None = None) -> PackedBatch:
        """Some of the windows, one behind the other. ``counted``: bool ``[windows]``, of which of these something is to be foretold; None: of all."""
        starts = torch.cat([self.begins[places].flatten().nonzero().flatten(), torch.tensor([len(places) * self.length], device="cpu")])
        targets = self.targets[places] if counted is None else self.targets[places].where(counted[:, None], IGNORED)
        return PackedBatch(self.tokens[places].flatten().long(), targets.flatten().long(), starts.diff().to(torch.int32))


def pack(corpus: Corpus, length: int, of: str = "the data to train on") -> Windows:
    """The tokens of a corpus but the last of each document, in windows of ``length``, and for each token the next one of its document.

    What is left at the end, fewer than a window, is left out, and so are windows of which nothing is learned. Raises ``ArgumentError`` where no
    window is left.
    """
    ends = corpus.lengths.cumsum(0)
    has_next, has_former = (torch.ones(len(corpus), dtype=torch.bool, device="cpu") for _ in range(2))
    has_next[ends - 1], has_former[ends - corpus.lengths] = False, False
    tokens = corpus.tokens[has_next]
    targets = torch.where(corpus.learned, corpus.tokens, IGNORED)[has_former]
    begins = ~has_former[has_next]
    count = len(tokens) // length
    shaped = [each[: count * length].view(count, length) for each in (tokens, targets, begins)]
    shaped[2][:, :1] = True
    kept = (shaped[1] != IGNORED).any(1)
    if not bool(kept.any()):
        got = f"{len(tokens)}" if not count else f"{count * length} of which none is learned"
        do = "give more text, or a smaller --seq-len"
        raise ArgumentError(expected(f"at least {length} tokens that have a next one, a window", of=of, got=got, do=do))
    return Windows(*(each if bool(kept.all()) else each[kept] for each in shaped))


class Order:
    """Which windows a step learns: every epoch is all ``count`` of them, shuffled by the seed and its number. A step's place in the data follows from
    its number alone."""

    def __init__(self, count: int, seed: int) -> None:
        self._count, self._seed = count, seed
        self._epochs: dict[int, torch.Tensor] = {}

    def places(self, step: int, batch: int) -> torch.Tensor:
        """int64 ``[batch]``."""
        return torch.stack([self._epoch(i // self._count)[i % self._count] for i in range(step * batch, (step + 1) * batch)])

    def _epoch(self, number: int) -> torch.Tensor:
        if number not in self._epochs:
            generator = torch.Generator().manual_seed(hash_seed(self._seed, number))
            self._epochs = {number: torch.randperm(self._count, generator=generator, device="cpu")}
        return self._epochs[number]
