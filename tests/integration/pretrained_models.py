"""Models of the families that ``from_pretrained`` reads, as transformers writes them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from convert_families import BY_NAME, WORDS, Family, transformers

__all__ = ["DECODERS", "ENCODERS", "ENCODER_DECODERS", "FAMILIES", "called", "drawn", "given", "reference", "saved", "told"]

_SCALED: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 32},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32},
}


def _with(name: str, of: str, **options: Any) -> Family:
    family = BY_NAME[of] if of in BY_NAME else DECODERS[of]
    return replace(family, name=name, options={**family.options, **options})


def _as(name: str, of: str, model: str, **options: Any) -> Family:
    """The same, of another architecture."""
    return replace(_with(name, of, **options), model=model)


DECODERS: dict[str, Family] = {
    name: BY_NAME[name] for name in ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gpt2", "phi", "phi3")
}
DECODERS |= {name: BY_NAME[name] for name in ("mixtral", "qwen2_moe")}
DECODERS["qwen3_moe"] = _with("qwen3_moe", "qwen3_moe", norm_topk_prob=True)
DECODERS["llama_tied_biased"] = _with("llama_tied_biased", "llama", tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
DECODERS |= {"llama_gelu": _with("llama_gelu", "llama", hidden_act="gelu"), "gpt2_gelu": _with("gpt2_gelu", "gpt2", activation_function="gelu")}
DECODERS["gemma2_window"] = _with("gemma2_window", "gemma2", sliding_window=4)
DECODERS["qwen2_window"] = _with("qwen2_window", "qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1)
_DEEPSEEK = {**BY_NAME["llama"].options, "num_key_value_heads": 4, "num_hidden_layers": 3, "first_k_dense_replace": 1, "moe_intermediate_size": 32}
_DEEPSEEK |= {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 32, "v_head_dim": 8, "n_routed_experts": 8}
_DEEPSEEK |= {"num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "n_shared_experts": 1}
_MSCALE = {"mscale": 0.7, "mscale_all_dim": 1.3}
DECODERS["deepseek_v3"] = Family("deepseek_v3", "DeepseekV3ForCausalLM", "DeepseekV3Config", _DEEPSEEK, ("q_b_proj", "kv_b_proj", "o_proj"))
DECODERS["deepseek_v3_yarn"] = _with("deepseek_v3_yarn", "deepseek_v3", attention_bias=True, rope_parameters={**_SCALED["yarn"], **_MSCALE})
DECODERS["deepseek_v3_halves"] = _with(
    *("deepseek_v3_halves", "deepseek_v3"),
    **{"q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "rope_interleave": False, "n_shared_experts": 2},
    **{"rope_parameters": _SCALED["yarn"], "first_k_dense_replace": 0, "num_hidden_layers": 2},
)
DECODERS |= {f"llama_{name}": _with(f"llama_{name}", "llama", rope_parameters=rope) for name, rope in _SCALED.items()}

ENCODERS: dict[str, Family] = {
    "bert": BY_NAME["bert"],
    "bert_model": _as("bert_model", "bert", "BertModel"),
    "bert_classifier": _as("bert_classifier", "bert", "BertForSequenceClassification", num_labels=5),
    "bert_untied": _with("bert_untied", "bert", tie_word_embeddings=False, hidden_act="gelu_new"),
    "vit": BY_NAME["vit"],
    "vit_model": _as("vit_model", "vit", "ViTModel"),
    "vit_oblong": _with("vit_oblong", "vit", image_size=[16, 24], patch_size=[4, 8], num_channels=1, num_labels=5, qkv_bias=False),
}
ENCODER_DECODERS: dict[str, Family] = {
    "whisper": BY_NAME["whisper"],
    "whisper_oblong": _with(
        "whisper_oblong", "whisper", encoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=128, activation_function="relu"
    ),
    "t5": BY_NAME["t5"],
    "t5_gated": BY_NAME["t5_gated"],
    "t5_oblong": _with("t5_oblong", "t5", num_decoder_layers=1, d_kv=8, relative_attention_num_buckets=8, relative_attention_max_distance=12),
    "t5_unscaled": _with("t5_unscaled", "t5", tie_word_embeddings=False),
}
FAMILIES = DECODERS | ENCODERS | ENCODER_DECODERS


@cache
def reference(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model of a family; nobody trains it."""
    return FAMILIES[name].make(dtype=dtype)


def saved(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """The directory that transformers writes of it."""
    place = folder / name
    reference(name, dtype).save_pretrained(place)
    return place


def drawn(*shape: int, seed: int = 1) -> torch.Tensor:
    """Tokens at random."""
    return torch.randint(3, WORDS, shape, generator=torch.Generator().manual_seed(seed))


def given(name: str, dtype: torch.dtype = torch.float32) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """The arguments of a call of our model, and those of transformers' for the same."""
    return called(FAMILIES[name], dtype)


def called(family: Family, dtype: torch.dtype = torch.float32) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """The same, of a family of any sizes."""
    if family.kind == "image":
        size = family.options["image_size"]
        height, width = size if isinstance(size, list) else (size, size)
        pixels = torch.randn(2, family.options.get("num_channels", 3), height, width, generator=torch.Generator().manual_seed(1)).to(dtype)
        return (pixels,), {"pixel_values": pixels}
    tokens = drawn(2, 24)
    if family.kind == "speech":
        features = torch.randn(2, 16, 48, generator=torch.Generator().manual_seed(1)).to(dtype)
        return (features, tokens), {"input_features": features, "decoder_input_ids": tokens}
    if family.kind == "encoder-decoder":
        source = drawn(2, 17, seed=4)
        return (source, tokens), {"input_ids": source, "decoder_input_ids": tokens}
    return (tokens,), {"input_ids": tokens}


def told(outputs: Any) -> torch.Tensor:
    """What a model is for, of all that transformers' gives: its logits, or its last hidden states."""
    return outputs[0]


transformers.logging.disable_progress_bar()
