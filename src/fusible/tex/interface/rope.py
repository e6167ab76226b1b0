"""Rotary position embedding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusible.tex.enums import NVTE_QKV_Format
from fusible.tex.interface.arguments import Tensor
from fusible.tex.interface.declare import function, function_like
from fusible.tex.interface.domains import Count, Lengths, Size

__all__ = ["Rope"]


class Rope:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864), cosine and sine in fp32; of an ``input`` in fp64 all in it, ``freqs`` too.

    ``input`` is ``[s, b, h, d]``, ``[b, s, h, d]`` or (THD, with ``cu_seqlens [b + 1]``) ``[t, h, d]``; ``freqs`` are angles, fp32
    ``[s_max, 1, 1, d2]`` with ``d2 <= d``; the other ``d - d2`` elements are copied. The position of token ``i`` is ``i + start_positions[b]``, of
    which there may be more than sequences; with ``cp_size > 1``, a rank holds chunks ``cp_rank`` and ``2 * cp_size - 1 - cp_rank`` of each sequence.
    Tokens past ``cu_seqlens[-1]`` become 0.
    Raises ``ShapeError`` for another rank, an odd ``d2``, or ``s * cp_size > s_max``; ``ArgumentError`` for THD without ``cu_seqlens``.
    """

    @function(
        "input freqs qkv_format interleaved", input="real [* h d]", freqs="fp32|fp64 [s 1 1 w]", start_positions="int32 [b]", cu_seqlens="int32 [n+1]"
    )
    def fused_rope_forward(
        self,
        input: Tensor,
        freqs: Tensor,
        start_positions: Lengths | None,
        qkv_format: NVTE_QKV_Format,
        interleaved: bool,
        cu_seqlens: Lengths | None,
        cp_size: Count,
        cp_rank: Size,
    ) -> Any:
        """``y = x cos f + R(x) sin f``, contiguous, of ``input``'s shape and dtype.

        ``R(x)[i] = -x[i + d2/2]`` in the first half and ``x[i - d2/2]`` in the second; interleaved, ``R(x)[2i] = -x[2i+1]``, ``R(x)[2i+1] = x[2i]``.
        """

    @function_like(fused_rope_forward, renamed={"input": "output_grads"})
    def fused_rope_backward(self) -> Any:
        """``dx = g cos f + R^T(g sin f)``: the exact transpose of ``fused_rope_forward``, also where both halves of ``freqs`` differ."""

    @function(
        "qkv_input q_freqs qkv_format interleaved",
        qkv_input="real [a b h d]",
        q_freqs="fp32|fp64 [s 1 1 w]",
        k_freqs="fp32|fp64 [_ 1 1 v]",
        start_positions="int32 [n]",
    )
    def fused_qkv_rope_forward(
        self,
        qkv_input: Tensor,
        q_freqs: Tensor,
        k_freqs: Tensor,
        start_positions: Lengths | None,
        qkv_split_arg_list: Sequence[int],
        qkv_format: NVTE_QKV_Format,
        interleaved: bool,
        cp_size: Count,
        cp_rank: Size,
    ) -> Any:
        """``(q, k, v)`` of ``qkv_input [s, b, h, dq + dk + dv]`` (or BSHD), ``qkv_split_arg_list`` being ``[dq, dk, dv]``.

        ``q`` is ``[s, b, h dq / dk, dk]`` and ``k`` ``[s, b, h, dk]``, each chunk of ``dv`` elements rotated as ``fused_rope_forward`` does, by
        ``q_freqs`` and ``k_freqs``; ``v`` is ``[s, b, h, dv]``, copied. With ``cp_size > 1``, ``start_positions`` is ignored. Raises ``ShapeError``
        where ``dq`` or ``dk`` is no multiple of ``dv``, ``dq`` none of ``dk``, or the three do not add up to the last dimension; ``ArgumentError``
        for THD.
        """

    @function(
        "q_grad_out q_freqs qkv_format interleaved",
        q_grad_out="real [a b q d]",
        k_grad_out="=q_grad_out [a b h d]",
        v_grad_out="=q_grad_out [a b h e]",
        q_freqs="fp32|fp64 [s 1 1 w]",
        k_freqs="fp32|fp64 [_ 1 1 v]",
    )
    def fused_qkv_rope_backward(
        self,
        q_grad_out: Tensor,
        k_grad_out: Tensor,
        v_grad_out: Tensor,
        q_freqs: Tensor,
        k_freqs: Tensor,
        qkv_split_arg_list: Sequence[int],
        qkv_format: NVTE_QKV_Format,
        interleaved: bool,
        cp_size: Count,
        cp_rank: Size,
    ) -> Any:
        """The gradient of ``fused_qkv_rope_forward``'s input, contiguous, of positions that start at 0."""
