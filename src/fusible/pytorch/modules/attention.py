"""Attention. Each takes q, k and v side by side, as one Linear gives them, and gives the heads' outputs side by side."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fusible import ops
from fusible.errors import ArgumentError, expected
from fusible.nvte import EVERYWHERE, make_nvte_tensor
from fusible.pytorch.modules.base import BaseModule
from fusible.pytorch.modules.normalization import new_gamma

__all__ = ["DotProductAttention", "GroupedQuerySelfAttention", "MultiHeadedSelfAttention", "MultiQuerySelfAttention", "QKNorm"]


class DotProductAttention(BaseModule):
    """``[tokens, (heads + 2 groups) * head_width] -> [tokens, heads * head_width]`` (see ``ops.DotProductAttention``).

    ``rope_base`` (10000.0 in most models) rotates q and k by their positions; None leaves them as they are. ``window_size``: how many tokens before
    and after its own place a query sees, -1 for all: ``(4095, 0)`` is a sliding window of 4,096 tokens.
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
        window_size: tuple[int, int] = EVERYWHERE,
    ) -> None:
        nn.Module.__init__(self)
        self.heads, self.head_width, self.causal, self.rope_base, self.window_size = heads, head_width, causal, rope_base, window_size
        self.groups = heads if groups is None else groups
        options: dict[str, Any] = {"causal": causal, "rope_base": rope_base, "scale": scale, "window_size": window_size}
        super().__init__(ops.DotProductAttention(heads, head_width, groups=groups, **options))

    def extra_repr(self) -> str:
        window = f", window_size={self.window_size}" if self.window_size != EVERYWHERE else ""
        return f"heads={self.heads}, groups={self.groups}, head_width={self.head_width}, causal={self.causal}, rope_base={self.rope_base}{window}"


class GroupedQuerySelfAttention(DotProductAttention):
    """Self-attention of ``features = heads * head_width`` columns in which ``heads / groups`` query heads share a key and value head.

    ``[tokens, features + 2 * features * groups / heads] -> [tokens, features]``.
    """

    def __init__(
        self,
        features: int,
        heads: int,
        groups: int,
        *,
        causal: bool = True,
        rope_base: float | None = None,
        window_size: tuple[int, int] = EVERYWHERE,
    ) -> None:
        if heads < 1 or features % heads:
            raise ArgumentError(expected(f"a divisor of the {features} features", of="the number of heads", got=heads, do="choose another number"))
        super().__init__(heads, features // heads, groups=groups, causal=causal, rope_base=rope_base, window_size=window_size)


class MultiQuerySelfAttention(GroupedQuerySelfAttention):
    """Self-attention in which all query heads share one key and value head (Shazeer 2019, arXiv:1911.02150)."""

    def __init__(
        self, features: int, heads: int, *, causal: bool = True, rope_base: float | None = None, window_size: tuple[int, int] = EVERYWHERE
    ) -> None:
        super().__init__(features, heads, 1, causal=causal, rope_base=rope_base, window_size=window_size)


class MultiHeadedSelfAttention(GroupedQuerySelfAttention):
    """Self-attention in which every query head has its own key and value: ``[tokens, 3 * features] -> [tokens, features]``."""

    def __init__(
        self, features: int, heads: int, *, causal: bool = True, rope_base: float | None = None, window_size: tuple[int, int] = EVERYWHERE
    ) -> None:
        super().__init__(features, heads, heads, causal=causal, rope_base=rope_base, window_size=window_size)


class QKNorm(BaseModule):
    """RMS normalization of each head of q and of k, in front of attention: ``q_weight``, ``k_weight`` ``[head_width]`` (see ``ops.QKNorm``).

    ``Sequential(Linear(h, 3 * h), QKNorm(heads, h // heads), MultiHeadedSelfAttention(h, heads), Linear(h, h))``.
    """

    def __init__(
        self,
        heads: int,
        head_width: int,
        *,
        groups: int | None = None,
        eps: float = 1e-6,
        zero_centered_gamma: bool = False,
        param_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.heads, self.head_width, self.groups = heads, head_width, heads if groups is None else groups
        self.q_weight = new_gamma(head_width, zero_centered_gamma, param_dtype, device)
        self.k_weight = new_gamma(head_width, zero_centered_gamma, param_dtype, device)
        weights = make_nvte_tensor(self.q_weight), make_nvte_tensor(self.k_weight)
        super().__init__(ops.QKNorm(*weights, heads, groups=groups, eps=eps, zero_centered_gamma=zero_centered_gamma))

    def extra_repr(self) -> str:
        return f"heads={self.heads}, groups={self.groups}, head_width={self.head_width}"
