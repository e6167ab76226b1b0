"""``RotaryPositionEmbedding`` and ``apply_rotary_pos_emb``: rotary positions (arXiv:2104.09864) by ``fusible.tex``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fusible import tex
from fusible.compat.te_modules.attention_call import FORMATS
from fusible.compat.te_modules.base import device_of
from fusible.errors import ArgumentError, expected

__all__ = ["RotaryPositionEmbedding", "apply_fused_qkv_rotary_pos_emb", "apply_rotary_pos_emb"]


class RotaryPositionEmbedding(nn.Module):
    """The angles of positions: ``angle[p, i] = p * rotary_base ** (-2 i / dim)``, of the first ``rotary_percent`` of the columns.

    ``forward(max_seq_len, offset)``: fp32 ``[max_seq_len, 1, 1, dim]``, each angle twice: all of them and all again, or side by side where
    ``interleaved``. ``seq_len_interpolation_factor``, ``pretrained_max_position_embeddings``: positions are divided by the factor, or by as much as
    brings the longest back to the pretrained ones (arXiv:2306.15595).
    """

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: int | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        columns = int(dim * rotary_percent) if rotary_percent < 1.0 else dim
        self.seq_len_interpolation_factor, self.rotary_base, self.interleaved = seq_len_interpolation_factor, rotary_base, interleaved
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        steps = torch.arange(0, columns, 2, dtype=torch.float32, device=device_of("cuda"))
        self.inv_freq: torch.Tensor
        self.register_buffer("inv_freq", 1.0 / rotary_base ** (steps / columns))

    def forward(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        positions = torch.arange(max_seq_len, device=self.inv_freq.device, dtype=self.inv_freq.dtype) + offset
        known, factor = self.pretrained_max_position_embeddings, self.seq_len_interpolation_factor
        if known is not None and factor is not None:
            positions = positions * (1 / (max_seq_len / known) if max_seq_len > known * factor else 1 / factor)
        angles = positions.unsqueeze(1) * self.inv_freq
        both = angles.repeat_interleave(2, dim=1) if self.interleaved else torch.cat([angles, angles], dim=1)
        return both.reshape(max_seq_len, 1, 1, -1)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, t: torch.Tensor, freqs: torch.Tensor, starts: torch.Tensor | None, lengths: torch.Tensor | None, rest: tuple[Any, ...]
    ) -> torch.Tensor:
        format_, interleaved, size, rank = rest
        ctx.save_for_backward(freqs, starts, lengths)
        ctx.rest = rest
        return tex.fused_rope_forward(t, freqs, starts, format_, interleaved, lengths, size, rank)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        freqs, starts, lengths = ctx.saved_tensors
        format_, interleaved, size, rank = ctx.rest
        return tex.fused_rope_backward(grads[0], freqs, starts, format_, interleaved, lengths, size, rank), None, None, None, None


def apply_rotary_pos_emb(
    t: torch.Tensor,
    freqs: torch.Tensor,
    tensor_format: str = "sbhd",
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> torch.Tensor:
    """Rotate ``t`` (``[s, b, h, d]``, ``[b, s, h, d]`` or ``[t, h, d]``) by the angles ``freqs [s', 1, 1, d']``, ``s' >= s``, ``d' <= d``; columns
    beyond d' stay.

    ``start_positions``: int32 ``[b]``, the positions of the first tokens. ``cu_seqlens``: int32 ``[b + 1]``, of ``"thd"``. ``fused`` changes no
    result here. Raises ``ArgumentError`` for another format, and for ``"thd"`` without ``cu_seqlens``.
    """
    if tensor_format not in FORMATS or (tensor_format == "thd" and cu_seqlens is None):
        wanted = "cu_seqlens" if tensor_format in FORMATS else f"one of {', '.join(FORMATS)}"
        of, do = "apply_rotary_pos_emb with tensor_format='thd'", "give them"
        if tensor_format not in FORMATS:
            of, do = "tensor_format of apply_rotary_pos_emb", "name one of these"
        raise ArgumentError(expected(wanted, of=of, got="none" if tensor_format in FORMATS else repr(tensor_format), do=do))
    return _Rotation.apply(t, freqs.float(), start_positions, cu_seqlens, (FORMATS[tensor_format], interleaved, cp_size, cp_rank))  # type: ignore[no-any-return]


class _JointRotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: torch.Tensor, of_q: torch.Tensor, of_k: torch.Tensor, starts: Any, split: list[int], rest: tuple[Any, ...]) -> Any:
        ctx.save_for_backward(of_q, of_k, starts)
        ctx.split, ctx.rest = split, rest
        return tuple(tex.fused_qkv_rope_forward(qkv, of_q, of_k, starts, split, *rest))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        dq, dk, dv = (grad.contiguous() for grad in grads)
        of_q, of_k, starts = ctx.saved_tensors
        layout, interleaved, size, rank = ctx.rest
        if starts is None or size > 1:  # forward does not look at them either where sequences are shared out
            dqkv = tex.fused_qkv_rope_backward(dq, dk, dv, of_q, of_k, ctx.split, layout, interleaved, size, rank)
        else:  # NVIDIA's function of the three takes no starts; forward rotates q and k in heads as wide as v's
            heads = ((grad.reshape(*dv.shape[:2], -1, dv.shape[3]), freqs) for grad, freqs in ((dq, of_q), (dk, of_k)))
            rotated = [tex.fused_rope_backward(grad, freqs, starts, layout, interleaved, None, size, rank) for grad, freqs in heads]
            dqkv = torch.cat([x.reshape(*dv.shape[:3], -1) for x in (*rotated, dv)], dim=3)
        return dqkv, None, None, None, None, None


def apply_fused_qkv_rotary_pos_emb(
    qkv: torch.Tensor,
    q_freqs: torch.Tensor,
    k_freqs: torch.Tensor,
    qkv_split_arg_list: list[int],
    tensor_format: str = "sbhd",
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Any:
    """``(q, k, v)`` of ``qkv`` (``[s, b, groups, q + k + v]``, or batch first), q and k rotated by angles of their own, as of
    ``apply_rotary_pos_emb``.

    ``qkv_split_arg_list``: the columns of q, k and v. ``cu_seqlens`` is not looked at. Raises ``ArgumentError`` for another format.
    """
    if tensor_format not in ("sbhd", "bshd"):
        of = "tensor_format of apply_fused_qkv_rotary_pos_emb"
        raise ArgumentError(expected("'sbhd' or 'bshd'", of=of, got=repr(tensor_format), do="name one of these"))
    rest = (FORMATS[tensor_format], interleaved, cp_size, cp_rank)
    angles = q_freqs.float().contiguous(), k_freqs.float().contiguous()
    return _JointRotation.apply(qkv.contiguous(), *angles, start_positions, list(qkv_split_arg_list), rest)
