"""The tensors that attention's torch-facing backends make: outputs, gradients, the state of the random draw; and views of what they are given."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fusible.errors import ArgumentError, expected
from fusible.tex.attention_layout import Layout

__all__ = ["draw_rng_state", "gradients", "heads_first", "outputs"]


def heads_first(x: Tensor, name: str) -> Tensor:
    """A dense tensor as ``[b, h, s, d]``, a view."""
    if name == "SBHD":
        return x.permute(1, 2, 0, 3)
    return x.permute(0, 2, 1, 3) if name == "BSHD" else x


def draw_rng_state(device: torch.device, dropout: float, generator: torch.Generator | None) -> Tensor:
    """``(seed, offset)``; drawn only where dropout needs it."""
    if not dropout:
        return torch.zeros(2, dtype=torch.int64, device=device)
    source = device if generator is None else generator.device
    seed = torch.randint(0, 1 << 62, (1,), dtype=torch.int64, generator=generator, device=source)
    return torch.cat((seed, torch.zeros_like(seed))).to(device)


def outputs(lay: Layout, name: str, q: Tensor, v: Tensor, dense: Callable[..., Tensor] = torch.zeros) -> tuple[Tensor, Tensor, Tensor]:
    """O, Stats and Max: zeroed for THD, whose tokens may be of no sequence, and made by ``dense`` otherwise."""
    if lay.q == "THD":
        rows = torch.zeros(*q.shape[:2], 1, device=q.device)
        return torch.zeros(*q.shape[:2], v.shape[-1], dtype=q.dtype, device=q.device), rows, torch.zeros_like(rows)
    b, h, s, _ = heads_first(q, lay.q).shape
    d = v.shape[-1]
    shape = {"SBHD": (s, b, h, d), "BSHD": (b, s, h, d), "BHSD": (b, h, s, d)}[name]
    out = dense(shape, dtype=q.dtype, device=q.device)
    return out, dense((b, h, s, 1), device=q.device), dense((b, h, s, 1), device=q.device)


def gradients(lay: Layout, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Zeroed dQ, dK, dV of the shapes of Q, K, V (already in ``lay``); views of one buffer where they are packed."""
    if lay.packed == 1:
        return _zeros(q), _zeros(k), _zeros(v)
    if k.shape != v.shape or (lay.packed == 3 and q.shape != k.shape):
        shapes = f"{list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        raise ArgumentError(expected("equal shapes", of="tensors of a packed layout", got=shapes, do="use a layout of separate tensors"))
    buffer = torch.zeros((*k.shape[: lay.at], lay.packed, *k.shape[lay.at :]), dtype=k.dtype, device=k.device)
    parts = buffer.unbind(lay.at)
    return (parts[0], parts[1], parts[2]) if lay.packed == 3 else (_zeros(q), parts[0], parts[1])


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
