"""Gemma, Gemma 2 and Gemma 3: norms whose weights are about 0, scaled embeddings, GELU gates."""

from __future__ import annotations

from fusible.models.families.config import Config
from fusible.models.families.decoder import Decoder
from fusible.models.families.registry import family
from fusible.models.parts import Blueprint, Part, Residual

__all__ = ["gemma", "gemma2", "gemma3"]


@family("gemma")
def gemma(config: Config) -> Blueprint:
    """Gemma Team 2024, arXiv:2403.08295."""
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
    return _normed_behind(config, normed=False)


@family("gemma3_text")
def gemma3(config: Config) -> Blueprint:
    """Gemma Team 2025, arXiv:2503.19786: heads of q and k are normalized, windows in most layers, with rotary positions of their own."""
    return _normed_behind(config, normed=True)


def _normed_behind(config: Config, *, normed: bool) -> Blueprint:
    if config.flag("use_bidirectional_attention"):
        raise config.refuse("use_bidirectional_attention", "false")
    of, blocks = Decoder(config, zero_centered=True), list[Part]()
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
