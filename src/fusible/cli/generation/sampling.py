"""The choice of a token from its logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fusible.errors import ArgumentError, expected

__all__ = ["Sampling"]


@dataclass(frozen=True)
class Sampling:
    """``temperature`` 0 takes the likeliest token; else one is drawn from ``softmax(logits / temperature)``, among the ``top_k`` likeliest."""

    temperature: float = 0.8
    top_k: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ArgumentError(expected("a number of at least 0", of="--temperature", got=self.temperature, do="give e.g. 0.8"))
        if self.top_k is not None and self.top_k < 1:
            raise ArgumentError(expected("at least 1", of="--top-k", got=self.top_k, do="give a larger number"))

    def choose(self, logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """int64 ``[sequences]`` from fp32 ``[sequences, vocabulary]``."""
        if self.temperature == 0:
            return logits.argmax(-1)
        scaled = logits / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = scaled.topk(self.top_k).values[:, -1:]
            scaled = scaled.masked_fill(scaled < least, float("-inf"))
        return torch.multinomial(scaled.softmax(-1), 1, generator=generator).squeeze(-1)
