"""Gemma, Gemma 2 and Gemma 3: norms whose weights are about 0, scaled embeddings, GELU gates."""

from __future__ import annotations

from fusible.models.families.config import Config
from fusible.models.families.decoder import Decoder, layer_types
from fusible.models.families.registry import family
from fusible.models.parts import Blueprint, Part, Residual

__all__ = ["gemma", "gemma2", "gemma3"]


@family("gemma")
def gemma(config: Config) -> Blueprint:
    """Gemma Team 2024, arXiv:2403.08295."""
    _check_causal(config)
    config = config.with_defaults(tie_word_embeddings=True, hidden_act="gelu_pytorch_tanh", head_dim=256)
    of, blocks = Decoder(config, zero_centered=True), list[Part]()
    bias = config.flag("attention_bias")
    for layer in of.layers:
        name = f"model.layers.{layer}"
        attention = of.qkv(f"{name}.self_attn", bias=bias), of.attention(layer), of.out(f"{name}.self_attn.o_proj", bias=bias)
        blocks += of.block(name, attention, of.mlp(f"{name}.mlp"))
    return of.whole(blocks, embedding_scale=of.hidden**0.5)


@family("gemma2")
def gemma2(config: Config) -> Blueprint:
    """Gemma Team 2024, arXiv:2408.00118: windows in every other layer, soft caps, norms behind each half of a layer."""
    config = config.with_defaults(
        attn_logit_softcapping=50.0, final_logit_softcapping=30.0, layer_types=layer_types(config, lambda layer: layer % 2 == 0)
    )
    return _normed_behind(config, normed=False)


@family("gemma3_text")
def gemma3(config: Config) -> Blueprint:
    """Gemma Team 2025, arXiv:2503.19786: heads of q and k are normalized, windows in most layers, with rotary positions of their own."""
    config.require(attn_logit_softcapping=None)
    config = config.with_defaults(rope_theta=1e6, rope_local_base_freq=1e4)
    every = config.size("sliding_window_pattern", config.size("_sliding_window_pattern", 6))
    return _normed_behind(config.with_defaults(layer_types=layer_types(config, lambda layer: (layer + 1) % every != 0)), normed=True)


def _check_causal(config: Config) -> None:
    if config.flag("use_bidirectional_attention"):
        raise config.refuse("use_bidirectional_attention", "false")


def _normed_behind(config: Config, *, normed: bool) -> Blueprint:
    config = config.with_defaults(tie_word_embeddings=True, hidden_activation="gelu_pytorch_tanh", sliding_window=4096, head_dim=256)
    _check_causal(config)
    of, blocks = Decoder(config, zero_centered=True, windows="typed"), list[Part]()
    bias = config.flag("attention_bias")
    options = {"scale": config.number("query_pre_attn_scalar", 256.0) ** -0.5}
    if config.has("attn_logit_softcapping"):
        options["soft_cap"] = config.number("attn_logit_softcapping")
    for layer in of.layers:
        name = f"model.layers.{layer}"
        attention = f"{name}.self_attn"
        norm = (of.head_norm(attention),) if normed else ()
        first = of.qkv(attention, bias=bias), *norm, of.attention(layer, **options), of.out(f"{attention}.o_proj", bias=bias)
        second = of.mlp(f"{name}.mlp", entry="hidden_activation")
        blocks.append(Residual((of.norm(f"{name}.input_layernorm"), *first, of.norm(f"{name}.post_attention_layernorm"))))
        blocks.append(Residual((of.norm(f"{name}.pre_feedforward_layernorm"), *second, of.norm(f"{name}.post_feedforward_layernorm"))))
    cap = config.number("final_logit_softcapping") if config.has("final_logit_softcapping") else None
    return of.whole(blocks, embedding_scale=of.hidden**0.5, soft_cap=cap)
