"""NVIDIA's modules by their names, signatures, parameters and state dicts, made of Fusible's operations and its pipeline."""

from __future__ import annotations

from fusible.compat.te_modules.attention import DotProductAttention
from fusible.compat.te_modules.base import TransformerEngineBaseModule
from fusible.compat.te_modules.grouped_linear import GroupedLinear
from fusible.compat.te_modules.inference import InferenceParams, KVCacheManager, NonPagedKVCacheManager, PagedKVCacheManager
from fusible.compat.te_modules.layernorm_mlp import LayerNormMLP
from fusible.compat.te_modules.linear import LayerNormLinear, Linear
from fusible.compat.te_modules.linear_attention import GatedDeltaNet2Attention, GatedDeltaNetAttention, GatedDeltaProductAttention
from fusible.compat.te_modules.multi_head_attention import MultiheadAttention
from fusible.compat.te_modules.normalization import LayerNorm, RMSNorm
from fusible.compat.te_modules.recomputation import checkpoint
from fusible.compat.te_modules.rope import RotaryPositionEmbedding, apply_fused_qkv_rotary_pos_emb, apply_rotary_pos_emb
from fusible.compat.te_modules.transformer import TransformerLayer

__all__ = [
    "DotProductAttention",
    "GatedDeltaNet2Attention",
    "GatedDeltaNetAttention",
    "GatedDeltaProductAttention",
    "GroupedLinear",
    "InferenceParams",
    "KVCacheManager",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "NonPagedKVCacheManager",
    "PagedKVCacheManager",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "TransformerEngineBaseModule",
    "TransformerLayer",
    "apply_fused_qkv_rotary_pos_emb",
    "apply_rotary_pos_emb",
    "checkpoint",
]
