"""Scaled dot-product attention."""

# A declaration is documentation alone.
# pyright: reportReturnType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusible.tex.enums import NVTE_Bias_Type, NVTE_Mask_Type, NVTE_QKV_Format, NVTE_QKV_Layout, NVTE_Softmax_Type
from fusible.tex.interface.arguments import Generator, Quantizer, Tensor
from fusible.tex.interface.declare import function
from fusible.tex.interface.domains import Finite, Indices, Lengths, Probability, RealDType, Size

__all__ = ["Attention"]


class Attention:
    """Attention ``O = dropout(softmax(S)) V`` with ``S = attn_scale * Q K^T`` masked, in fp32 (Vaswani et al. 2017; Dao et al. 2022 for ``Stats``).

    ``Q`` is ``[s, b, h, d]``, ``[b, s, h, d]``, ``[b, h, s, d]`` or ``[t, h, d]`` as ``qkv_layout`` says, packed layouts being strided views; ``K``
    and ``V`` may have fewer heads ``g`` (a divisor of ``h``): head ``i`` reads kv head ``i // (h / g)``. Key j is visible to query i where

    * padding masks: both lie within the lengths ``diff(cu_seqlens)``;
    * causal: ``j <= i``; causal bottom right: ``j <= i + skv - sq`` (actual lengths);
    * window ``(l, r)``: ``i + off - l <= j <= i + off + r``, -1 being unbounded, ``off = skv - sq`` if ``bottom_right_diagonal`` else 0.

    ``Bias``, ``[b or 1, h or 1, sq or 1, skv]``, is added to the scores before or after they are scaled; ALiBi (Press et al. 2022, arXiv:2108.12409)
    adds ``-slope[h] |i + off - j|`` after. A query that sees no key gets 0, and ``Stats`` of -inf. The softmax's denominator has an extra term 1 (off
    by one) or ``exp(SoftmaxOffset[h])`` (learnable). Dropout's random word of score (b, h, i, j) is that of element
    ``((b * heads + h) * max_seqlen_q + i) * max_seqlen_kv + j`` under ``rng_state``; so backward draws it again. Of ``Q``, ``K``, ``V`` in fp64
    all is computed in it, ``Stats`` too.
    """

    @function()
    def get_fused_attn_backend(self, fused_attn_params: Any = None, *arguments: Any, **named: Any) -> Any:
        """Whether ``fused_attn_fwd`` serves a problem: ``(NVTE_Fused_Attn_Backend, reason)`` for one object of attributes ``fused_attn_params``.

        Also takes, as before Transformer Engine 2.20.2, the 19 arguments ``is_training, q_dtype, kv_dtype, qkv_layout, bias_type, attn_mask_type,
        softmax_type, p_dropout, num_attn_heads, num_gqa_groups, max_seqlen_q, max_seqlen_kv, head_dim_qk, head_dim_v, window_size_left,
        window_size_right, return_max_logit, cuda_graph, deterministic``, and then returns the enum alone. ``NVTE_No_Backend`` (-1) means not served.
        """

    @function(
        "Q K qkv_layout bias_type attn_mask_type softmax_type s_quantizer o_quantizer",
        cu_seqlens_q="int32 [b]",
        cu_seqlens_kv="int32 [b]",
        window_size="2 * any",
        Q="any [_ * _ d]",
        K="=Q [_ * _ d]",
        V="=Q [_ * _ e]",
        cu_seqlens_q_padded="int32 [b]",
        cu_seqlens_kv_padded="int32 [b]",
        page_table_k="int32 [_ p]",
        page_table_v="int32 [_ p]",
        Bias="real [_ _ _ _]",
    )
    def fused_attn_fwd(
        self,
        max_seqlen_q: Size,
        max_seqlen_kv: Size,
        is_training: bool,
        attn_scale: Finite,
        p_dropout: Probability,
        set_zero: bool,
        qkv_layout: NVTE_QKV_Layout,
        o_format: NVTE_QKV_Format,
        qkv_scale_inv_format: NVTE_QKV_Format,
        bias_type: NVTE_Bias_Type,
        attn_mask_type: NVTE_Mask_Type,
        softmax_type: NVTE_Softmax_Type,
        window_size: Sequence[int],
        bottom_right_diagonal: bool,
        cu_seqlens_q: Lengths | None,
        cu_seqlens_kv: Lengths | None,
        Q: Tensor,
        K: Tensor,
        V: Tensor,
        fake_dtype: RealDType,
        cu_seqlens_q_padded: Lengths | None,
        cu_seqlens_kv_padded: Lengths | None,
        page_table_k: Indices | None,
        page_table_v: Indices | None,
        s_quantizer: Quantizer | None,
        o_quantizer: Quantizer | None,
        Bias: Tensor | None,
        SoftmaxOffset: Tensor | None,
        rng_gen: Generator | None,
        rng_elts_per_thread: int,
        return_max_logit: bool,
        cuda_graph: bool,
    ) -> list[Any]:
        """``[O, Stats, (Max), rng_state, (Bias), (SoftmaxOffset)]``.

        ``O`` has Q's tokens and heads in ``o_format`` with V's head width, in Q's dtype; THD rows of no sequence are 0. ``Stats`` is fp32, the
        logsumexp of a row's scores, ``[b, h, sq, 1]``, or ``[tq, h, 1]`` for THD; ``Max`` (with ``return_max_logit``) the largest score, of the same
        shape. ``rng_state`` is int64 ``[2]``, drawn from ``rng_gen`` or torch's default generator. Everything after ``O`` but ``Max`` is what
        ``fused_attn_bwd`` takes. In a paged layout ``K`` and ``V`` are ``[pages, page_size, g, d]`` (SBHD: the first two exchanged), and the tokens
        of sequence i are those of the pages ``page_table_k[i]`` and ``page_table_v[i]`` (int32 ``[b, max_pages]``), one after another. Raises
        ``NotServedError`` for a combination that is not served, ``ShapeError`` for shapes that do not fit.

        ``Q``, ``K``, ``V`` may be FP8 of one scale per tensor: ``O`` is then quantized where ``o_quantizer`` scales by delayed scaling, and otherwise
        of ``fake_dtype``. An ``s_quantizer`` of delayed scaling has its amax raised to the largest probability, after dropout. ``SoftmaxOffset`` of a
        softmax off by one is read as 0. Or they are MXFP8, in SBHD, BSHD or BHSD, with the scales of the matrix ``[b * h * s, d]``, told by
        ``qkv_scale_inv_format`` BHSD: of Q, K and V one copy is read, ``O`` is of ``fake_dtype``.
        """

    @function(
        "Q K qkv_layout dqkv_layout bias_type attn_mask_type softmax_type dO dqkv_quantizer",
        cu_seqlens_q="int32 [b]",
        cu_seqlens_kv="int32 [b]",
        window_size="2 * any",
        Q="any [_ * _ d]",
        K="=Q [_ * _ d]",
        V="=Q [_ * _ e]",
        O="real [_ * _ e]",
        dO="real [_ * _ e]",
        cu_seqlens_q_padded="int32 [b]",
        cu_seqlens_kv_padded="int32 [b]",
    )
    def fused_attn_bwd(
        self,
        max_seqlen_q: Size,
        max_seqlen_kv: Size,
        attn_scale: Finite,
        p_dropout: Probability,
        set_zero: bool,
        qkv_layout: NVTE_QKV_Layout,
        o_format: NVTE_QKV_Format,
        do_format: NVTE_QKV_Format,
        dqkv_layout: NVTE_QKV_Layout,
        qkv_scale_inv_format: NVTE_QKV_Format,
        do_scale_inv_format: NVTE_QKV_Format,
        bias_type: NVTE_Bias_Type,
        attn_mask_type: NVTE_Mask_Type,
        softmax_type: NVTE_Softmax_Type,
        window_size: Sequence[int],
        bottom_right_diagonal: bool,
        deterministic: bool,
        cu_seqlens_q: Lengths | None,
        cu_seqlens_kv: Lengths | None,
        Q: Tensor,
        K: Tensor,
        V: Tensor,
        O: Tensor,  # noqa: E741
        dO: Tensor,
        fake_dtype: RealDType,
        Aux_CTX_Tensors: Sequence[Tensor],
        cu_seqlens_q_padded: Lengths | None,
        cu_seqlens_kv_padded: Lengths | None,
        s_quantizer: Quantizer | None,
        dp_quantizer: Quantizer | None,
        dqkv_quantizer: Quantizer | None,
        cuda_graph: bool,
    ) -> list[Any]:
        """``[dQ, dK, dV, dBias, dSoftmaxOffset]``, the last two None where there is no such input.

        ``P = exp(S - Stats)``, ``dV = P^T dO``, ``dS = P (dO V^T - rowsum(dO O))``, ``dQ = attn_scale dS K``, ``dK = attn_scale dS^T Q``; dropout
        enters P and ``dO V^T``. The gradients have ``dqkv_layout``, and are views of one buffer where it is packed. ``dBias`` has Bias's shape and
        dtype, ``dSoftmaxOffset`` is fp32 ``[1, h, 1, 1]``. By a ``dqkv_quantizer`` of delayed scaling dQ, dK and dV are quantized; FP8 operands give
        gradients of ``fake_dtype`` otherwise. A ``dp_quantizer`` of delayed scaling has its amax raised to the largest ``dS``.
        """

    @function(
        "new_k k_cache kv_format",
        new_k="any [* g d]",
        new_v="=new_k [* h e]",
        k_cache="=new_k [p s g d]",
        v_cache="=new_k [p s h e]",
        page_table="int32",
        cu_new_lens="int32 [>b+1]",
        cu_cached_lens="int32 [>b+1]",
        alone="k_cache v_cache",
    )
    def copy_to_kv_cache(
        self,
        new_k: Tensor,
        new_v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        page_table: Indices | None,
        cu_new_lens: Lengths,
        cu_cached_lens: Lengths,
        kv_format: NVTE_QKV_Format,
        b: Size,
        max_ctx_len: Size,
        max_seq_len: Size,
        max_pages_per_seq: Size,
        is_non_paged: bool,
    ) -> None:
        """Write the new tokens of ``b`` sequences into a cache ``[pages, page_size, g, d]``, in place.

        ``new_k`` and ``new_v`` are of ``kv_format``: THD, BSHD or SBHD, the last two ``max_ctx_len`` long. Of sequence i, ``diff(cu_new_lens)[i]``
        tokens are new and ``diff(cu_cached_lens)[i]`` are cached with them (both int32 ``[b + 1]``): the new ones go to the last positions of
        those. Position p is in page ``page_table[i, p // page_size]`` (int32 ``[b, max_pages_per_seq]``), with ``page_size = max_seq_len /
        max_pages_per_seq``. Where ``is_non_paged``, a sequence has row i of the cache, ``[b', max_seq_len, g, d]``, for itself; what it had before
        comes from row ``page_table[i]``, for all sequences at once.
        """

    @function("cu_seqlens", tensor="any [t *]", cu_seqlens="int32 [>b+1]")
    def convert_thd_to_bshd(self, tensor: Tensor, cu_seqlens: Lengths, b: Size, max_seq_len: Size) -> Any:
        """``[t, ..] -> [b, max_seq_len, ..]``: ``y[i, p] = tensor[cu_seqlens[i] + p]`` within the length of sequence i, else 0.

        ``cu_seqlens`` is int32 ``[b + 1]``; any dtype. Tokens of a sequence past ``max_seq_len`` are dropped. Raises ``ShapeError`` for fewer
        lengths than ``b``.
        """

    @function("cu_seqlens", tensor="any [n s *]", cu_seqlens="int32 [>n+1]")
    def convert_bshd_to_thd(self, tensor: Tensor, cu_seqlens: Lengths, t: Size) -> Any:
        """``[b, s, ..] -> [t, ..]``: the inverse of ``convert_thd_to_bshd``; tokens of no sequence are 0."""

    @function("qkvi", qkvi="any [s b n h]")
    def fa_prepare_fwd(self, qkvi: Tensor) -> Any:
        """``[3, b, s, n, h]``, contiguous: Q, K and V of the buffer ``[s, b, n, 3h]`` whose first third of each head is the view ``qkvi``.

        ``qkvi`` is ``[s, b, n, h]``. Raises ``ShapeError`` where its strides are not those of such a view.
        """

    @function("q", q="any [b s n h]", k="=q [b s n h]", v="=q [b s n h]")
    def fa_prepare_bwd(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        """``[s, b, n, 3h]``, contiguous: the gradients ``q``, ``k``, ``v``, each ``[b, s, n, h]``, side by side in each head.

        Raises ``ShapeError`` for different shapes, ``DTypeError`` for different dtypes.
        """
