"""NVIDIA's masks, windows and ALiBi slopes in the form that kernels take: cumulative sequence lengths, and biases of scores."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusible.compat.te_modules.attention_call import Lengths
from fusible.compat.te_modules.attention_padding import Mask, Order, of_padding
from fusible.errors import ArgumentError, ShapeError, expected

__all__ = ["bias_of", "lengths_of", "mask_bias", "window_of"]

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
) -> tuple[Lengths, tuple[int, int], Order | None]:
    """The cumulative lengths of the sequences, the longest lengths of queries and of keys, and the order in which they lie so, None where they do.
    They come from ``cu_lengths``, from a padding mask, or from the shapes of q and k. Raises ``ArgumentError`` where none of these tells them, and
    what ``of_padding`` does."""
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
        return cu_lengths, (rounded[0], rounded[1]), None
    sequence, batch = (0, 1) if format_ == "sbhd" else (1, 0)
    tokens = q.shape[sequence], k.shape[sequence]
    if "padding" in mask:
        lengths, order = of_padding(attention_mask, cu_lengths, mask, q.shape[batch], tokens)
        return lengths, tokens, order
    every = torch.arange(q.shape[batch] + 1, dtype=torch.int32, device=q.device)
    found = [every * size if cu is None else cu for cu, size in zip((cu_lengths.q, cu_lengths.kv), tokens, strict=True)]
    return Lengths(found[0], found[1], cu_lengths.q_padded, cu_lengths.kv_padded), tokens, None


def bias_of(
    kind: str,
    bias: torch.Tensor | None,
    slopes: torch.Tensor | None,
    q: torch.Tensor,
    scores: Sequence[int],
    lengths: Lengths | None,
    bottom_right: bool,
) -> tuple[str, torch.Tensor | None]:
    """The kind of a bias of ``scores``, ``[b, h, sq, skv]``, and its tensor: that of ``core_attention_bias``, or of slopes of one's own. ``lengths``:
    those of sequences that have some of their own. Raises ``ArgumentError`` for one of another kind, ``ShapeError`` for one of other scores."""
    if slopes is not None and kind != "alibi":
        of, do = "core_attention_bias_type of DotProductAttention with alibi_slopes", "name it, or leave the slopes out"
        raise ArgumentError(expected("'alibi'", of=of, got=repr(kind), do=do))
    if kind in ("no_bias", "alibi"):  # without a kind a bias is not looked at, as in NVIDIA's package
        if kind == "alibi" and bias is not None:
            of, do = "core_attention_bias of DotProductAttention with 'alibi'", "leave it out, or name another core_attention_bias_type"
            raise ArgumentError(expected("none", of=of, got=f"a tensor {list(bias.shape)}", do=do))
        return (kind, None) if slopes is None else ("post_scale_bias", _slopes_bias(slopes, q, scores, lengths, bottom_right))
    if bias is None:
        of, do = f"core_attention_bias of DotProductAttention with {kind!r}", "give one, or leave core_attention_bias_type out"
        raise ArgumentError(expected("a tensor", of=of, got="none", do=do))
    _check_shape(bias, scores, "core_attention_bias of DotProductAttention")
    return kind, bias


def mask_bias(
    attention_mask: Mask | None, kind: str, bias: torch.Tensor | None, dtype: torch.dtype, scores: Sequence[int]
) -> tuple[str, torch.Tensor | None]:
    """An arbitrary mask as a bias ``[b or 1, h or 1, sq or 1, skv or 1]`` after scaling, of its kind: -10000 where the mask is True (hidden),
    elsewhere ``bias`` or 0."""
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.dtype is not torch.bool or kind not in ("no_bias", "post_scale_bias"):
        got = kind if kind not in ("no_bias", "post_scale_bias") else type(attention_mask).__name__
        do = "give a mask that is True for what is hidden"
        raise ArgumentError(expected("a bool attention_mask, and no bias before scaling", of="attention with arbitrary", got=got, do=do))
    shown = attention_mask.reshape((1,) * (4 - attention_mask.ndim) + tuple(attention_mask.shape))
    _check_shape(shown, scores, "attention_mask of attention with arbitrary")
    hidden = torch.zeros(shown.shape, dtype=dtype, device=shown.device).masked_fill(shown, _HIDDEN)
    return "post_scale_bias", hidden if bias is None else torch.where(shown, hidden, bias.to(dtype))


def _slopes_bias(slopes: torch.Tensor, q: torch.Tensor, scores: Sequence[int], lengths: Lengths | None, bottom_right: bool) -> torch.Tensor:
    """ALiBi (arXiv:2108.12409) by slopes of one's own, ``[h]`` or ``[b, h]``: ``-slope * |distance|``, ``[b or 1, h, sq, skv]``. Places are counted
    from the end of each sequence's own tokens where they are from the ``bottom_right``. It is fp32 on the host, as the slopes that attention knows
    by itself are used; GPUs' kernels take a bias of q's type."""
    batch, heads, queries, keys = scores
    each = slopes.unsqueeze(0) if slopes.ndim == 1 else slopes
    _check_shape(each, (batch, heads), "alibi_slopes of DotProductAttention")
    distance = torch.arange(queries, device=slopes.device).unsqueeze(1) - torch.arange(keys, device=slopes.device)
    if bottom_right and lengths is None:
        distance = distance + (keys - queries)
    elif bottom_right and lengths is not None:
        more = (lengths.kv.diff() - lengths.q.diff())[:batch].to(slopes.device)
        distance = distance + more[:, None, None, None]
    return (-distance.abs() * each.float()[:, :, None, None]).to(torch.promote_types(q.dtype, torch.float32) if q.is_cpu else q.dtype)


def _check_shape(x: torch.Tensor, sizes: Sequence[int], of: str) -> None:
    """Raise ``ShapeError`` unless ``x`` is of these sizes, or 1 where all along a dimension have the same."""
    if x.ndim != len(sizes) or any(found not in (1, size) for found, size in zip(x.shape, sizes, strict=True)):
        wanted = f"[{', '.join(f'{size} or 1' for size in sizes)}]"
        raise ShapeError(expected(wanted, of=of, got=list(x.shape), do="give one of these scores"))
