"""A record of the query of what attention serves."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from fusible.conformance.table import Arguments, Output, Sample, record
from fusible.tex.enums import NVTE_Bias_Type, NVTE_Fused_Attn_Backend, NVTE_Mask_Type, NVTE_QKV_Format, NVTE_QKV_Layout, NVTE_Softmax_Type

__all__ = []


@record("get_fused_attn_backend", dtypes=(torch.float32,))
def support_query(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    """Any member of the enumeration with a reason is right: the answer depends on the backend."""

    def pair(result: Any, arguments: Arguments) -> Any:
        fits = isinstance(result[0], NVTE_Fused_Attn_Backend) and isinstance(result[1], str) and len(result) == 2
        return result if fits else "(NVTE_Fused_Attn_Backend, reason)"

    asked = SimpleNamespace(
        is_training=True, deterministic=False, cuda_graph=False, return_max_logit=False, attn_mask_type=NVTE_Mask_Type.NVTE_CAUSAL_MASK,
        bias_type=NVTE_Bias_Type.NVTE_NO_BIAS, window_size_left=-1, window_size_right=0, bottom_right_diagonal=False,
        softmax_type=NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX, scaling_mode=100, dropout=0.0, attn_scale=0.3, qkv_dtype=6, o_dtype=6, do_dtype=6,
        dqkv_dtype=6, qkv_layout=NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD, o_format=NVTE_QKV_Format.NVTE_BSHD, do_format=NVTE_QKV_Format.NVTE_BSHD,
        dqkv_layout=NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD, qkv_scale_inv_format=8, do_scale_inv_format=8, batch_size=2, num_attn_heads=4,
        num_gqa_groups=4, head_dim_qk=64, head_dim_v=64, max_seqlen_q=8, max_seqlen_kv=8, num_tokens_q=16, num_tokens_kv=16, num_pages_k=0,
        num_pages_v=0, page_size_k=0, page_size_v=0, max_pages_per_seq_k=0, max_pages_per_seq_v=0, bias_batch_size=0, bias_num_heads=0,
        bias_seqlen_q=0, bias_seqlen_kv=0,
    )  # fmt: skip
    yield Sample("causal", {"fused_attn_params": asked}, (Output(None, pair),))
