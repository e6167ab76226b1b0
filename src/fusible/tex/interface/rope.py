"""Rotary position embedding."""

from __future__ import annotations

from typing import Any

from fusible.tex.interface.declare import function

__all__ = ["Rope"]


class Rope:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864), cosine and sine in fp32.

    ``input`` is ``[s, b, h, d]``, ``[b, s, h, d]`` or (THD, with ``cu_seqlens [b + 1]``) ``[t, h, d]``; ``freqs`` are angles, fp32
    ``[s_max, 1, 1, d2]`` with ``d2 <= d``; the other ``d - d2`` elements are copied. The position of token ``i`` is ``i + start_positions[b]``; with
    ``cp_size > 1``, a rank holds chunks ``cp_rank`` and ``2 * cp_size - 1 - cp_rank`` of each sequence. Tokens past ``cu_seqlens[-1]`` become 0.
    Raises ``ShapeError`` for another rank, an odd ``d2``, or ``s * cp_size > s_max``; ``ArgumentError`` for THD without ``cu_seqlens``.
    """

    @function("input", "freqs", "qkv_format", "interleaved")
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
        """``y = x cos f + R(x) sin f``, contiguous, of ``input``'s shape and dtype.

        ``R(x)[i] = -x[i + d2/2]`` in the first half and ``x[i - d2/2]`` in the second; interleaved, ``R(x)[2i] = -x[2i+1]``, ``R(x)[2i+1] = x[2i]``.
        """

    @function("output_grads", "freqs", "qkv_format", "interleaved")
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
        """``dx = g cos f + R^T(g sin f)``: the exact transpose of ``fused_rope_forward``, also where both halves of ``freqs`` differ."""
