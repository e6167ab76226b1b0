"""Tokens as rows: their places in sequences, and tables whose rows are added."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fusible.errors import ArgumentError, DTypeError, OutOfRangeError, ShapeError, expected
from fusible.models.parts import Weights
from fusible.models.pretrained_model import Example

__all__ = [
    "TokenEmbedding",
    "Tokens",
    "check_are_tokens",
    "check_places",
    "check_tokens",
    "example_tokens",
    "places_behind",
    "places_of",
    "rows_of_tokens",
    "table_of",
]

_ROWS, _TOKENS = 2, 8


def check_are_tokens(tokens: object, of: str) -> None:
    """Raise ``DTypeError`` for anything but a tensor of integers."""
    if not isinstance(tokens, torch.Tensor) or tokens.dtype not in (torch.int64, torch.int32):
        got = f"one of {tokens.dtype}" if isinstance(tokens, torch.Tensor) else f"a {type(tokens).__qualname__}"
        raise DTypeError(expected("a tensor of int64", of=f"tokens of {of}", got=got, do="give what the model's tokenizer makes, as a tensor"))


def rows_of_tokens(table: nn.Embedding, tokens: torch.Tensor) -> torch.Tensor:
    """The row of ``table`` for each token. Raises ``OutOfRangeError`` for one that has none, where the device tells; a GPU ends the process."""
    try:
        return table(tokens)
    except IndexError:
        count = table.num_embeddings
        wrong = tokens[(tokens < 0) | (tokens >= count)][0].item()
        do = "use the tokenizer of this model"
        raise OutOfRangeError(expected(f"one from 0 to {count - 1}", of="a token", got=wrong, do=do)) from None


def check_tokens(tokens: torch.Tensor, seq_lens: torch.Tensor | None, of: str) -> None:
    """Raise ``ShapeError`` for tokens that are neither ``[batch, seq]`` nor ``[tokens]`` with the lengths of sequences, ``DTypeError`` for others."""
    check_are_tokens(tokens, of)
    if tokens.dim() != 2 and (tokens.dim() != 1 or seq_lens is None):
        wanted = "[batch, seq], or [tokens] with seq_lens"
        raise ShapeError(expected(wanted, of=f"tokens of {of}", got=list(tokens.shape), do="give a row of tokens per sequence"))


def places_of(tokens: torch.Tensor, seq_lens: torch.Tensor | None) -> torch.Tensor:
    """The position of each token in its sequence: of ``[batch, seq]``, or of ``[tokens]`` with ``seq_lens``."""
    counted = torch.arange(tokens.shape[-1], device=tokens.device)
    if tokens.dim() == 2 or seq_lens is None:
        return counted.expand_as(tokens)
    lengths = seq_lens.to(tokens.device)
    return counted - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)


def places_behind(lengths: Sequence[int], seq_lens: torch.Tensor, device: torch.device) -> torch.Tensor:
    """int64 ``[tokens]``: the positions of ``seq_lens`` further tokens of sequences that have ``lengths`` tokens."""
    parts = [torch.arange(start, start + count, device="cpu") for start, count in zip(lengths, seq_lens.tolist(), strict=True)]
    return torch.cat(parts).to(device)


def check_places(places: torch.Tensor, context: int) -> None:
    """Raise ``ArgumentError`` for a place that has no learned position."""
    if not torch.compiler.is_exporting() and not places.is_meta and places.numel() and int(places.max()) >= context:  # a program's shapes are bounded
        got = int(places.max()) + 1
        raise ArgumentError(expected(f"at most {context} tokens", of="a sequence", got=got, do="give a shorter one"))


def example_tokens(context: int | None, device: torch.device) -> Example:
    """A few tokens of a model with such a context."""
    value = torch.zeros(_ROWS, min(_TOKENS, context or _TOKENS), dtype=torch.int64, device=device)
    return Example(value, {0: ("batch", None), 1: ("sequence", context)})


def table_of(weights: Weights, name: str, rows: int, columns: int) -> nn.Embedding:
    """The table ``name``, ``[rows, columns]``."""
    return nn.Embedding.from_pretrained(weights.values(name, (rows, columns)), freeze=False)


@dataclass(frozen=True)
class Tokens:
    """Rows of the table ``words [vocabulary, hidden]``, with those of ``positions [context, hidden]`` and of ``types [kinds, hidden]`` added, where
    these have names."""

    words: str
    vocabulary: int
    hidden: int
    positions: str | None = None
    context: int = 0
    types: str | None = None
    kinds: int = 0

    @property
    def table(self) -> str:
        return self.words

    def example(self, device: torch.device) -> Example:
        return example_tokens(self.context or None, device)

    def made(self, weights: Weights) -> nn.Module:
        words = table_of(weights, self.words, self.vocabulary, self.hidden)
        positions = None if self.positions is None else table_of(weights, self.positions, self.context, self.hidden)
        types = None if self.types is None else table_of(weights, self.types, self.kinds, self.hidden)
        return TokenEmbedding(words, positions, types)

    def stored(self, module: Any) -> Iterator[tuple[str, torch.Tensor]]:
        tables = ((self.words, module.words), (self.positions, module.positions), (self.types, module.types))
        yield from ((name, table.weight) for name, table in tables if name is not None)


class TokenEmbedding(nn.Module):
    """``words[tokens] + types[token_types] + positions[places]`` (see ``Tokens``): ``[*, hidden]`` of int64 ``[batch, seq]``, or of
    ``[tokens]`` with ``seq_lens``."""

    def __init__(self, words: nn.Embedding, positions: nn.Embedding | None, types: nn.Embedding | None) -> None:
        super().__init__()
        self.words, self.positions, self.types = words, positions, types

    @property
    def counts_places(self) -> bool:
        return self.positions is not None

    def forward(self, tokens: torch.Tensor, seq_lens: torch.Tensor | None = None, token_types: torch.Tensor | None = None) -> torch.Tensor:
        check_tokens(tokens, seq_lens, "an encoder")
        if token_types is not None and (self.types is None or token_types.shape != tokens.shape):
            wanted = "none" if self.types is None else f"{list(tokens.shape)}, as the tokens are"
            raise ShapeError(expected(wanted, of="token_types", got=list(token_types.shape), do="give one for each token, or leave them out"))
        return self.rows(tokens, None if self.positions is None else places_of(tokens, seq_lens), token_types)

    def rows(self, tokens: torch.Tensor, places: torch.Tensor | None, token_types: torch.Tensor | None = None) -> torch.Tensor:
        """The rows of ``tokens`` at ``places``, which a model without positions does not need."""
        x = rows_of_tokens(self.words, tokens)
        if self.types is not None:
            x = x + self.types(torch.zeros_like(tokens) if token_types is None else token_types)
        if self.positions is not None and places is not None:
            check_places(places, self.positions.num_embeddings)
            x = x + self.positions(places)
        return x
