"""DeepSeek-V3: latent attention, and experts chosen by sigmoids among groups, beside one that every token takes."""

from __future__ import annotations

from typing import Any

import torch

from fusible.models.families.config import Config
from fusible.models.families.decoder import Decoder
from fusible.models.families.mixtral import gate_name
from fusible.models.families.registry import family
from fusible.models.families.rotary import rotation
from fusible.models.parts import Activation, Blueprint, Experts, LatentAttention, Norm, Part, Product, SharedExpert

__all__ = ["deepseek_v3"]

_DEFAULTS: dict[str, Any] = {
    **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_interleave": True},
    **{"num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "n_routed_experts": 256},
    **{"first_k_dense_replace": 3, "n_shared_experts": 1, "moe_intermediate_size": 2048, "max_position_embeddings": 4096},
}
_EPS = 1e-6
"""Of the norms of latents, whatever the others have."""


@family("deepseek_v3")
def deepseek_v3(config: Config) -> Blueprint:
    """DeepSeek-AI 2024, arXiv:2412.19437, without the modules that predict further tokens."""
    config = config.with_names(num_local_experts="n_routed_experts").with_defaults(**_DEFAULTS)
    config.require(head_dim=config.size("qk_rope_head_dim"), scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    of, blocks = Decoder(config), list[Part]()
    dense = config.size("first_k_dense_replace", least=0)
    for layer in of.layers:
        name = f"model.layers.{layer}"
        attention, mixture = f"{name}.self_attn", f"{name}.mlp"
        second = of.mlp(mixture) if layer < dense else (_mixture(of, mixture),)
        blocks += of.block(name, _attention(of, attention), second)
    return of.whole(blocks)


def _attention(of: Decoder, name: str) -> tuple[Part, ...]:
    config, heads, bias = of.config, of.heads, of.config.flag("attention_bias")
    if of.groups != heads:
        raise config.refuse("num_key_value_heads", f"{heads}, as there are heads")
    rank, key, turned, value = (config.size(entry) for entry in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    of_queries, first = heads * (key + turned), f"{name}.q_proj"
    query: tuple[Part, ...] = ()
    if config.has("q_lora_rank"):
        inner = config.size("q_lora_rank")
        query = Norm(f"{name}.q_a_layernorm", inner, _EPS), Product((f"{name}.q_b_proj",), (of_queries,), inner)
        of_queries, first = inner, f"{name}.q_a_proj"
    elif bias:  # of keys, and of queries none
        raise config.refuse("attention_bias", "false without a q_lora_rank")
    compress = Product((first, f"{name}.kv_a_proj_with_mqa"), (of_queries, rank + turned), of.hidden, bias)
    expand = Norm(f"{name}.kv_a_layernorm", rank, _EPS), Product((f"{name}.kv_b_proj",), (heads * (key + value),), rank)
    by = rotation(config, turned)
    if by.width != turned:
        raise config.refuse("partial_rotary_factor", "1", by.width / turned)
    options: dict[str, Any] = {"rope_base": by.base, "rope_factors": by.factors, "rope_scale": by.magnitude}
    options |= {"rope_interleaved": config.flag("rope_interleave"), "scale": by.mean * (key + turned) ** -0.5}
    out = Product((f"{name}.o_proj",), (of.hidden,), heads * value, bias)
    return LatentAttention(compress, query, expand, heads, rank, key, turned, value, options), out


def _mixture(of: Decoder, name: str) -> SharedExpert:
    config, inner, each = of.config, of.config.size("moe_intermediate_size"), f"{name}.experts.{{}}"
    top_k, normalized = config.size("num_experts_per_tok"), config.flag("norm_topk_prob")
    options = {"score_function": "sigmoid", "scaling_factor": config.number("routed_scaling_factor"), "router_dtype": torch.float32}
    options |= _groups(config, top_k)
    up, down = (f"{each}.gate_proj", f"{each}.up_proj"), f"{each}.down_proj"
    count, act, bias = config.size("n_routed_experts"), gate_name(config), f"{name}.gate.e_score_correction_bias"
    experts = Experts(f"{name}.gate", up, down, of.hidden, inner, count, top_k, act, normalized, options, bias)
    every, wide = f"{name}.shared_experts", inner * config.size("n_shared_experts")
    shared = Product((f"{every}.gate_proj", f"{every}.up_proj"), (wide, wide), of.hidden)
    return SharedExpert(experts, None, (shared, Activation(of.gate()), Product((f"{every}.down_proj",), (of.hidden,), wide)))


def _groups(config: Config, top_k: int) -> dict[str, int]:
    """The groups of experts. These models choose groups by their two best experts, which is what tex does where a token has two of each group; raises
    ``CheckpointError`` for any other number."""
    groups, chosen = config.size("n_group"), config.size("topk_group")
    if chosen >= groups:
        return {}
    if top_k != 2 * chosen:
        raise config.refuse("topk_group", f"half of the {top_k} experts of a token, or all {groups} groups")
    return {"groups": groups, "top_groups": chosen}
