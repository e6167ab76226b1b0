"""NVIDIA's masks, windows and ALiBi slopes in the form that kernels take: cumulative sequence lengths, and biases of scores."""

from __future__ import annotations

from typing import TypeAlias

import torch

from fusible.compat.te_modules.attention_call import Lengths
from fusible.errors import ArgumentError, expected

__all__ = ["lengths_of", "mask_bias", "slopes_bias", "window_of"]

Mask: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""NVIDIA's ``attention_mask``: one for both, or one for the queries and one for the keys."""

_HIDDEN = -10000.0
"""The bias of a score that an arbitrary mask hides. It is finite, so that a row that is hidden as a whole has an output."""


def window_of(mask: str, window: tuple[int, int] | None) -> tuple[int, int]:
    """The window ``(left, right)`` of keys that a query sees before and after its own place, -1 for all, under ``mask``: a causal mask shows no key
    after it. Raises ``ArgumentError`` for numbers that are no such counts."""
    left, right = (-1, -1) if window is None else window
    if "causal" in mask:
        right = 0
    elif (left, right) == (-1, 0):
        right = -1
    if left < -1 or right < -1 or ("causal" not in mask and (left < 0) != (right < 0)):
        do = "give two counts, or (-1, -1) for all"
        raise ArgumentError(expected("numbers of keys before and behind", of=f"window_size of attention with {mask}", got=window, do=do))
    return left, right


def lengths_of(
    cu_lengths: Lengths,
    longest: tuple[int | None, int | None],
    q: torch.Tensor,
    k: torch.Tensor,
    format_: str,
    mask: str,
    attention_mask: Mask | None,
) -> tuple[Lengths, tuple[int, int]]:
    """The cumulative lengths of the sequences, and the longest lengths of queries and of keys. They come from ``cu_lengths``, from a padding mask, or
    from the shapes of q and k. Raises ``ArgumentError`` where none of these tells them."""
    if format_ == "thd":
        if cu_lengths.q is None or cu_lengths.kv is None or "padding" not in mask:
            got = f"attn_mask_type={mask!r}" if "padding" not in mask else "none"
            what, do = "cu_seqlens_q, cu_seqlens_kv and a padding mask", "give them, or another qkv_format"
            raise ArgumentError(expected(what, of="attention with qkv_format='thd'", got=got, do=do))
        ends = (
            cu_lengths.q if cu_lengths.q_padded is None else cu_lengths.q_padded,
            cu_lengths.kv if cu_lengths.kv_padded is None else cu_lengths.kv_padded,
        )
        rounded = [64 * -(-int(cu.diff().max()) // 64) if known is None else known for cu, known in zip(ends, longest, strict=True)]
        return cu_lengths, (rounded[0], rounded[1])
    sequence, batch = (0, 1) if format_ == "sbhd" else (1, 0)
    found: list[torch.Tensor] = []
    for cu, x, place in ((cu_lengths.q, q, 0), (cu_lengths.kv, k, -1)):
        if cu is not None:
            found.append(cu)
        elif "padding" not in mask:
            found.append(torch.arange(x.shape[batch] + 1, dtype=torch.int32, device=x.device) * x.shape[sequence])
        else:
            found.append(_ends(attention_mask if not isinstance(attention_mask, tuple | list) else attention_mask[place], mask))
    return Lengths(found[0], found[1], cu_lengths.q_padded, cu_lengths.kv_padded), (q.shape[sequence], k.shape[sequence])


def _ends(attention_mask: torch.Tensor | None, mask: str) -> torch.Tensor:
    """The cumulative lengths, int32 ``[b + 1]``, of a mask ``[b, 1, 1, s]`` that is True for padding behind the tokens."""
    if attention_mask is None or attention_mask.dtype is not torch.bool:
        got = "none" if attention_mask is None else str(attention_mask.dtype)
        do = "give one, True for padding, or cu_seqlens_q and cu_seqlens_kv"
        raise ArgumentError(expected("a bool attention_mask [b, 1, 1, s]", of=f"attention with {mask}", got=got, do=do))
    counts = attention_mask.flatten(1).logical_not().sum(1).cumsum(0, dtype=torch.int32)
    return torch.cat([counts.new_zeros(1), counts])


def mask_bias(attention_mask: Mask | None, bias_type: str, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """An arbitrary mask as a bias ``[b or 1, h or 1, s_q, s_kv]`` after scaling: -10000 where the mask is True (hidden), elsewhere ``bias`` or 0."""
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.dtype is not torch.bool or bias_type not in ("no_bias", "post_scale_bias"):
        got = bias_type if bias_type not in ("no_bias", "post_scale_bias") else type(attention_mask).__name__
        do = "give a mask that is True for what is hidden"
        raise ArgumentError(expected("a bool attention_mask, and no bias before scaling", of="attention with arbitrary", got=got, do=do))
    hidden = torch.zeros(attention_mask.shape, dtype=dtype, device=attention_mask.device).masked_fill(attention_mask, _HIDDEN)
    return hidden if bias is None else torch.where(attention_mask, hidden, bias.to(dtype))


def slopes_bias(slopes: torch.Tensor, queries: int, keys: int, bottom_right: bool, dtype: torch.dtype) -> torch.Tensor:
    """ALiBi (arXiv:2108.12409) by slopes of one's own, ``[h]`` or ``[b, h]``: ``-slope * |distance|``, ``[1 or b, h, queries, keys]``."""
    places = torch.arange(queries, device=slopes.device).unsqueeze(1) - torch.arange(keys, device=slopes.device)
    distance = (places + (keys - queries if bottom_right else 0)).abs()
    each = slopes.unsqueeze(0) if slopes.ndim == 1 else slopes
    return (-distance * each.float()[:, :, None, None]).to(dtype)
