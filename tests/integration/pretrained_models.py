"""Models of the families that ``from_pretrained`` reads, as transformers writes them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from convert_families import BY_NAME, WORDS, Family, transformers

__all__ = ["DECODERS", "drawn", "reference", "saved"]

_SCALED: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 32},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32},
}


def _with(name: str, of: str, **options: Any) -> Family:
    family = BY_NAME[of] if of in BY_NAME else DECODERS[of]
    return Family(name, family.model, family.config, {**family.options, **options}, family.targets)


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


@cache
def reference(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model of a family; nobody trains it."""
    return DECODERS[name].make(dtype=dtype)


def saved(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """The directory that transformers writes of it."""
    place = folder / name
    reference(name, dtype).save_pretrained(place)
    return place


def drawn(*shape: int, seed: int = 1) -> torch.Tensor:
    """Tokens at random."""
    return torch.randint(3, WORDS, shape, generator=torch.Generator().manual_seed(seed))


transformers.logging.disable_progress_bar()
