"""Rotary position embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusible.tex.backends.torch_backend.operands import plain
from fusible.tex.checks import check_rope
from fusible.tex.enums import NVTE_QKV_Format
from fusible.tex.interface.rope import Rope

__all__ = ["RopeKernels"]

_THD = NVTE_QKV_Format.NVTE_THD


class RopeKernels(Rope):
    def fused_rope_forward(
        self,
        input: Any,
        freqs: Any,
        start_positions: Any,
        qkv_format: Any,
        interleaved: bool,
        cu_seqlens: Any,
        cp_size: int,
        cp_rank: int,
    ) -> Any:
        x = plain(input)
        angles, inside = _angles(x, freqs, start_positions, int(qkv_format), cu_seqlens, cp_size, cp_rank, "fused_rope_forward")
        head = x[..., : angles.shape[-1]].float()
        rotated = _rotate(head, interleaved).mul_(torch.sin(angles))
        return _finish(x, rotated.addcmul_(head, torch.cos(angles)), inside)

    def fused_rope_backward(
        self,
        output_grads: Any,
        freqs: Any,
        start_positions: Any,
        qkv_format: Any,
        interleaved: bool,
        cu_seqlens: Any,
        cp_size: int,
        cp_rank: int,
    ) -> Any:
        g = plain(output_grads)
        angles, inside = _angles(g, freqs, start_positions, int(qkv_format), cu_seqlens, cp_size, cp_rank, "fused_rope_backward")
        head = g[..., : angles.shape[-1]].float()
        rotated = _rotate(head * torch.sin(angles), interleaved).neg_()
        return _finish(g, rotated.addcmul_(head, torch.cos(angles)), inside)


def _rotate(x: Tensor, interleaved: bool) -> Tensor:
    """``R(x)``, a new tensor. R is antisymmetric: its transpose is ``-R``."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def _finish(x: Tensor, head: Tensor, inside: Tensor | None) -> Tensor:
    width = head.shape[-1]
    out = head.to(x.dtype) if width == x.shape[-1] else torch.cat((head.to(x.dtype), x[..., width:]), -1)
    return out if inside is None else out.mul_(inside.view(-1, 1, 1))


def _angles(
    x: Tensor, freqs: Tensor, start: Tensor | None, qkv_format: int, cu_seqlens: Tensor | None, cp_size: int, cp_rank: int, function: str
) -> tuple[Tensor, Tensor | None]:
    """The angle of every token, broadcastable to ``x``; and for THD, which tokens belong to a sequence."""
    check_rope(x, freqs, qkv_format, cu_seqlens, cp_size, cp_rank, function, torch.float32)
    table = freqs.reshape(freqs.shape[0], freqs.shape[3])
    if qkv_format == _THD:
        assert cu_seqlens is not None
        position, sequence, length, inside = _thd_positions(x.shape[0], cu_seqlens, cp_size)
        position = _shifted(position, length, cp_size, cp_rank)
        if start is not None:
            position = position + start[sequence]
        return table[torch.where(inside, position, 0).clamp_(0, table.shape[0] - 1)].unsqueeze(1), inside
    along = 0 if qkv_format == NVTE_QKV_Format.NVTE_SBHD else 1
    length = x.shape[along]
    if start is None and cp_size == 1:
        angles = table[:length]
        return (angles[:, None, None] if along == 0 else angles[None, :, None]), None
    position = _shifted(torch.arange(length, device=x.device), torch.tensor(length, device=x.device), cp_size, cp_rank)
    if start is None:
        angles = table[position]
        return (angles[:, None, None] if along == 0 else angles[None, :, None]), None
    position = position[:, None] + start[None, :] if along == 0 else position[None, :] + start[:, None]
    return table[position].unsqueeze(2), None


def _shifted(position: Tensor, length: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """Where a rank's tokens stand in the whole sequence: it holds one chunk from the front and its mirror image from the back."""
    if cp_size == 1:
        return position
    half = length // 2
    front, back = cp_rank * half, length * cp_size - (cp_rank + 1) * half - half
    return position + torch.where(position < half, front, back)


def _thd_positions(tokens: int, cu_seqlens: Tensor, cp_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ends = cu_seqlens.long() // cp_size
    token = torch.arange(tokens, device=ends.device)
    sequence = torch.searchsorted(ends, token, right=True).sub_(1)
    inside = token < ends[-1]
    sequence.clamp_(0, ends.numel() - 2)
    return token - ends[sequence], sequence, ends[sequence + 1] - ends[sequence], inside
