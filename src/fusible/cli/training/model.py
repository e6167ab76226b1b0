"""The byte-level GPT, and its recipes by name."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from fusible.cli.training.options import BYTES, FP8_RECIPES, TrainOptions
from fusible.ops import MMT
from fusible.pytorch import (
    GELU,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    HighPrecision,
    KVCache,
    LayerNorm,
    Linear,
    MixtureOfExperts,
    MultiHeadedSelfAttention,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    Residual,
    Sequential,
    autocast,
)

__all__ = ["ByteGPT", "RECIPES_BY_NAME", "Stage", "cross_entropy"]

RECIPES_BY_NAME: dict[str, tuple[Recipe, torch.dtype]] = {
    "bf16": (HighPrecision(), torch.bfloat16),
    "fp32": (HighPrecision(), torch.float32),
    "delayed": (DelayedScaling(), torch.bfloat16),
    "current": (Float8CurrentScaling(), torch.bfloat16),
    "mxfp8": (MXFP8BlockScaling(), torch.bfloat16),
    "block": (Float8BlockScaling(), torch.bfloat16),
    "nvfp4": (NVFP4BlockScaling(), torch.bfloat16),
}
"""The recipe of each name of ``RECIPES``, and the dtype of activations."""


class Stage(nn.Module):
    """A stretch of a ``ByteGPT``, by the names of the whole: all of it, or what one process of a pipeline has.

    ``embedding``: of bytes; where the model does not begin, an ``nn.Identity``. ``dtype``: of what it gives; fp32 where the model ends.
    """

    def __init__(self, embedding: nn.Module, body: Sequential, hidden: int, recipe: Recipe, activation: torch.dtype, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding, self.body, self.hidden = embedding, body, hidden
        self.recipe, self.activation, self.dtype = recipe, activation, dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """int64 ``[batch, seq]`` -> fp32 ``[batch, seq, 256]``. Between stages: ``[batch, seq, hidden]``."""
        with autocast(recipe=self.recipe):
            return self.body(self._embed(x)).to(self.dtype)

    def explain(self, text: torch.Tensor) -> str:
        """The fused passes of a training step on ``text``, int64 ``[batch, seq]``."""
        with autocast(recipe=self.recipe):
            return self.body.explain(self.activations(text, text.device))

    def activations(self, text: torch.Tensor, device: torch.device | str) -> torch.Tensor:
        """A tensor of the form of what the body takes, for ``text``; nobody has written to it."""
        return torch.empty((*text.shape, self.hidden), dtype=self.activation, device=device, requires_grad=True)

    @property
    def matrix_products(self) -> int:
        """How many matrix products with a weight (MMTs) the pipeline has."""
        return sum(isinstance(bound.op, MMT) for bound in self.body.bound_ops())

    def _embed(self, x: torch.Tensor) -> torch.Tensor:
        return self.embedding(x).to(self.activation)


class ByteGPT(Stage):
    """Logits of the next byte: an embedding, pre-norm transformer blocks with rotary attention, a last norm and a head.

    The embedding is torch's, of unit variance (of 0.02, the default run ended some 5 % higher); all that follows is one ``Sequential`` under the
    recipe, but the products of ``options.bf16_layers``. With ``options.experts`` the second half of each block is a mixture of them. Parameters are
    fp32; activations bf16, or fp32 under ``fp32``.
    """

    def __init__(self, options: TrainOptions, recipe: str) -> None:
        chosen, activation = RECIPES_BY_NAME[recipe]
        if options.fp8_format is not None and recipe in FP8_RECIPES:
            chosen = replace(chosen, fp8_format=Format[options.fp8_format.upper()])
        h = options.hidden
        embedding = nn.Embedding(BYTES, h)
        high = [options.in_bf16(layer) for layer in range(options.layers)]
        blocks = [block for kept in high for block in (attention_block(h, options.heads, kept), _second_block(options, kept))]
        body = Sequential(*blocks, LayerNorm(h), Linear(h, BYTES, high_precision="head" in options.bf16_layers))
        super().__init__(embedding, body.compile(options.executor), h, chosen, activation, torch.float32)

    def next_bytes(self, text: torch.Tensor, seq_lens: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """int64 ``[bytes]`` of sequences one after another, ``seq_lens`` int32 ``[sequences]``: fp32 ``[sequences, 256]``, the logits of the byte
        after the last of each."""
        with autocast(recipe=self.recipe):
            return self.body(self._embed(text), seq_lens, cache)[seq_lens.cumsum(0) - 1].float()

    def loss(self, text: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy of the bytes that follow, in nats per byte."""
        return cross_entropy(self(text), following)


def cross_entropy(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy of logits, in nats per byte."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())


def attention_block(hidden: int, heads: int, high_precision: bool = False) -> Residual:
    """``x + project(attention(qkv(norm(x))))``."""
    attention = MultiHeadedSelfAttention(hidden, heads, rope_base=10000.0)
    qkv = Linear(hidden, 3 * hidden, high_precision=high_precision)
    return Residual(LayerNorm(hidden), qkv, attention, Linear(hidden, hidden, high_precision=high_precision))


def feed_forward_block(hidden: int, high_precision: bool = False) -> Residual:
    """``x + down(gelu(up(norm(x))))``, four times as wide inside."""
    up = Linear(hidden, 4 * hidden, high_precision=high_precision)
    return Residual(LayerNorm(hidden), up, GELU(), Linear(4 * hidden, hidden, high_precision=high_precision))


def experts_block(hidden: int, experts: int, top_k: int) -> Residual:
    """The same of ``experts``, each as wide inside, of which a token takes ``top_k``."""
    return Residual(LayerNorm(hidden), MixtureOfExperts(hidden, 4 * hidden, experts, top_k, activation="gelu"))


def _second_block(options: TrainOptions, high_precision: bool) -> Residual:
    return experts_block(options.hidden, options.experts, options.top_k) if options.experts else feed_forward_block(options.hidden, high_precision)
