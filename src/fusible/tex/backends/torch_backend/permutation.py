"""Tokens to their experts and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusible.tex.backends.torch_backend.fp8 import decode, encode
from fusible.tex.protocol import FP8_MAX, fp8_format, to_dtype

__all__ = ["permute", "unpermute", "unpermute_gradient"]


def permute(x: Tensor, indices: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The copies of ``x [T, H]`` in the stable order of ``indices [T, K]``, cut or filled with 0 to ``rows``; and where each copy went."""
    tokens, copies = indices.shape
    order = indices.reshape(-1).argsort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    place = torch.where(place < rows, place, -1).view(tokens, copies).t().reshape(-1).to(torch.int32)
    moved = x.index_select(0, order[:rows].div(max(copies, 1), rounding_mode="floor"))
    if rows > len(order):
        moved = torch.cat((moved, moved.new_zeros(rows - len(order), x.shape[1])))
    return moved, place


def _is_fp8(x: Tensor, dtype: Any) -> bool:
    return x.dtype is torch.uint8 and to_dtype(dtype) in FP8_MAX


def _fetch(x: Tensor, rows: Tensor) -> Tensor:
    """fp32 ``x[rows]``, 0 where a row is -1 (whatever ``x`` holds, NaN included)."""
    if not len(x):
        return torch.zeros(len(rows), x.shape[1], dtype=torch.float32, device=x.device)
    found = x.index_select(0, rows.clamp_min(0)).to(torch.float32)
    return found.masked_fill_((rows < 0).unsqueeze(-1), 0.0)


def unpermute(x: Tensor, dtype: Any, row_id_map: Tensor, prob: Tensor | None, tokens: int, copies: int) -> Tensor:
    """``sum_k prob[t, k] * x[row_id_map[k * T + t]]``."""
    fp8 = _is_fp8(x, dtype)
    values = decode(x, dtype) if fp8 else x
    total: Tensor | None = None
    for k, rows in enumerate(row_id_map.view(copies, tokens)):
        found = _fetch(values, rows)
        if prob is not None:
            found.mul_(prob[:, k, None])
        total = found if total is None else total.add_(found)
    if total is None:
        return x.new_zeros(tokens, x.shape[1])
    if fp8:
        return encode(total if prob is not None else total.div_(copies), fp8_format(dtype))
    return total.to(x.dtype)


def unpermute_gradient(g: Tensor, x: Tensor, row_id_map: Tensor, prob: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradients for ``x`` and for ``prob [T, K]`` (0 ``[T, 1]`` where there is none)."""
    tokens, copies = (len(row_id_map), 1) if prob is None else prob.shape
    places = row_id_map.view(copies, tokens)
    # Each row of x went to at most one token: turned round, the map tells every row where its gradient comes from.
    source = torch.full((len(x) + 1,), -1, dtype=torch.int64, device=x.device)
    flat = torch.where(row_id_map < 0, len(x), row_id_map).to(torch.int64)
    source = source.scatter_(0, flat, torch.arange(len(flat), device=x.device))[:-1]
    if prob is None:
        return _fetch(g, source).to(g.dtype), torch.zeros(tokens, 1, dtype=torch.float32, device=g.device)
    weights = prob.t().reshape(-1).float()
    act_grad = _gathered(g, source, weights, tokens) if len(flat) else g.new_zeros(x.shape)
    prob_grad = torch.empty(tokens, copies, dtype=torch.float32, device=g.device)
    values = g.to(torch.float32)
    for k, rows in enumerate(places):
        prob_grad[:, k] = _fetch(x, rows).mul_(values).sum(-1)
    return act_grad, prob_grad


def _gathered(g: Tensor, source: Tensor, weights: Tensor, tokens: int) -> Tensor:
    """``g`` times its weight at each row's ``source`` (``k * tokens + t``), 0 where that is -1."""
    token = torch.where(source < 0, -1, source % tokens)
    return _fetch(g, token).mul_(weights.index_select(0, source.clamp_min(0)).unsqueeze(-1)).to(g.dtype)
