"""Mixtral and Qwen's mixtures: Llama's layer, with experts for its MLP."""

from __future__ import annotations

from fusible.models.families.config import Config
from fusible.models.families.decoder import Decoder, layer_types
from fusible.models.families.llama import with_window_of_qwen
from fusible.models.families.registry import family
from fusible.models.parts import Activation, Blueprint, Experts, Part, Product, SharedExpert

__all__ = ["gate_name", "mixtral", "qwen2_moe", "qwen3_moe"]

_GATES = {"silu": "swiglu", "swish": "swiglu", "gelu": "erf_geglu", "gelu_new": "geglu", "gelu_pytorch_tanh": "geglu"}


@family("mixtral")
def mixtral(config: Config) -> Blueprint:
    """Jiang et al. 2024, arXiv:2401.04088."""
    config = config.with_names(num_experts="num_local_experts").with_defaults(rope_theta=1e6, rms_norm_eps=1e-5)
    of, blocks = Decoder(config, windows="all"), list[Part]()
    for layer in of.layers:
        name = f"model.layers.{layer}"
        attention = of.qkv(f"{name}.self_attn", bias=False), of.attention(layer), of.out(f"{name}.self_attn.o_proj")
        mixture = f"{name}.block_sparse_moe"
        up, down = (f"{mixture}.experts.{{}}.w1", f"{mixture}.experts.{{}}.w3"), f"{mixture}.experts.{{}}.w2"
        experts = _experts(of, f"{mixture}.gate", up, down, config.size("intermediate_size"), config.size("num_local_experts"))
        blocks += of.block(name, attention, (experts,))
    return of.whole(blocks)


@family("qwen2_moe")
def qwen2_moe(config: Config) -> Blueprint:
    """Yang et al. 2024, arXiv:2407.10671: an expert that every token takes, beside those that are chosen."""
    config = with_window_of_qwen(config.with_defaults(num_experts_per_tok=4))
    slides, last = config.has("sliding_window"), config.entries["max_window_layers"]
    config = config.with_defaults(layer_types=layer_types(config, lambda layer: slides and layer % 2 == 0 and layer < last))
    of, blocks = Decoder(config, windows="typed"), list[Part]()
    inner = config.size("shared_expert_intermediate_size")
    for layer in of.layers:
        name = f"model.layers.{layer}"
        attention, mixture = f"{name}.self_attn", f"{name}.mlp"
        first = of.qkv(attention, bias=config.flag("qkv_bias", True)), of.attention(layer), of.out(f"{attention}.o_proj")
        second = of.mlp(mixture)
        if _is_sparse(config, layer):
            up = Product((f"{mixture}.shared_expert.gate_proj", f"{mixture}.shared_expert.up_proj"), (inner, inner), of.hidden)
            shared = up, Activation(of.gate()), Product((f"{mixture}.shared_expert.down_proj",), (of.hidden,), inner)
            gate = Product((f"{mixture}.shared_expert_gate",), (1,), of.hidden, high_precision=True)
            second = (SharedExpert(_qwen_experts(of, mixture), gate, shared),)
        blocks += of.block(name, first, second)
    return of.whole(blocks)


@family("qwen3_moe")
def qwen3_moe(config: Config) -> Blueprint:
    """Yang et al. 2025, arXiv:2505.09388."""
    config = with_window_of_qwen(config.with_names(num_experts="num_local_experts").with_defaults(num_experts_per_tok=8))
    of, blocks = Decoder(config, windows="all"), list[Part]()
    bias = config.flag("attention_bias")
    for layer in of.layers:
        name = f"model.layers.{layer}"
        attention, mixture = f"{name}.self_attn", f"{name}.mlp"
        first = of.qkv(attention, bias=bias), of.head_norm(attention), of.attention(layer), of.out(f"{attention}.o_proj", bias=bias)
        blocks += of.block(name, first, (_qwen_experts(of, mixture),) if _is_sparse(config, layer) else of.mlp(mixture))
    return of.whole(blocks)


def _is_sparse(config: Config, layer: int) -> bool:
    """Whether a layer of Qwen's has experts."""
    return layer not in (config.entries.get("mlp_only_layers") or ()) and (layer + 1) % config.size("decoder_sparse_step", 1) == 0


def _qwen_experts(of: Decoder, mixture: str) -> Experts:
    each, config = f"{mixture}.experts.{{}}", of.config
    count = config.size("num_experts" if config.has("num_experts") else "num_local_experts")
    up, down, inner = (f"{each}.gate_proj", f"{each}.up_proj"), f"{each}.down_proj", config.size("moe_intermediate_size")
    return _experts(of, f"{mixture}.gate", up, down, inner, count, config.flag("norm_topk_prob", False))


def _experts(of: Decoder, router: str, up: tuple[str, ...], down: str, inner: int, count: int, normalized: bool = True) -> Experts:
    top_k = of.config.size("num_experts_per_tok", 2)
    return Experts(router, up, down, of.hidden, inner, count, top_k, gate_name(of.config), normalized)


def gate_name(config: Config) -> str:
    """The gate of experts, as ``pytorch.MixtureOfExperts`` calls it."""
    act = config.text("hidden_act", "silu")
    if act not in _GATES:
        raise config.refuse("hidden_act", f"one of {', '.join(_GATES)}")
    return _GATES[act]
