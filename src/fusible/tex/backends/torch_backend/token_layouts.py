"""Attention's tokens from one layout to another: packed, padded, interleaved."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusible.tex.backends.torch_backend.segments import segments
from fusible.tex.calls.attention_convert import check_convert, check_interleaved, check_parts
from fusible.tex.calls.index_checks import check_cumulative, check_lengths
from fusible.tex.interface.attention import Attention

__all__ = ["TokenLayoutKernels"]


class TokenLayoutKernels(Attention):
    def convert_thd_to_bshd(self, tensor: Tensor, cu_seqlens: Tensor, b: int, max_seq_len: int) -> Any:
        check_convert(tensor, cu_seqlens, b, 1, "convert_thd_to_bshd")
        ends = cu_seqlens[: b + 1].long()
        check_cumulative(ends, tensor.shape[0], "cu_seqlens of convert_thd_to_bshd")
        position = torch.arange(max_seq_len, device=ends.device)
        token = (ends[:-1, None] + position).clamp_(max=max(tensor.shape[0] - 1, 0))
        if not tensor.shape[0]:
            return tensor.new_zeros(b, max_seq_len, *tensor.shape[1:])
        padding = (position >= torch.diff(ends)[:, None]).view(b, max_seq_len, *(1 for _ in tensor.shape[1:]))
        return tensor.index_select(0, token.flatten()).view(b, max_seq_len, *tensor.shape[1:]).masked_fill_(padding, 0)

    def convert_bshd_to_thd(self, tensor: Tensor, cu_seqlens: Tensor, t: int) -> Any:
        check_convert(tensor, cu_seqlens, tensor.shape[0], 2, "convert_bshd_to_thd")
        b, s = tensor.shape[:2]
        check_lengths(cu_seqlens, "cu_seqlens of convert_bshd_to_thd")
        if not b * s:
            return tensor.new_zeros(t, *tensor.shape[2:])
        ends = cu_seqlens[: b + 1]
        seg = segments(t, ends)
        inside = seg.inside.logical_and_(seg.position < s)
        token = (seg.sequence * s + seg.position).clamp_(0, b * s - 1)
        outside = inside.logical_not_().view(t, *(1 for _ in tensor.shape[2:]))
        return tensor.reshape(b * s, *tensor.shape[2:]).index_select(0, token).masked_fill_(outside, 0)

    def fa_prepare_fwd(self, qkvi: Tensor) -> Any:
        check_interleaved(qkvi, qkvi.untyped_storage().nbytes() // qkvi.element_size())
        s, b, n, h = qkvi.shape
        whole = qkvi.as_strided((s, b, n, 3, h), (b * n * 3 * h, n * 3 * h, 3 * h, h, 1))
        return whole.permute(3, 1, 0, 2, 4).contiguous()

    def fa_prepare_bwd(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        check_parts(q, k, v)
        b, s, n, h = q.shape
        out = torch.empty(s, b, n, 3, h, dtype=q.dtype, device=q.device)
        for part, x in zip(out.unbind(3), (q, k, v), strict=True):
            part.copy_(x.transpose(0, 1))
        return out.flatten(-2)
