"""Whisper: speech is encoded, and a decoder writes its text; LayerNorm before each part of a layer."""

from __future__ import annotations

from fusible import pytorch
from fusible.models.blueprints import EncoderDecoderBlueprint
from fusible.models.families.config import Config
from fusible.models.families.gpt2 import ACTIVATIONS
from fusible.models.families.registry import family
from fusible.models.parts import Activation, Attention, CrossAttention, Norm, Part, Product, Residual
from fusible.models.speech import Speech
from fusible.models.tokens import Tokens

__all__ = ["whisper"]

_EPS = 1e-5


@family("whisper")
def whisper(config: Config) -> EncoderDecoderBlueprint:
    """Radford et al. 2022, arXiv:2212.04356."""
    of_encoder = {"num_attention_heads": "encoder_attention_heads", "num_key_value_heads": "encoder_attention_heads"}
    config = config.with_names(hidden_size="d_model", num_hidden_layers="encoder_layers", **of_encoder)
    config.architecture("WhisperForConditionalGeneration")
    hidden, vocabulary = config.size("d_model"), config.size("vocab_size")
    first, second, rows = (f"model.encoder.{name}" for name in ("conv1", "conv2", "embed_positions.weight"))
    speech = Speech(first, second, rows, config.size("num_mel_bins", 80), hidden, config.size("max_source_positions", 1500))
    context, places = config.size("max_target_positions", 448), "model.decoder.embed_positions.weight"
    tokens = Tokens("model.decoder.embed_tokens.weight", vocabulary, hidden, places, context)
    encoder, decoder, memory = list[Part](), list[Part](), list[Product]()
    for layer in range(config.size("encoder_layers")):
        name = f"model.encoder.layers.{layer}"
        encoder += [_self_attention(config, name, "encoder"), _mlp(config, name, "encoder")]
    for layer in range(config.size("decoder_layers")):
        name = f"model.decoder.layers.{layer}"
        decoder += [_self_attention(config, name, "decoder"), _cross_attention(config, name), _mlp(config, name, "decoder")]
        over = f"{name}.encoder_attn"
        memory.append(Product((f"{over}.k_proj", f"{over}.v_proj"), (hidden, hidden), hidden, (None, f"{over}.v_proj.bias")))
    return EncoderDecoderBlueprint(
        speech,
        (*encoder, _norm(config, "model.encoder.layer_norm")),
        tokens,
        (*decoder, _norm(config, "model.decoder.layer_norm")),
        tuple(memory),
        Product(("proj_out",), (vocabulary,), hidden, high_precision=True),
        start=next(iter(config.tokens("decoder_start_token_id")), 50257),
        stop=config.tokens("eos_token_id"),
        unsaid=_words(config, "suppress_tokens"),
        unsaid_first=_words(config, "begin_suppress_tokens"),
        tied=config.flag("tie_word_embeddings", True),
        context=context,
    )


def _words(config: Config, name: str) -> tuple[int, ...]:
    """Tokens of the vocabulary: the lists of a large one stand in smaller models' configurations, too."""
    return tuple(token for token in config.tokens(name) if token < config.size("vocab_size"))


def _norm(config: Config, name: str) -> Norm:
    return Norm(name, config.size("d_model"), _EPS, pytorch.LayerNorm)


def _self_attention(config: Config, name: str, side: str) -> Residual:
    """The products of keys have no bias."""
    hidden, heads, own = config.size("d_model"), config.size(f"{side}_attention_heads"), f"{name}.self_attn"
    biases = (f"{own}.q_proj.bias", None, f"{own}.v_proj.bias")
    qkv = Product((f"{own}.q_proj", f"{own}.k_proj", f"{own}.v_proj"), (hidden,) * 3, hidden, biases)
    attention = Attention(heads, heads, hidden // heads, {"causal": side == "decoder"})
    return Residual((_norm(config, f"{name}.self_attn_layer_norm"), qkv, attention, Product((f"{own}.out_proj",), (hidden,), hidden, bias=True)))


def _cross_attention(config: Config, name: str) -> Residual:
    hidden, heads, own = config.size("d_model"), config.size("decoder_attention_heads"), f"{name}.encoder_attn"
    q, out = (Product((f"{own}.{end}",), (hidden,), hidden, bias=True) for end in ("q_proj", "out_proj"))
    return Residual((_norm(config, f"{name}.encoder_attn_layer_norm"), q, CrossAttention(heads, hidden // heads), out))


def _mlp(config: Config, name: str, side: str) -> Residual:
    hidden, inner = config.size("d_model"), config.size(f"{side}_ffn_dim")
    up, down = Product((f"{name}.fc1",), (inner,), hidden, bias=True), Product((f"{name}.fc2",), (hidden,), inner, bias=True)
    act = Activation(config.choice("activation_function", ACTIVATIONS, "gelu"))
    return Residual((_norm(config, f"{name}.final_layer_norm"), up, act, down))
