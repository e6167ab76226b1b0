"""``Corpus``: the tokens of documents, and which of them are to be foretold."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from fusible.errors import ArgumentError, expected
from fusible.models.text import Tokenizer
from fusible.models.training.documents import Document
from fusible.models.training.schedule import hash_seed

__all__ = ["Corpus", "tokenize"]


@dataclass(frozen=True, eq=False)
class Corpus:
    """``tokens``: int32 ``[n]``, of all documents, one behind the other; ``learned``: bool ``[n]``, whether a token is to be foretold; ``lengths``:
    int64 ``[documents]``."""

    tokens: torch.Tensor
    learned: torch.Tensor
    lengths: torch.Tensor

    def __len__(self) -> int:
        """How many tokens there are."""
        return len(self.tokens)

    @property
    def sha256(self) -> str:
        """Of the tokens, of what is learned, and of where documents end: two corpora that have the same are trained on alike."""
        digest = hashlib.sha256()
        for tensor in (self.tokens, self.learned.to(torch.uint8), self.lengths):
            digest.update(tensor.numpy().data)
        return digest.hexdigest()

    def shuffled(self, seed: int) -> Corpus:
        """The same documents in an order of a seed."""
        order = torch.randperm(len(self.lengths), generator=torch.Generator().manual_seed(hash_seed(seed, -1)), device="cpu")
        lengths, starts = self.lengths[order], (self.lengths.cumsum(0) - self.lengths)[order]
        moved = (starts - (lengths.cumsum(0) - lengths)).repeat_interleave(lengths)
        places = torch.arange(len(self), device="cpu") + moved
        return Corpus(self.tokens[places], self.learned[places], lengths)

    def split(self, share: float) -> tuple[Corpus, Corpus]:
        """All but the last ``share`` of the tokens, and these. A document in which the border lies is cut there."""
        border = len(self) - round(share * len(self))
        ends = self.lengths.cumsum(0)
        before = (ends - self.lengths) < border
        first, last = self.lengths[before].clone(), self.lengths[~before]
        if len(first) and (over := int(ends[before][-1]) - border):
            first[-1] -= over
            last = torch.cat([torch.tensor([over], device="cpu"), last])
        parts = (slice(None, border), first), (slice(border, None), last)
        one, other = (Corpus(self.tokens[part], self.learned[part], lengths) for part, lengths in parts)
        return one, other


def tokenize(documents: Iterable[Document], tokenizer: Tokenizer) -> Corpus:
    """The tokens of documents. Behind one that is ``whole`` stands the tokenizer's ``eos_token``, where it has one. Raises ``ArgumentError`` where
    there are none."""
    tokens, learned, lengths = array("i"), bytearray(), array("q")
    end = tokenizer.token_of(tokenizer.special_tokens.get("eos_token"))
    for document in documents:
        if document.learned is None:
            found = tokenizer.encode(document.text, document.whole)
            flags = bytes([1]) * len(found)
        else:
            found, places = tokenizer.encode_places(document.text, document.whole)
            flags = bytes(place is not None and any(begin <= place[0] < stop for begin, stop in document.learned) for place in places)
        if document.whole and end is not None and found[-1:] != [end]:
            found, flags = [*found, end], flags + bytes([1])
        if found:
            tokens.extend(found)
            learned += flags
            lengths.append(len(found))
    if not tokens:
        raise ArgumentError(expected("documents", of="the data to train on", got="nothing but empty ones", do="name other files"))
    marks = torch.frombuffer(learned, dtype=torch.uint8).to(torch.bool)
    return Corpus(torch.frombuffer(tokens, dtype=torch.int32), marks, torch.frombuffer(lengths, dtype=torch.int64))
