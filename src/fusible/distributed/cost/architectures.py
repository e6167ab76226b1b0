"""Architectures: the sizes of a model, and the ops of its blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from fusible import ops
from fusible.nvte import Tensor, make_nvte_tensor
from fusible.ops import Op

__all__ = ["ARCHITECTURES", "Architecture", "BlockKind", "Experts"]


@dataclass(frozen=True)
class Experts:
    """A mixture of experts (Shazeer et al. 2017, arXiv:1701.06538) in the place of a feed-forward layer: each token goes to ``chosen`` of ``count``
    gated feed-forward layers, ``inner`` wide, and through one more, ``shared`` wide, that all tokens share. ``every``: the last of so many blocks has
    one."""

    count: int
    chosen: int
    inner: int
    shared: int
    every: int = 1


@dataclass(frozen=True)
class BlockKind:
    """``count`` blocks of a model that are alike: the feed-forward layer of every token is ``inner`` wide, beside ``experts`` or without."""

    count: int
    inner: int
    experts: Experts | None = None


@dataclass(frozen=True)
class Architecture:
    """A decoder of ``layers`` blocks: RMS norms, ``heads`` that share ``groups`` of keys and values, and a gated feed-forward layer, ``inner`` wide,
    or in some of the blocks ``experts``; no biases. ``vocabulary``: of the embedding and of the output."""

    layers: int
    hidden: int
    heads: int
    groups: int
    inner: int
    vocabulary: int
    experts: Experts | None = None

    @property
    def kinds(self) -> tuple[BlockKind, ...]:
        """The blocks, those that are alike together."""
        if self.experts is None:
            return (BlockKind(self.layers, self.inner),)
        mixed = self.layers // self.experts.every
        kinds = BlockKind(self.layers - mixed, self.inner), BlockKind(mixed, self.experts.shared, self.experts)
        return tuple(kind for kind in kinds if kind.count)

    @property
    def order(self) -> list[BlockKind]:
        """The kind of each block, from the first to the last."""
        every = self.experts.every if self.experts is not None else 1
        return [self.kinds[-1 if (i + 1) % every == 0 else 0] for i in range(self.layers)]

    @cached_property
    def block_parameters(self) -> int:
        """The parameters of one block without experts."""
        return elements(self.block())

    @cached_property
    def parameters(self) -> int:
        """Of all blocks, the last norm, the embedding and the output."""
        blocks = sum(kind.count * (elements(self.block(kind.inner)) + self.expert_parameters(kind)) for kind in self.kinds)
        return blocks + self.hidden + 2 * self.vocabulary * self.hidden

    @cached_property
    def active_parameters(self) -> int:
        """Those that one token passes through."""
        idle = sum(kind.count * (kind.experts.count - kind.experts.chosen) for kind in self.kinds if kind.experts)
        return self.parameters - idle * (elements(self.expert(self.experts)) if self.experts else 0)

    def expert_parameters(self, kind: BlockKind) -> int:
        """Of the experts of one block, and of the product that chooses among them."""
        experts = kind.experts
        return 0 if experts is None else experts.count * (elements(self.expert(experts)) + self.hidden)

    def block(self, inner: int | None = None) -> list[Op]:
        """The ops of one block, whose feed-forward layer is ``inner`` wide; without experts."""
        h, width = self.hidden, self.hidden // self.heads
        attention = ops.DotProductAttention(self.heads, width, groups=self.groups, rope_base=10000.0)
        qkv = (self.heads + 2 * self.groups) * width
        return [
            *(ops.ResidualBegin(), ops.RMSNorm(weight_of(h)), ops.MMT(weight_of(qkv, h)), attention, ops.MMT(weight_of(h, h)), ops.ResidualEnd()),
            *(ops.ResidualBegin(), ops.RMSNorm(weight_of(h)), *self._gated(self.inner if inner is None else inner), ops.ResidualEnd()),
        ]

    def expert(self, experts: Experts) -> list[Op]:
        """The ops of one expert."""
        return self._gated(experts.inner)

    def head(self) -> list[Op]:
        """The last norm and the output."""
        return [ops.RMSNorm(weight_of(self.hidden)), ops.MMT(weight_of(self.vocabulary, self.hidden))]

    def _gated(self, inner: int) -> list[Op]:
        return [ops.MMT(weight_of(2 * inner, self.hidden)), ops.SwiGLU(), ops.MMT(weight_of(self.hidden, inner))]


ARCHITECTURES = {
    "llama-7b": Architecture(32, 4096, 32, 32, 11008, 32000),
    "llama-70b": Architecture(80, 8192, 64, 8, 28672, 32000),
    "llama-400b-moe": Architecture(48, 5120, 40, 8, 16384, 202048, Experts(128, 1, 8192, 8192, every=2)),
}
"""Llama 2 (Touvron et al. 2023, arXiv:2307.09288, and its published configurations), and Llama 4 Maverick, 400 billion parameters of which a token
passes through 17 (Meta 2025, the text model of the published configuration of Llama-4-Maverick-17B-128E: every other block has 128 experts, of which
a token goes to one, and a shared one)."""


def weight_of(*sizes: int) -> Tensor:
    """A parameter in fp32 of that shape, without memory."""
    return make_nvte_tensor(torch.empty(sizes, device="meta"))


def elements(block: Sequence[Op]) -> int:
    """The parameters of ops."""
    return sum(math.prod(parameter.shape) for op in block for parameter in op.args)
