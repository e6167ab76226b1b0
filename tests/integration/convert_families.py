"""Families of transformers' models, each as a small seeded model and a call of it."""

from __future__ import annotations

import contextlib
import importlib.machinery
import os
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import fusible

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


@contextlib.contextmanager
def without_nvidias_package() -> Iterator[None]:
    """NVIDIA's package is in the environment of the tests without what it needs for torch, and raises where peft looks whether it is there."""
    name = "transformer_engine"
    if name in sys.modules or "peft" in sys.modules:
        yield
        return
    stub = types.ModuleType(name)
    stub.__spec__ = importlib.machinery.ModuleSpec(name, None)
    sys.modules[name] = stub
    try:
        yield
    finally:
        del sys.modules[name]


with without_nvidias_package():
    import peft
    import transformers

__all__ = ["BY_NAME", "FAMILIES", "OPERAND", "RECIPES", "Family", "check_falls_alike", "every_family", "logits", "losses", "peft", "transformers"]

WIDTH, INNER, LAYERS, HEADS, WORDS, LENGTH = 64, 96, 2, 4, 128, 12

_DECODER = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "vocab_size": WORDS,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_PLAIN = {key: value for key, value in _DECODER.items() if key != "num_key_value_heads"}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_T5 = {"vocab_size": WORDS, "d_model": WIDTH, "d_kv": 16, "d_ff": INNER, "num_layers": LAYERS, "num_heads": HEADS, "initializer_factor": 1.0}
_T5 |= {"decoder_start_token_id": 0, "eos_token_id": None, "dropout_rate": 0.0}
_WHISPER = {"d_model": WIDTH, "encoder_ffn_dim": INNER, "decoder_ffn_dim": INNER, "vocab_size": WORDS, "num_mel_bins": 16, "init_std": 0.1}
_WHISPER |= {f"{side}_{name}": number for side in ("encoder", "decoder") for name, number in (("layers", LAYERS), ("attention_heads", HEADS))}
_WHISPER |= {"max_source_positions": 24, "max_target_positions": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
_WHISPER |= {"decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None}


@dataclass(frozen=True)
class Family:
    """``model`` and ``config``: names in transformers. ``targets``: modules that LoRA adapts. ``kind``: of the call."""

    name: str
    model: str
    config: str
    options: dict[str, Any]
    targets: tuple[str, ...]
    kind: str = "decoder"

    def make(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
        """A new model in evaluation mode, the same for a seed. Norms and biases differ from what they begin as."""
        torch.manual_seed(seed)
        config = getattr(transformers, self.config)(**self.options)
        model = getattr(transformers, self.model)(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.add_(torch.randn_like(buffer) * 0.1)
        return model.to(dtype)

    def inputs(self, seed: int = 1, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        """The arguments of a call with labels."""
        draw = torch.Generator().manual_seed(seed)
        words = torch.randint(3, WORDS, (2, LENGTH), generator=draw)
        if self.kind == "image":
            return {"pixel_values": torch.randn(2, 3, 16, 16, generator=draw).to(dtype), "labels": torch.tensor([0, 1])}
        if self.kind == "speech":
            return {"input_features": torch.randn(2, 16, 48, generator=draw).to(dtype), "labels": words}
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words}

    @property
    def generates(self) -> bool:
        return self.kind in ("decoder", "encoder-decoder", "speech")


def _family(name: str, model: str, config: str, options: dict[str, Any], targets: str = "q_proj v_proj down_proj", kind: str = "decoder") -> Family:
    return Family(name, model, config, options, tuple(targets.split()), kind)


FAMILIES = (
    _family("llama", "LlamaForCausalLM", "LlamaConfig", _DECODER),
    _family("mistral", "MistralForCausalLM", "MistralConfig", {**_DECODER, "sliding_window": 8}),
    _family("qwen2", "Qwen2ForCausalLM", "Qwen2Config", _DECODER),
    _family("qwen3", "Qwen3ForCausalLM", "Qwen3Config", {**_DECODER, "head_dim": 16}),
    _family("gemma", "GemmaForCausalLM", "GemmaConfig", {**_DECODER, "head_dim": 16}),
    _family("gemma2", "Gemma2ForCausalLM", "Gemma2Config", {**_DECODER, "head_dim": 16}),
    _family("gemma3", "Gemma3ForCausalLM", "Gemma3TextConfig", {**_DECODER, "head_dim": 16}),
    _family(
        "gpt2",
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "vocab_size": WORDS, "n_positions": 128, "initializer_range": 0.1}
        | {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        "c_attn c_proj",
    ),
    _family("gpt_neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", _PLAIN, "query_key_value dense_4h_to_h"),
    _family("phi", "PhiForCausalLM", "PhiConfig", {**_DECODER, "num_key_value_heads": HEADS}, "q_proj v_proj fc2"),
    _family("phi3", "Phi3ForCausalLM", "Phi3Config", _DECODER, "qkv_proj down_proj"),
    _family("mixtral", "MixtralForCausalLM", "MixtralConfig", {**_DECODER, "num_local_experts": 4}, "q_proj v_proj"),
    _family("qwen2_moe", "Qwen2MoeForCausalLM", "Qwen2MoeConfig", {**_DECODER, **_EXPERTS, "shared_expert_intermediate_size": 64}, "q_proj v_proj"),
    _family("qwen3_moe", "Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**_DECODER, **_EXPERTS, "head_dim": 16}, "q_proj v_proj"),
    _family(
        "bert",
        "BertForMaskedLM",
        "BertConfig",
        {**_PLAIN, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        "query value output.dense",
        "encoder",
    ),
    _family(
        "vit",
        "ViTForImageClassification",
        "ViTConfig",
        {key: _PLAIN[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "initializer_range")}
        | {"image_size": 16, "patch_size": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        "q_proj v_proj fc2",
        "image",
    ),
    _family("whisper", "WhisperForConditionalGeneration", "WhisperConfig", {**_WHISPER, "dropout": 0.0}, "q_proj v_proj fc2", "speech"),
    _family("t5", "T5ForConditionalGeneration", "T5Config", _T5, "q v wo", "encoder-decoder"),
    _family("t5_gated", "T5ForConditionalGeneration", "T5Config", {**_T5, "feed_forward_proj": "gated-gelu"}, "q v wo", "encoder-decoder"),
)

BY_NAME: dict[str, Family] = {family.name: family for family in FAMILIES}

RECIPES = {
    "delayed": fusible.DelayedScaling(),
    "current": fusible.Float8CurrentScaling(),
    "block": fusible.Float8BlockScaling(),
    "mxfp8": fusible.MXFP8BlockScaling(),
    "nvfp4": fusible.NVFP4BlockScaling(),
}
OPERAND = dict.fromkeys(RECIPES, 2.0**-4) | {"nvfp4": 2.0**-2}
"""The largest relative error of one rounded operand: half a unit in the last place, of 3 bits of mantissa and of 1."""

_FURTHER = frozenset({"gpt_neox", "gemma2", "gemma3", "phi3", "qwen3_moe", "t5_gated"})


def every_family(test: Any) -> Any:
    """Run a test once for each family; relatives of others among the slow tests."""
    marks = {name: [pytest.mark.slow] if name in _FURTHER else [] for name in BY_NAME}
    return pytest.mark.parametrize("family", [pytest.param(family, id=family.name, marks=marks[family.name]) for family in FAMILIES])(test)


def logits(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """Of a call without gradients."""
    with torch.no_grad():
        return model(**inputs).logits


def losses(model: Any, inputs: dict[str, Any], steps: int = 3, rate: float = 0.05) -> list[float]:
    """The losses before each of ``steps`` and behind the last."""
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=rate)
    found = []
    for _ in range(steps + 1):
        loss = model.train()(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def check_falls_alike(found: list[float], reference: list[float], tolerance: float) -> None:
    """Check that the losses differ by no more than ``tolerance`` of what they fall."""
    fallen = max(reference) - min(reference)
    assert fallen > 0.05
    assert max(abs(a - b) for a, b in zip(found, reference, strict=True)) < tolerance * max(fallen, 1.0)
