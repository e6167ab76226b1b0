"""``LanguageModel``: a causal language model in its fastest form, a ``Sequential`` of all its blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fusible.errors import ArgumentError, ShapeError, expected
from fusible.models.parts import Blueprint, stored_in
from fusible.pytorch import KVCache, Recipe, Sequential, autocast

__all__ = ["LanguageModel"]


class LanguageModel(nn.Module):
    """Logits of the next token: an embedding, blocks, a last norm and a head.

    ``model(tokens)``: int64 ``[batch, seq]`` -> ``[batch, seq, vocabulary]`` in the dtype of activations; with ``seq_lens [batch]``, of which each
    row's tokens beyond are padding. ``model(tokens [n], seq_lens [sequences])`` -> ``[n, vocabulary]``: packed sequences, one behind the other, none
    of which sees another. ``next_logits`` is what generation calls. ``config``: what ``config.json`` says of it. ``recipe``: under which it computes,
    or None.
    """

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
        super().__init__()
        self.embedding, self.positions, self.body, self.head = embedding, positions, body, head
        self.config, self.blueprint, self.recipe = dict(config), blueprint, recipe

    @property
    def vocabulary(self) -> int:
        return self.blueprint.vocabulary

    @property
    def context(self) -> int:
        """The most tokens of a sequence that it was made for."""
        return self.blueprint.context

    @property
    def dtype(self) -> torch.dtype:
        """That of activations."""
        return self.embedding.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where its parameters are."""
        return self.embedding.weight.device

    def stored_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters by the names and in the shapes that the family's checkpoints have, but for a head's weight that is the embedding's."""
        plan = self.blueprint
        yield plan.embedding, self.embedding.weight
        if plan.positions is not None and self.positions is not None:
            yield plan.positions, self.positions.weight
        yield from stored_in(plan.body, self.body)
        shared = f"{plan.head.names[0]}.weight" if self.head.weight is self.embedding.weight else None
        yield from ((name, tensor) for name, tensor in plan.head.stored(self.head) if name != shared)

    def new_cache(self, sequences: int, capacity: int, page_size: int | None = None, pages: int | None = None) -> KVCache:
        """A cache of keys and values, in the dtype of activations."""
        return KVCache(sequences, capacity, page_size=page_size, pages=pages, dtype=self.dtype, device=self.device)

    def forward(self, tokens: torch.Tensor, seq_lens: torch.Tensor | None = None) -> torch.Tensor:
        if tokens.dim() != 2 and (tokens.dim() != 1 or seq_lens is None):
            wanted = "[batch, seq], or [tokens] with seq_lens"
            raise ShapeError(expected(wanted, of="tokens of a LanguageModel", got=list(tokens.shape), do="give a row of tokens per sequence"))
        x = self._embed(tokens, self._places(tokens, seq_lens) if self.positions is not None else None)
        with self._computing():
            return self._capped(self.head(self.body(x, seq_lens)))

    def next_logits(self, tokens: torch.Tensor, seq_lens: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """fp32 ``[sequences, vocabulary]``: the logits of the token after the last one of each sequence.

        ``tokens``: int64 ``[n]``, those of the sequences one after another, ``seq_lens`` int32 ``[sequences]`` of each; the row of a sequence that
        has none now says nothing. They follow what ``cache`` has counted in. Raises ``ArgumentError`` for no tokens at all.
        """
        if not tokens.numel():
            raise ArgumentError(expected("at least one token", of="next_logits", got="none", do="call it when a sequence goes on"))
        places = None
        if self.positions is not None:
            parts = [torch.arange(start, start + count) for start, count in zip(cache.lengths, seq_lens.tolist(), strict=True)]
            places = torch.cat(parts).to(tokens.device)
        x = self._embed(tokens, places)
        with self._computing():
            last = self.body(x, seq_lens, cache)[(seq_lens.cumsum(0) - 1).clamp_min(0)]
            return self._capped(self.head(last)).float()

    def _places(self, tokens: torch.Tensor, seq_lens: torch.Tensor | None) -> torch.Tensor:
        """The position of each token in its sequence."""
        counted = torch.arange(tokens.shape[-1], device=tokens.device)
        if tokens.dim() == 2 or seq_lens is None:
            return counted.expand_as(tokens)
        lengths = seq_lens.to(tokens.device)
        return counted - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)

    def _embed(self, tokens: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
        x = F.embedding(tokens, self.embedding.weight)
        if self.blueprint.embedding_scale != 1.0:
            x = x * torch.tensor(self.blueprint.embedding_scale, dtype=x.dtype)  # rounded to the dtype first, as these models were trained
        if self.positions is not None and places is not None:
            if not torch.compiler.is_exporting() and places.numel() and int(places.max()) >= self.context:  # a program's shapes are bounded
                got = int(places.max()) + 1
                raise ArgumentError(expected(f"at most {self.context} tokens", of="a sequence", got=got, do="give a shorter one"))
            x = x + F.embedding(places, self.positions.weight)
        return x

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        cap = self.blueprint.soft_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _computing(self) -> Any:
        return autocast(recipe=self.recipe) if self.recipe is not None else contextlib.nullcontext()
