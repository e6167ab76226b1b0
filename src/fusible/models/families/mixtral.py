"""Mixtral and Qwen3's mixtures: Llama's layer, with experts for its MLP."""

from __future__ import annotations

from fusible.models.families.config import Config
from fusible.models.families.decoder import Decoder
from fusible.models.families.registry import family
from fusible.models.parts import Blueprint, Experts, Part

__all__ = ["mixtral", "qwen3_moe"]

_GATES = {"silu": "swiglu", "swish": "swiglu", "gelu_new": "geglu", "gelu_pytorch_tanh": "geglu"}


@family("mixtral")
def mixtral(config: Config) -> Blueprint:
    """Jiang et al. 2024, arXiv:2401.04088."""
    of, blocks = Decoder(config), list[Part]()
    for layer in of.layers:
        name = f"model.layers.{layer}"
        attention = of.qkv(f"{name}.self_attn", bias=False), of.attention(layer), of.out(f"{name}.self_attn.o_proj")
        mixture = f"{name}.block_sparse_moe"
        up, down = (f"{mixture}.experts.{{}}.w1", f"{mixture}.experts.{{}}.w3"), f"{mixture}.experts.{{}}.w2"
        experts = _experts(of, f"{mixture}.gate", up, down, config.size("intermediate_size"), config.size("num_local_experts"))
        blocks += of.block(name, attention, (experts,))
    return of.whole(blocks)


@family("qwen3_moe")
def qwen3_moe(config: Config) -> Blueprint:
    """Yang et al. 2025, arXiv:2505.09388."""
    config.require(norm_topk_prob=True)
    of, blocks = Decoder(config), list[Part]()
    plain, step = config.entries.get("mlp_only_layers") or (), config.size("decoder_sparse_step", 1)
    count = config.size("num_experts", config.size("num_local_experts", 0) if config.has("num_local_experts") else None)
    bias = config.flag("attention_bias")
    for layer in of.layers:
        name = f"model.layers.{layer}"
        attention = f"{name}.self_attn"
        first = of.qkv(attention, bias=bias), of.head_norm(attention), of.attention(layer), of.out(f"{attention}.o_proj", bias=bias)
        second = of.mlp(f"{name}.mlp")
        if layer not in plain and (layer + 1) % step == 0:
            each = f"{name}.mlp.experts.{{}}"
            up, down = (f"{each}.gate_proj", f"{each}.up_proj"), f"{each}.down_proj"
            second = (_experts(of, f"{name}.mlp.gate", up, down, config.size("moe_intermediate_size"), count),)
        blocks += of.block(name, first, second)
    return of.whole(blocks)


def _experts(of: Decoder, router: str, up: tuple[str, ...], down: str, inner: int, count: int) -> Experts:
    act = of.config.text("hidden_act", "silu")
    if act not in _GATES:
        raise of.config.refuse("hidden_act", f"one of {', '.join(_GATES)}")
    return Experts(router, up, down, of.hidden, inner, count, of.config.size("num_experts_per_tok", 2), _GATES[act])
