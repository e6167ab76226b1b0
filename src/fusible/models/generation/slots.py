"""The sequences of a KV cache as an engine uses them: who sits in each, what rests in it to be used again, and how many pages are left."""

from __future__ import annotations

from collections.abc import Sequence

from fusible.models.prefix import common_prefix
from fusible.pytorch import KVCache

__all__ = ["Slots"]

_LEAST_REUSE = 8
"""Fewer tokens of a common beginning are computed anew: they are not worth the longer text that another request might go on from."""


class Slots:
    """``cache``'s sequences. A slot is taken by a request, or rests: the tokens of one that ended stay until another needs the place.

    ``pages``: how many the cache has in all. The books are kept by the lengths of sequences: pages that a failed call has set aside are given back
    by ``restore``.
    """

    def __init__(self, cache: KVCache, pages: int) -> None:
        self.cache, self._pages = cache, pages
        self._kept: dict[int, list[int]] = {slot: [] for slot in range(len(cache.lengths))}  # of resting slots; the longest at rest first

    @property
    def resting(self) -> int:
        """How many slots are free to be taken."""
        return len(self._kept)

    def pages_of(self, tokens: int) -> int:
        """The pages that so many tokens of one sequence take."""
        return -(-tokens // self.cache.page_size)

    def free_pages(self, but: int | None = None) -> int:
        """Pages that a taken slot can have: those of nobody, and of what rests, ``but`` that of one slot."""
        lengths = self.cache.lengths
        return self._pages - sum(self.pages_of(length) for slot, length in enumerate(lengths) if slot not in self._kept or slot == but)

    def find(self, tokens: Sequence[int]) -> tuple[int, int]:
        """The resting slot that fits ``tokens`` best, and how many of them it has. The last token is computed in any case, for its logits."""
        common = {slot: common_prefix(kept, tokens[:-1]) for slot, kept in self._kept.items()}
        best = max(common, key=lambda slot: common[slot])
        if common[best] >= _LEAST_REUSE:
            return best, common[best]
        empty = next((slot for slot, kept in self._kept.items() if not kept), None)
        return (next(iter(self._kept)) if empty is None else empty), 0

    def take(self, slot: int, length: int) -> None:
        """Give a resting slot to a request, with the first ``length`` tokens of what it has."""
        self.cache.truncate(slot, length)
        del self._kept[slot]

    def rest(self, slot: int, tokens: list[int]) -> None:
        """Keep a slot, which has ``tokens``, for whoever begins alike."""
        self._kept[slot] = tokens

    def make_room(self, tokens: Sequence[int]) -> None:
        """Forget what rests, the longest at rest first, until the sequences can have ``tokens`` more, one number per slot."""
        lengths = self.cache.lengths
        wanted = sum(self.pages_of(length + more) - self.pages_of(length) for length, more in zip(lengths, tokens, strict=True))
        unused = self._pages - sum(map(self.pages_of, lengths))
        for slot, kept in self._kept.items():
            if wanted <= unused:
                return
            unused += self.pages_of(len(kept))
            self.cache.truncate(slot)
            self._kept[slot] = []

    def restore(self) -> None:
        """Give back the pages that a call which failed has set aside."""
        for slot, length in enumerate(self.cache.lengths):
            self.cache.truncate(slot, length)
