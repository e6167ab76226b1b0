"""``MultiHeadLatentAttention``: attention whose keys and values are made of one small latent a token, which is all that a cache keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fusible import pytorch
from fusible.pytorch import KVCache, Sequential
from fusible.pytorch.engine.chain import ChainCall, ChainPart
from fusible.quantized import QuantizedTensor

__all__ = ["MultiHeadLatentAttention"]


class MultiHeadLatentAttention(nn.Module, ChainPart):
    """DeepSeek-V2's attention (arXiv:2405.04434), but for the product behind it: ``[*, hidden] -> [*, heads * value_width]``.

    ``compress(x)`` is, side by side, queries, ``rank`` columns of a latent, and ``rope_width`` of a key that is rotated for all heads. ``query``, if
    there is one, makes ``heads * (key_width + rope_width)`` columns of the first. ``expand``, a norm and a product, makes of the latent each head's
    key and value: ``kv_b [heads * (key_width + value_width), rank]``. ``options``: of ``pytorch.LatentAttention``, for the rotation and the scale.

    With a cache all heads attend to the latents themselves, and ``kv_b`` stands at the other side of both products: ``q_h k_h = (q_h kv_b_h) latent``
    and ``sum_t p_t v_h = kv_b_h (sum_t p_t latent)``. So a cache has ``rank + rope_width`` numbers of a token, whatever the number of heads. A
    ``kv_b`` that is held quantized is dequantized at each such call, and one that processes share is gathered.
    """

    reads_whole_parts = True

    clears_padding = True

    def __init__(
        self,
        compress: nn.Module,
        query: nn.Module | None,
        expand: Sequential,
        heads: int,
        rank: int,
        key_width: int,
        rope_width: int,
        value_width: int,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.compress, self.query, self.expand = compress, query, expand
        self.heads, self.rank, self.key_width, self.rope_width, self.value_width = heads, rank, key_width, rope_width, value_width
        scaled = {"scale": (key_width + rope_width) ** -0.5, **options}
        self.attention = pytorch.LatentAttention(heads, key_width, rope_width, value_width=value_width, **scaled)
        self.latent_attention = pytorch.LatentAttention(heads, rank, rope_width, groups=1, **scaled)

    def forward(self, x: torch.Tensor, seq_lens: torch.Tensor | None = None, cache: KVCache | None = None) -> torch.Tensor:
        compressed = self.compress(x)
        q, latent, key = compressed.split([compressed.shape[-1] - self.rank - self.rope_width, self.rank, self.rope_width], -1)
        q = q if self.query is None else self.query(q)
        if cache is None:
            return self.attention(torch.cat([q, key, self.expand(latent)], -1), seq_lens)
        norm, kv_b = self.expand
        return self._over_latents(q, key, norm(latent), _weight(kv_b).to(q.dtype), seq_lens, cache)

    def _over_latents(
        self, q: torch.Tensor, key: torch.Tensor, latent: torch.Tensor, kv_b: torch.Tensor, seq_lens: torch.Tensor | None, cache: KVCache
    ) -> torch.Tensor:
        of_keys, of_values = kv_b.view(self.heads, -1, self.rank).split([self.key_width, self.value_width], 1)
        plain, rotated = q.unflatten(-1, (self.heads, -1)).split([self.key_width, self.rope_width], -1)
        absorbed = torch.cat([torch.einsum("...hk,hkr->...hr", plain, of_keys), rotated], -1).flatten(-2)
        y = self.latent_attention(torch.cat([absorbed, key, latent], -1), seq_lens, cache)
        return torch.einsum("...hr,hvr->...hv", y.unflatten(-1, (self.heads, -1)), of_values).flatten(-2)

    def in_chain(self, x: Any, extra: Sequence[torch.Tensor], call: ChainCall) -> Any:
        return self(x, call.seq_lens, call.cache)

    def extra_repr(self) -> str:
        widths = f"key_width={self.key_width}, rope_width={self.rope_width}, value_width={self.value_width}"
        return f"heads={self.heads}, rank={self.rank}, {widths}"


def _weight(layer: nn.Module) -> torch.Tensor:
    """The values of the matrix by which a layer multiplies; of one with an adapter what both make together."""
    weight: Any = layer.merged_weight() if hasattr(layer, "merged_weight") else layer.weight  # type: ignore[operator]
    if isinstance(weight, QuantizedTensor):
        return weight.dequantize()
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight
