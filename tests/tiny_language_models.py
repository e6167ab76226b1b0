"""Language models of a few thousand weights, as generation takes them: what the engine and the server do is the same for a large one."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from fusible.pytorch import GELU, KVCache, LayerNorm, Linear, MultiHeadedSelfAttention, Residual, Sequential

__all__ = ["BrokenModel", "SlowModel", "TinyModel"]


class TinyModel(nn.Module):
    """Two transformer blocks in fp32, with weights by a seed. Their logits are spread as wide as those of trained models."""

    def __init__(self, vocabulary: int = 256, context: int = 256, hidden: int = 32, heads: int = 2, seed: int = 0) -> None:
        super().__init__()
        self.vocabulary, self.context = vocabulary, context
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(vocabulary, hidden)
            blocks = [block for _ in range(2) for block in self._block(hidden, heads)]
            self.body = Sequential(*blocks, LayerNorm(hidden), Linear(hidden, vocabulary))
            for weight in self.body.parameters():
                if weight.dim() == 2:
                    nn.init.normal_(weight, std=2 * weight.shape[-1] ** -0.5)
        self.eval()

    @staticmethod
    def _block(hidden: int, heads: int) -> list[Residual]:
        attention = MultiHeadedSelfAttention(hidden, heads, rope_base=10000.0)
        return [
            Residual(LayerNorm(hidden), Linear(hidden, 3 * hidden), attention, Linear(hidden, hidden)),
            Residual(LayerNorm(hidden), Linear(hidden, 2 * hidden), GELU(), Linear(2 * hidden, hidden)),
        ]

    def next_logits(self, tokens: Tensor, seq_lens: Tensor, cache: KVCache) -> Tensor:
        return self.body(self.embedding(tokens), seq_lens, cache)[seq_lens.cumsum(0) - 1]

    def new_cache(self, sequences: int, capacity: int, page_size: int | None = None, pages: int | None = None) -> KVCache:
        return KVCache(sequences, capacity, page_size=page_size, pages=pages, dtype=torch.float32)

    def whole(self, tokens: list[int]) -> Tensor:
        """fp32 ``[tokens, vocabulary]``, without a cache."""
        with torch.no_grad():
            return self.body(self.embedding(torch.tensor(tokens)), torch.tensor([len(tokens)], dtype=torch.int32))


class SlowModel(TinyModel):
    """One that takes its time, so that requests pile up before it, and that never ends a text by itself, by token 2."""

    def __init__(self, vocabulary: int = 256, seconds: float = 0.02) -> None:
        super().__init__(vocabulary)
        self.seconds = seconds

    def next_logits(self, tokens: Tensor, seq_lens: Tensor, cache: KVCache) -> Tensor:
        time.sleep(self.seconds)
        logits = super().next_logits(tokens, seq_lens, cache)
        return logits.index_fill(-1, torch.tensor([2]), float("-inf"))


class BrokenModel(TinyModel):
    """One whose calls numbered ``fails`` raise, before or ``after`` they have computed; rows of a sequence that has ``poison`` are NaN."""

    def __init__(self, fails: set[int] = frozenset(), poison: int | None = None) -> None:  # type: ignore[assignment]
        super().__init__()
        self.fails, self.poison, self.calls = fails, poison, 0

    def next_logits(self, tokens: Tensor, seq_lens: Tensor, cache: KVCache) -> Tensor:
        self.calls += 1
        logits = super().next_logits(tokens, seq_lens, cache)
        if self.calls in self.fails:
            raise RuntimeError(f"call {self.calls} failed")
        parts = tokens.split(seq_lens.tolist())
        bad = torch.tensor([self.poison is not None and bool((part == self.poison).any()) for part in parts])
        return logits.masked_fill(bad.unsqueeze(-1), float("nan"))
