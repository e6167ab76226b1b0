"""Generation: sequences that grow by a token per step, each from its own prompt, with one cache of keys and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from fusible.models.generation import Sampling
from fusible.pytorch import KVCache

__all__ = ["NextBytes", "generate"]

NextBytes = Callable[[torch.Tensor, torch.Tensor, KVCache], torch.Tensor]
"""``(tokens int64 [n], seq_lens int32 [sequences], cache) -> logits [sequences, vocabulary]`` of what follows the last token of each sequence."""


def generate(
    model: NextBytes, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling, generator: torch.Generator, cache: KVCache
) -> Iterator[list[int]]:
    """Yield one token of each sequence a step, ``count`` times. The prompts, which may differ in length, are read by one call."""
    tokens = torch.tensor([token for prompt in prompts for token in prompt], device="cpu")
    seq_lens = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32, device="cpu")
    ones = torch.ones_like(seq_lens)
    for _ in range(count):
        with torch.inference_mode():
            logits = model(tokens, seq_lens, cache)
            cache.advance(seq_lens)
            tokens, seq_lens = sampling.choose(logits.float(), generator), ones
        yield tokens.tolist()
