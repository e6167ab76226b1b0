"""The sequences of a KV cache as an engine uses them: who sits in each, what rests in it to be used again, and how many pages are left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fusible.models.prefix import common_prefix
from fusible.pytorch import KVCache

__all__ = ["Place", "Slots"]

_LEAST_REUSE = 8
"""Fewer tokens of a common beginning are computed anew: they are not worth the longer text that another request might go on from."""


class Place(NamedTuple):
    """A slot for a request, with the first ``length`` tokens of the slot ``source``, which may be the same one."""

    slot: int
    source: int
    length: int


class Slots:
    """``cache``'s sequences. A slot is taken by a request, or rests: the tokens of one that ended stay until another needs the place."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self._kept: dict[int, Sequence[int]] = {slot: () for slot in range(len(cache.lengths))}  # of resting slots; the longest at rest first

    @property
    def resting(self) -> int:
        """How many slots are free to be taken."""
        return len(self._kept)

    def pages_of(self, tokens: int) -> int:
        """The pages that so many tokens of one sequence take."""
        return -(-tokens // self.cache.page_size)

    def free_pages(self) -> int:
        """Pages that requests can have: those of nobody, and those that only resting slots hold."""
        return self.cache.free_pages(without=self._kept)

    def find(self, tokens: Sequence[int], taken: Mapping[int, Sequence[int]]) -> Place:
        """The place where the least of ``tokens`` has to be computed: the last one in any case, for its logits.

        ``taken``: the tokens that the slots of running requests have. Of these, whole pages are shared; what rests is taken over.
        """
        resting, kept = self._longest(tokens, self._kept)
        source, common = self._longest(tokens, taken)
        common -= common % self.cache.page_size
        if max(common, kept) < _LEAST_REUSE:
            return Place(self._least_wanted(), 0, 0)
        return Place(resting, resting, kept) if kept >= common else Place(self._least_wanted(), source, common)

    def take(self, place: Place) -> None:
        """Give a resting slot to a request, with the tokens of its place."""
        slot, source, length = place
        if source == slot:
            within = length % self.cache.page_size
            # A page that others hold too is copied where it is cut; without a free one for that, the cut is between pages.
            between = within and self.cache.shares(slot, length - 1) and not self.cache.free_pages()
            self.cache.truncate(slot, length - within if between else length)
        else:
            self.cache.truncate(slot)
            if length:
                self.cache.share(slot, source, length)
        del self._kept[slot]

    def rest(self, slot: int, tokens: Sequence[int]) -> None:
        """Keep a slot, which has ``tokens``, for whoever begins alike."""
        self._kept[slot] = tokens

    def make_room(self, tokens: Sequence[int]) -> None:
        """Forget what rests, the longest at rest first, until the sequences can have ``tokens`` more, one number per slot."""
        wanted = sum(self.pages_of(length + more) - self.pages_of(length) for length, more in zip(self.cache.lengths, tokens, strict=True))
        for slot, kept in self._kept.items():
            if wanted <= self.cache.free_pages():
                return
            if kept:
                self.cache.truncate(slot)
                self._kept[slot] = ()

    def forget(self) -> None:
        """Forget all that rests: nobody may go on from it."""
        for slot, kept in self._kept.items():
            if kept:
                self.cache.truncate(slot)
                self._kept[slot] = ()

    def restore(self) -> None:
        """Give back the pages that a call which failed has set aside."""
        for slot, length in enumerate(self.cache.lengths):
            self.cache.truncate(slot, length)

    def _least_wanted(self) -> int:
        """An empty slot, or else the one that has rested longest."""
        return next((slot for slot, kept in self._kept.items() if not kept), next(iter(self._kept)))

    @staticmethod
    def _longest(tokens: Sequence[int], there: Mapping[int, Sequence[int]]) -> tuple[int, int]:
        """Of the slots the one that has most of ``tokens`` but the last, and how many."""
        begin = tokens[:-1]
        common, slot = max(((common_prefix(kept, begin), slot) for slot, kept in there.items()), default=(0, 0), key=lambda one: one[0])
        return slot, common
