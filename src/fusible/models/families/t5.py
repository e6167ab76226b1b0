"""T5: relative positions that all layers share, RMSNorm before each part of a layer, scores without a scale."""

from __future__ import annotations

from typing import Any

from fusible.models.blueprints import EncoderDecoderBlueprint
from fusible.models.families.config import Config
from fusible.models.families.decoder import GATES
from fusible.models.families.gpt2 import ACTIVATIONS
from fusible.models.families.registry import family
from fusible.models.parts import Activation, Attention, CrossAttention, Norm, Part, Product, Residual
from fusible.models.relative_positions import RelativeTable
from fusible.models.tokens import Tokens

__all__ = ["t5"]

_UNSCALED: dict[str, Any] = {"scale": 1.0, "mask": True}


@family("t5")
def t5(config: Config) -> EncoderDecoderBlueprint:
    """Raffel et al. 2019, arXiv:1910.10683; with gates, Shazeer 2020, arXiv:2002.05202."""
    config = config.with_names(hidden_size="d_model", num_attention_heads="num_heads", num_hidden_layers="num_layers", head_dim="d_kv")
    config.architecture("T5ForConditionalGeneration")
    hidden, vocabulary = config.size("d_model"), config.size("vocab_size")
    encoder, decoder, memory = list[Part](), list[Part](), list[Product]()
    for layer in range(config.size("num_layers")):
        name = f"encoder.block.{layer}.layer"
        encoder += [_self_attention(config, f"{name}.0", causal=False), _mlp(config, f"{name}.1")]
    for layer in range(config.size("num_decoder_layers", config.size("num_layers"))):
        name = f"decoder.block.{layer}.layer"
        decoder += [_self_attention(config, f"{name}.0", causal=True), _cross_attention(config, f"{name}.1"), _mlp(config, f"{name}.2")]
        over = f"{name}.1.EncDecAttention"
        memory.append(Product((f"{over}.k", f"{over}.v"), (_inner(config),) * 2, hidden))
    tokens = Tokens("shared.weight", vocabulary, hidden)
    # Files of before the entry said so by it: the first models' heads are the table, and take hidden states of another size.
    scaled = config.flag("scale_decoder_outputs", config.flag("tie_word_embeddings", True))
    return EncoderDecoderBlueprint(
        tokens,
        (*encoder, _norm(config, "encoder.final_layer_norm")),
        tokens,
        (*decoder, _norm(config, "decoder.final_layer_norm")),
        tuple(memory),
        Product(("lm_head",), (vocabulary,), hidden, high_precision=True),
        start=next(iter((*config.tokens("decoder_start_token_id"), *config.tokens("pad_token_id"))), 0),
        stop=config.tokens("eos_token_id") if "eos_token_id" in config.entries else (1,),
        head_scale=hidden**-0.5 if scaled else 1.0,
        padded=True,
        encoder_table=_table(config, "encoder", both_ways=True),
        decoder_table=_table(config, "decoder", both_ways=False),
    )


def _inner(config: Config) -> int:
    """The columns of all heads."""
    return config.size("num_heads") * config.size("d_kv")


def _norm(config: Config, name: str) -> Norm:
    return Norm(name, config.size("d_model"), config.number("layer_norm_epsilon", 1e-6))


def _table(config: Config, side: str, *, both_ways: bool) -> RelativeTable:
    name = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    buckets, farthest = config.size("relative_attention_num_buckets", 32), config.size("relative_attention_max_distance", 128)
    return RelativeTable(name, buckets, config.size("num_heads"), farthest, both_ways)


def _self_attention(config: Config, name: str, *, causal: bool) -> Residual:
    hidden, inner, heads, own = config.size("d_model"), _inner(config), config.size("num_heads"), f"{name}.SelfAttention"
    qkv = Product((f"{own}.q", f"{own}.k", f"{own}.v"), (inner,) * 3, hidden)
    attention = Attention(heads, heads, config.size("d_kv"), {**_UNSCALED, "causal": causal})
    return Residual((_norm(config, f"{name}.layer_norm"), qkv, attention, Product((f"{own}.o",), (hidden,), inner)))


def _cross_attention(config: Config, name: str) -> Residual:
    hidden, inner, own = config.size("d_model"), _inner(config), f"{name}.EncDecAttention"
    q, out = Product((f"{own}.q",), (inner,), hidden), Product((f"{own}.o",), (hidden,), inner)
    return Residual((_norm(config, f"{name}.layer_norm"), q, CrossAttention(config.size("num_heads"), config.size("d_kv"), _UNSCALED), out))


def _mlp(config: Config, name: str) -> Residual:
    hidden, inner, own = config.size("d_model"), config.size("d_ff"), f"{name}.DenseReluDense"
    kind = config.text("feed_forward_proj", "relu")
    gated, act = kind.startswith("gated-"), kind.removeprefix("gated-")
    known = GATES if gated else ACTIVATIONS
    act = "gelu_new" if kind == "gated-gelu" else act  # what the name means in the models that have it
    if act not in known:
        raise config.refuse("feed_forward_proj", f"gated-, or not, and one of {', '.join(ACTIVATIONS)}")
    up = Product((f"{own}.wi_0", f"{own}.wi_1"), (inner, inner), hidden) if gated else Product((f"{own}.wi",), (inner,), hidden)
    return Residual((_norm(config, f"{name}.layer_norm"), up, Activation(known[act]), Product((f"{own}.wo",), (hidden,), inner)))
