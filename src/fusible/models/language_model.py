"""``LanguageModel``: a causal language model in its fastest form, a ``Sequential`` of all its blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fusible.errors import ArgumentError, expected
from fusible.models.parts import Blueprint, stored_in
from fusible.models.pretrained_model import Example, PretrainedModel
from fusible.models.tokens import check_places, check_tokens, example_tokens, places_behind, places_of, rows_of_tokens
from fusible.models.tying import stored_head
from fusible.pytorch import KVCache, Recipe, Sequential

__all__ = ["LanguageModel"]


class LanguageModel(PretrainedModel):
    """Logits of the next token: an embedding, blocks, a last norm and a head.

    ``model(tokens)``: int64 ``[batch, seq]`` -> ``[batch, seq, vocabulary]`` in the dtype of activations; with ``seq_lens [batch]``, of which each
    row's tokens beyond are padding. ``model(tokens [n], seq_lens [sequences])`` -> ``[n, vocabulary]``: packed sequences, one behind the other, none
    of which sees another. ``next_logits`` is what generation calls.
    """

    blueprint: Blueprint

    def __init__(
        self,
        config: Mapping[str, Any],
        blueprint: Blueprint,
        embedding: nn.Embedding,
        positions: nn.Embedding | None,
        body: Sequential,
        head: nn.Module,
        recipe: Recipe | None = None,
    ) -> None:
        super().__init__(config, blueprint, recipe)
        self.embedding, self.positions, self.body, self.head = embedding, positions, body, head

    @property
    def counts_places(self) -> bool:
        """Whether it adds rows by the places of its tokens, which it counts from 0 on: so a sequence is not to be shared out."""
        return self.positions is not None

    @property
    def vocabulary(self) -> int:
        return self.blueprint.vocabulary

    @property
    def context(self) -> int:
        """The most tokens of a sequence that it was made for."""
        return self.blueprint.context

    def stored_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        plan = self.blueprint
        yield plan.embedding, self.embedding.weight
        if plan.positions is not None and self.positions is not None:
            yield plan.positions, self.positions.weight
        yield from stored_in(plan.body, self.body)
        yield from stored_head([plan.head], [self.head], self.embedding.weight)

    def examples(self) -> tuple[Example, ...]:
        return (example_tokens(self.context, self.device),)

    def new_cache(self, sequences: int, capacity: int, page_size: int | None = None, pages: int | None = None) -> KVCache:
        """A cache of keys and values, in the dtype of activations."""
        return KVCache(sequences, capacity, page_size=page_size, pages=pages, dtype=self.dtype, device=self.device)

    def forward(self, tokens: torch.Tensor, seq_lens: torch.Tensor | None = None) -> torch.Tensor:
        check_tokens(tokens, seq_lens, "a LanguageModel")
        x = self._embed(tokens, places_of(tokens, seq_lens) if self.positions is not None else None)
        with self._computing():
            return self._capped(self.head(self.body(x, seq_lens)))

    def next_logits(self, tokens: torch.Tensor, seq_lens: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """fp32 ``[sequences, vocabulary]``: the logits of the token after the last one of each sequence.

        ``tokens``: int64 ``[n]``, those of the sequences one after another, ``seq_lens`` int32 ``[sequences]`` of each; the row of a sequence that
        has none now says nothing. They follow what ``cache`` has counted in. Raises ``ArgumentError`` for no tokens at all.
        """
        if not tokens.numel():
            raise ArgumentError(expected("at least one token", of="next_logits", got="none", do="call it when a sequence goes on"))
        places = None if self.positions is None else places_behind(cache.lengths, seq_lens, tokens.device)
        x = self._embed(tokens, places)
        with self._computing():
            last = self.body(x, seq_lens, cache)[(seq_lens.cumsum(0) - 1).clamp_min(0)]
            return self._capped(self.head(last)).float()

    def _embed(self, tokens: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
        x = rows_of_tokens(self.embedding, tokens)
        if self.blueprint.embedding_scale != 1.0:
            x = x * torch.tensor(
                self.blueprint.embedding_scale, dtype=x.dtype, device="cpu"
            )  # rounded to the dtype first, as these models were trained
        if self.positions is not None and places is not None:
            check_places(places, self.context)
            x = x + self.positions(places)
        return x

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        cap = self.blueprint.soft_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap
