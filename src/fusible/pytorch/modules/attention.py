"""Attention. Each takes q, k and v side by side, as one Linear gives them, and gives the heads' outputs side by side."""

from __future__ import annotations

from torch import nn

from fusible import ops
from fusible.errors import ArgumentError, expected
from fusible.pytorch.modules.base import BaseModule

__all__ = ["DotProductAttention", "GroupedQuerySelfAttention", "MultiHeadedSelfAttention", "MultiQuerySelfAttention"]


class DotProductAttention(BaseModule):
    """``[tokens, (heads + 2 groups) * head_width] -> [tokens, heads * head_width]`` (see ``ops.DotProductAttention``).

    ``rope_base`` (10000.0 in most models) rotates q and k by their positions; None leaves them as they are.
    """

    def __init__(
        self,
        heads: int,
        head_width: int,
        *,
        groups: int | None = None,
        causal: bool = True,
        rope_base: float | None = None,
        scale: float | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.heads, self.head_width, self.causal, self.rope_base = heads, head_width, causal, rope_base
        self.groups = heads if groups is None else groups
        super().__init__(ops.DotProductAttention(heads, head_width, groups=groups, causal=causal, rope_base=rope_base, scale=scale))

    def extra_repr(self) -> str:
        return f"heads={self.heads}, groups={self.groups}, head_width={self.head_width}, causal={self.causal}, rope_base={self.rope_base}"


class GroupedQuerySelfAttention(DotProductAttention):
    """Self-attention of ``features = heads * head_width`` columns in which ``heads / groups`` query heads share a key and value head.

    ``[tokens, features + 2 * features * groups / heads] -> [tokens, features]``.
    """

    def __init__(self, features: int, heads: int, groups: int, *, causal: bool = True, rope_base: float | None = None) -> None:
        if heads < 1 or features % heads:
            raise ArgumentError(expected(f"a divisor of the {features} features", of="the number of heads", got=heads, do="choose another number"))
        super().__init__(heads, features // heads, groups=groups, causal=causal, rope_base=rope_base)


class MultiQuerySelfAttention(GroupedQuerySelfAttention):
    """Self-attention in which all query heads share one key and value head (Shazeer 2019, arXiv:1911.02150)."""

    def __init__(self, features: int, heads: int, *, causal: bool = True, rope_base: float | None = None) -> None:
        super().__init__(features, heads, 1, causal=causal, rope_base=rope_base)


class MultiHeadedSelfAttention(GroupedQuerySelfAttention):
    """Self-attention in which every query head has its own key and value: ``[tokens, 3 * features] -> [tokens, features]``."""

    def __init__(self, features: int, heads: int, *, causal: bool = True, rope_base: float | None = None) -> None:
        super().__init__(features, heads, heads, causal=causal, rope_base=rope_base)
