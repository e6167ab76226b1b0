"""Attention: torch's scaled dot products, or their formula where scores have options that these lack."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from fusible import ops
from fusible.errors import ArgumentError, expected
from fusible.nvte import Rotary, current_pass
from fusible.ops.attention import AttentionBase
from fusible.pytorch.lowering.pointwise import wide
from fusible.pytorch.lowering.registry import Args, lowers, written

__all__: list[str] = []

Attention = ops.DotProductAttention | ops.CrossAttention


@lowers(ops.DotProductAttention)
def _attention(op: ops.DotProductAttention, x: torch.Tensor, args: Args) -> torch.Tensor:
    _check_high_precision(op)
    rows = written(x, op.x_dtype)
    rows = rows if rows.ndim == 3 else rows.unsqueeze(0)
    counts = op.heads, op.groups, op.groups
    parts = rows.split([count * op.head_width for count in counts], -1)
    # [batch, heads, tokens, width]
    q, k, v = (part.unflatten(-1, (count, op.head_width)).transpose(1, 2) for part, count in zip(parts, counts, strict=True))
    if op.rotary is not None:
        rotary, width = op.rotary, op.head_width
        cos, sin = current_pass().once(("rope angles", rotary, width), lambda: _angles(rotary, width, q))  # every layer rotates by the same
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
    k, v = (_of_heads(part, op.heads // op.groups) for part in (k, v))
    y = _attended(op, q, k, v, _side(op, "mask", args)).transpose(1, 2).flatten(2)
    return written(y if x.ndim == 3 else y.squeeze(0), op.y_dtype)


@lowers(ops.LatentAttention)
def _latent_attention(op: ops.LatentAttention, x: torch.Tensor, args: Args) -> torch.Tensor:
    _check_high_precision(op)
    rows = written(x, op.x_dtype)
    rows = rows if rows.ndim == 3 else rows.unsqueeze(0)
    own = op.own_values or 0
    q, rotated, kv = rows.split([op.heads * op.head_width, op.rope_width, op.groups * (op.key_width + own)], -1)
    # [batch, heads, tokens, width]
    q, rotated, kv = (part.unflatten(-1, (count, -1)).transpose(1, 2) for part, count in ((q, op.heads), (rotated, 1), (kv, op.groups)))
    plain, turned = q.split([op.key_width, op.rope_width], -1)
    k, v = (kv, kv) if op.own_values is None else kv.split([op.key_width, own], -1)
    rotary, width = op.rotary, op.rope_width
    cos, sin = current_pass().once(("rope angles", rotary, width), lambda: _angles(rotary, width, q))
    if rotary.interleaved:  # in the order of halves, of q as of k
        turned, rotated = (part.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for part in (turned, rotated))
    turned = _rotated(turned, cos, sin)
    turned = turned if op.rope_scale == 1.0 else (wide(turned) * op.rope_scale**2).to(turned.dtype)
    q = torch.cat([plain, turned], -1)
    k = torch.cat([k, _rotated(rotated, cos, sin).expand(-1, op.groups, -1, -1)], -1)
    k, v = (_of_heads(part, op.heads // op.groups) for part in (k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=op.causal, scale=op.scale).transpose(1, 2).flatten(2)
    return written(y if x.ndim == 3 else y.squeeze(0), op.y_dtype)


@lowers(ops.CrossAttention)
def _cross_attention(op: ops.CrossAttention, x: torch.Tensor, args: Args) -> torch.Tensor:
    _check_high_precision(op)
    rows, kv = written(x, op.x_dtype), _side(op, "kv", args)
    rows = rows if rows.ndim == 3 else rows.unsqueeze(0)
    kv = kv if kv.ndim == 3 else kv.unflatten(0, (rows.shape[0], -1))  # of x's own sequences
    q = rows.unflatten(-1, (op.heads, op.head_width)).transpose(1, 2)
    k, v = (
        _of_heads(part.unflatten(-1, (op.groups, op.head_width)).transpose(1, 2), op.heads // op.groups) for part in kv.to(rows.dtype).chunk(2, -1)
    )
    y = _attended(op, q, k, v, _side(op, "mask", args)).transpose(1, 2).flatten(2)
    return written(y if x.ndim == 3 else y.squeeze(0), op.y_dtype)


def _check_high_precision(op: AttentionBase) -> None:
    if op.qkv_dtype is not None:
        got, do = "queries, keys and values in 8 bits", "export it without fp8_dpa"
        raise ArgumentError(expected("attention in high precision", of="a model to export", got=got, do=do))


def _side(op: Attention, name: str, args: Args) -> Any:
    """A side input by its kind, None where there is none."""
    return op.side(name, args)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType] - a torch tensor here


def _angles(rotary: Rotary, head_width: int, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the positions, fp32 ``[tokens, width]``: pair i is columns i and i + width / 2."""
    width = rotary.width or head_width
    steps = torch.arange(0, width, 2, dtype=torch.float32, device=q.device)
    frequencies = rotary.base ** (steps / -width)
    if rotary.factors:
        frequencies = frequencies * torch.tensor(rotary.factors, dtype=torch.float32, device=q.device)
    angles = torch.arange(q.shape[2], dtype=torch.float32, device=q.device)[:, None] * frequencies
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    width = cos.shape[-1]
    head = wide(x[..., :width])
    first, second = head.chunk(2, -1)
    turned = (head * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)
    return turned if width == x.shape[-1] else torch.cat([turned, x[..., width:]], -1)


def _of_heads(x: torch.Tensor, share: int) -> torch.Tensor:
    """Keys or values with those of a group repeated for each of the ``share`` heads that look at them."""
    return x if share == 1 else x.unsqueeze(2).expand(-1, -1, share, -1, -1).flatten(1, 2)


def _attended(op: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    left, right = op.window_size
    own = left < 0 and right < 0  # no window: the kernels of torch know what a causal token sees
    if op.scores.soft_cap is None and op.scores.alibi_slopes is None and mask is None:
        seen = None if own else _seen(op, q)
        return F.scaled_dot_product_attention(q, k, v, seen, is_causal=own and op.causal, scale=op.scale)
    scores = wide(q) @ wide(k).transpose(-1, -2) * op.scale
    if op.scores.soft_cap is not None:
        scores = torch.tanh(scores / op.scores.soft_cap) * op.scores.soft_cap
    if op.scores.alibi_slopes is not None:
        slopes = torch.tensor(op.scores.alibi_slopes, dtype=scores.dtype, device=q.device)
        scores = scores - slopes[:, None, None] * _behind(q).abs()
    if mask is not None:
        scores = torch.where(mask, scores, -torch.inf) if mask.dtype is torch.bool else scores + mask
    if op.causal or not own:
        scores = torch.where(_seen(op, q), scores, -torch.inf)
    return (torch.softmax(scores, -1) @ wide(v)).to(q.dtype)


def _behind(q: torch.Tensor) -> torch.Tensor:
    """int64 ``[queries, keys]``: how far a key is behind a query."""
    places = torch.arange(q.shape[2], device=q.device)
    return places[:, None] - places


def _seen(op: Attention, q: torch.Tensor) -> torch.Tensor:
    """bool ``[queries, keys]``: whether a query sees a key."""
    behind = _behind(q)
    left, right = op.window_size
    right = 0 if op.causal else right
    seen = behind >= -right if right >= 0 else torch.ones_like(behind, dtype=torch.bool)
    return seen & (behind <= left) if left >= 0 else seen
