"""Rotary position embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusible.tex.backends.torch_backend.kernels import TorchKernels
from fusible.tex.backends.torch_backend.operands import plain
from fusible.tex.backends.torch_backend.segments import segments
from fusible.tex.calls.index_relations import RopeIndices, check_rope_indices
from fusible.tex.calls.rope import check_qkv_rope, check_qkv_rope_gradients
from fusible.tex.formulas.rope import RopeFormulas
from fusible.tex.formulas.segments import Segments
from fusible.tex.interface.declare import CallArguments, by_name

__all__ = ["RopeKernels"]


class RopeKernels(TorchKernels, RopeFormulas):
    def _check_places(self, x: Tensor, call: CallArguments, function: str) -> None:
        places = RopeIndices(x, call.freqs.shape[0], call.start_positions, int(call.qkv_format), call.cu_seqlens, call.cp_size, call.cp_rank)
        check_rope_indices(places, function)

    def _rank_segments(self, tokens: int, cu_seqlens: Tensor, cp_size: int) -> Segments[Tensor]:
        return segments(tokens, cu_seqlens.long() // cp_size)

    def _of_sequences(self, out: Tensor, inside: Tensor) -> Tensor:
        return out.mul_(inside.view(-1, 1, 1))

    @by_name
    def fused_qkv_rope_forward(self, call: CallArguments) -> Any:
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
    def fused_qkv_rope_backward(self, call: CallArguments) -> Any:
        grads = [plain(g) for g in (call.q_grad_out, call.k_grad_out, call.v_grad_out)]
        dq, dk, dv = check_qkv_rope_gradients(grads, call.qkv_split_arg_list, call.qkv_format, "fused_qkv_rope_backward")
        heads = grads[2].shape[:3]
        rotated = [
            self.fused_rope_backward(g.reshape(*heads[:2], -1, dv), freqs, None, call.qkv_format, call.interleaved, None, call.cp_size, call.cp_rank)
            for g, freqs in zip(grads, (call.q_freqs, call.k_freqs), strict=False)
        ]
        return torch.cat((rotated[0].view(*heads, dq), rotated[1].view(*heads, dk), grads[2]), -1)
