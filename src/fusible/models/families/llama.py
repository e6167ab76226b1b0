"""Llama, Mistral, Qwen2, Qwen3 and Phi-3: grouped-query attention with rotary positions, RMSNorm, gated MLPs."""

from __future__ import annotations

from fusible.models.families.config import Config
from fusible.models.families.decoder import Decoder, layer_types
from fusible.models.families.registry import family
from fusible.models.parts import Activation, Blueprint, Part, Product

__all__ = ["llama", "mistral", "phi3", "qwen2", "qwen3", "with_window_of_qwen"]


@family("llama")
def llama(config: Config) -> Blueprint:
    """Touvron et al. 2023, arXiv:2302.13971."""
    return _decoder(Decoder(config), bias=config.flag("attention_bias"), out_bias=config.flag("attention_bias"), mlp_bias=config.flag("mlp_bias"))


@family("mistral")
def mistral(config: Config) -> Blueprint:
    """Jiang et al. 2023, arXiv:2310.06825: windows in all layers."""
    return _decoder(Decoder(config.with_defaults(sliding_window=4096), windows="all"), bias=False)


def with_window_of_qwen(config: Config) -> Config:
    """With the window that ``use_sliding_window`` says is used, or none."""
    config = config.with_defaults(use_sliding_window=False, max_window_layers=28, sliding_window=4096)
    return config if config.flag("use_sliding_window") else Config({**config.entries, "sliding_window": None})


def _typed(config: Config) -> Config:
    """With the kinds of layers: Qwen's have windows from ``max_window_layers`` on."""
    config = with_window_of_qwen(config)
    slides, first = config.has("sliding_window"), config.entries["max_window_layers"]
    return config.with_defaults(layer_types=layer_types(config, lambda layer: slides and layer >= first))


@family("qwen2")
def qwen2(config: Config) -> Blueprint:
    """Yang et al. 2024, arXiv:2407.10671: q, k and v have biases."""
    return _decoder(Decoder(_typed(config), windows="typed"), bias=True)


@family("qwen3")
def qwen3(config: Config) -> Blueprint:
    """Yang et al. 2025, arXiv:2505.09388: heads of q and k are normalized."""
    bias = config.flag("attention_bias")
    return _decoder(Decoder(_typed(config.with_defaults(head_dim=128)), windows="typed"), bias=bias, out_bias=bias, normed=True)


@family("phi3")
def phi3(config: Config) -> Blueprint:
    """Abdin et al. 2024, arXiv:2404.14219: Llama's layer, with q, k and v, and gate and up, of one matrix each."""
    of, blocks = Decoder(config.with_defaults(rms_norm_eps=1e-5), windows="all", partial=True), list[Part]()
    inner, rows = config.size("intermediate_size"), (of.heads + 2 * of.groups) * of.head_width
    for layer in of.layers:
        name = f"model.layers.{layer}"
        qkv = Product((f"{name}.self_attn.qkv_proj",), (rows,), of.hidden)
        up, down = Product((f"{name}.mlp.gate_up_proj",), (2 * inner,), of.hidden), Product((f"{name}.mlp.down_proj",), (of.hidden,), inner)
        blocks += of.block(name, (qkv, of.attention(layer), of.out(f"{name}.self_attn.o_proj")), (up, Activation(of.gate()), down))
    return of.whole(blocks)


def _decoder(of: Decoder, *, bias: bool, out_bias: bool = False, mlp_bias: bool = False, normed: bool = False) -> Blueprint:
    blocks = list[Part]()
    for layer in of.layers:
        name = f"model.layers.{layer}"
        attention = f"{name}.self_attn"
        norm = (of.head_norm(attention),) if normed else ()
        first = of.qkv(attention, bias=bias), *norm, of.attention(layer), of.out(f"{attention}.o_proj", bias=out_bias)
        blocks += of.block(name, first, of.mlp(f"{name}.mlp", bias=mlp_bias))
    return of.whole(blocks)
