"""Rotary position embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusible.tex.backends.torch_backend.kernels import TorchKernels
from fusible.tex.backends.torch_backend.operands import plain
from fusible.tex.backends.torch_backend.segments import segments
from fusible.tex.calls.checks import check_rope
from fusible.tex.calls.index_relations import RopeIndices, check_rope_indices
from fusible.tex.calls.rope import check_qkv_rope, check_qkv_rope_gradients, starts_of
from fusible.tex.enums import NVTE_QKV_Format
from fusible.tex.formulas.rope import RopeFormulas
from fusible.tex.interface.declare import by_name
from fusible.tex.protocol import accumulator

__all__ = ["RopeKernels"]

_THD = NVTE_QKV_Format.NVTE_THD


class RopeKernels(TorchKernels, RopeFormulas):
    def _rope_angles(self, x: Tensor, call: Any, function: str) -> tuple[Tensor, Tensor | None]:
        return _angles(x, call, function)

    def _of_sequences(self, out: Tensor, inside: Tensor) -> Tensor:
        return out.mul_(inside.view(-1, 1, 1))

    @by_name
    def fused_qkv_rope_forward(self, call: Any) -> Any:
        x = plain(call.qkv_input)
        dq, dk, dv = check_qkv_rope(x, call.qkv_split_arg_list, call.qkv_format, "fused_qkv_rope_forward")
        start = call.start_positions if call.cp_size == 1 else None
        heads = x.shape[:2]
        found: list[Tensor] = []
        for part, freqs in ((x[..., :dq], call.q_freqs), (x[..., dq : dq + dk], call.k_freqs)):
            count = part.shape[2] * part.shape[3]  # said in numbers, for of no tokens torch cannot tell it
            chunks = part.reshape(*heads, count // dv, dv)
            rotated = self.fused_rope_forward(chunks, freqs, start, call.qkv_format, call.interleaved, None, call.cp_size, call.cp_rank)
            found.append(rotated.view(*heads, count // dk, dk))
        return found[0], found[1], x[..., dq + dk :].contiguous()

    @by_name
    def fused_qkv_rope_backward(self, call: Any) -> Any:
        grads = [plain(g) for g in (call.q_grad_out, call.k_grad_out, call.v_grad_out)]
        dq, dk, dv = check_qkv_rope_gradients(grads, call.qkv_split_arg_list, call.qkv_format, "fused_qkv_rope_backward")
        heads = grads[2].shape[:3]
        rotated = [
            self.fused_rope_backward(g.reshape(*heads[:2], -1, dv), freqs, None, call.qkv_format, call.interleaved, None, call.cp_size, call.cp_rank)
            for g, freqs in zip(grads, (call.q_freqs, call.k_freqs), strict=False)
        ]
        return torch.cat((rotated[0].view(*heads, dq), rotated[1].view(*heads, dk), grads[2]), -1)


def _angles(x: Tensor, call: Any, function: str) -> tuple[Tensor, Tensor | None]:
    """The angle of every token, broadcastable to ``x``; and for THD, which tokens belong to a sequence."""
    freqs, start, qkv_format, cu_seqlens = call.freqs, call.start_positions, int(call.qkv_format), call.cu_seqlens
    cp_size, cp_rank = call.cp_size, call.cp_rank
    check_rope(x, freqs, qkv_format, cu_seqlens, cp_size, cp_rank, function, accumulator(x.dtype))
    check_rope_indices(RopeIndices(x, freqs.shape[0], start, qkv_format, cu_seqlens, cp_size, cp_rank), function)
    table = freqs.reshape(freqs.shape[0], freqs.shape[3])
    if qkv_format == _THD:
        assert cu_seqlens is not None
        ends = cu_seqlens.long() // cp_size
        seg = segments(x.shape[0], ends)
        position = _shifted(seg.position, seg.length, cp_size, cp_rank)
        if start is not None:
            position = position + start[seg.sequence]
        return table[torch.where(seg.inside, position, 0).clamp_(0, table.shape[0] - 1)].unsqueeze(1), seg.inside
    along = 0 if qkv_format == NVTE_QKV_Format.NVTE_SBHD else 1
    length = x.shape[along]
    if start is None and cp_size == 1:
        angles = table[:length]
        return (angles[:, None, None] if along == 0 else angles[None, :, None]), None
    position = _shifted(torch.arange(length, device=x.device), torch.tensor(length, device=x.device), cp_size, cp_rank)
    if start is None:
        angles = table[position]
        return (angles[:, None, None] if along == 0 else angles[None, :, None]), None
    first: Tensor = starts_of(x, start, qkv_format, cu_seqlens)
    position = position[:, None] + first[None, :] if along == 0 else position[None, :] + first[:, None]
    return table[position].unsqueeze(2), None


def _shifted(position: Tensor, length: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """Where a rank's tokens stand in the whole sequence: it holds one chunk from the front and its mirror image from the back."""
    if cp_size == 1:
        return position
    half = length // 2
    front, back = cp_rank * half, length * cp_size - (cp_rank + 1) * half - half
    return position + torch.where(position < half, front, back)
