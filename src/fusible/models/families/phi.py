"""Phi-1, Phi-1.5 and Phi-2: attention and MLP side by side, heads rotated in part."""

from __future__ import annotations

from fusible import pytorch
from fusible.models.families.config import Config
from fusible.models.families.decoder import Decoder
from fusible.models.families.gpt2 import ACTIVATIONS
from fusible.models.families.registry import family
from fusible.models.parts import Activation, Blueprint, Norm, Parallel, Part, Product

__all__ = ["phi"]


@family("phi")
def phi(config: Config) -> Blueprint:
    """Li et al. 2023, arXiv:2309.05463."""
    config.require(qk_layernorm=False)
    of, blocks = Decoder(config.with_defaults(partial_rotary_factor=0.5), partial=True), list[Part]()
    inner, eps = config.size("intermediate_size"), config.number("layer_norm_eps", 1e-5)
    act = config.text("hidden_act", "gelu_new")
    if act not in ACTIVATIONS:
        raise config.refuse("hidden_act", f"one of {', '.join(ACTIVATIONS)}")
    for layer in of.layers:
        name = f"model.layers.{layer}"
        attention = of.qkv(f"{name}.self_attn", bias=True), of.attention(layer), of.out(f"{name}.self_attn.dense", bias=True)
        up, down = Product((f"{name}.mlp.fc1",), (inner,), of.hidden, bias=True), Product((f"{name}.mlp.fc2",), (of.hidden,), inner, bias=True)
        norm = Norm(f"{name}.input_layernorm", of.hidden, eps, pytorch.LayerNorm)
        blocks.append(Parallel(norm, (attention, (up, Activation(ACTIVATIONS[act]), down))))
    vocabulary = config.size("vocab_size")
    head = Product(("lm_head",), (vocabulary,), of.hidden, bias=True, high_precision=True)
    body = (*blocks, Norm("model.final_layernorm", of.hidden, eps, pytorch.LayerNorm))
    tied, context = config.flag("tie_word_embeddings"), config.size("max_position_embeddings")
    return Blueprint(vocabulary, context, of.hidden, "model.embed_tokens.weight", body, head, tied)
