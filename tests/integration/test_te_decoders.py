"""Decoders of ``te.TransformerLayer``, as a client makes them of transformers' models: their checkpoints, by the names of both libraries."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from convert_families import transformers
from te_client import package

import fusible
from fusible.compat import te_modules
from fusible.errors import CheckpointError
from fusible.models import from_pretrained, from_transformer_engine, to_transformer_engine

SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
OPTIONS = {**SIZES, "max_position_embeddings": 64, "initializer_range": 0.1}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"num_key_value_heads": 2},
    "Gemma": {"num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 0},
    "Qwen2": {"num_key_value_heads": 2},
    "Qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "Mistral": {"num_key_value_heads": 4, "sliding_window": None},
}
EACH = pytest.mark.parametrize("family", FAMILIES)
FUSED = pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])


@pytest.fixture
def te() -> Iterator[Any]:
    with package() as te:
        yield te


def plain(family: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**OPTIONS, **FAMILIES[family])
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith(".bias"):
                parameter.normal_(0.5, 0.2)  # of ones and zeros every mistake would give the same
    return model


def layer_of(te: Any, config: Any, fused: bool) -> torch.nn.Module:
    """A decoder layer that transformers calls."""
    gemma = config.model_type == "gemma"
    more = {"qk_norm_type": "RMSNorm", "qk_norm_before_rope": True} if config.model_type == "qwen3" else {}
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    class DecoderLayer(te.TransformerLayer):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return super().forward(hidden_states, rotary_pos_emb=te.RotaryPositionEmbedding(width)(max_seq_len=64))

    return DecoderLayer(
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads,
        num_gqa_groups=config.num_key_value_heads,
        kv_channels=width,
        layernorm_epsilon=config.rms_norm_eps,
        normalization="RMSNorm",
        zero_centered_gamma=gemma,
        activation="geglu" if gemma else "swiglu",
        bias=config.model_type == "qwen2",
        fuse_qkv_params=fused,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        self_attn_mask_type="causal",
        attn_input_format="bshd",
        params_dtype=torch.float32,
        **more,
    )


def replaced(te: Any, model: Any, fused: bool) -> Any:
    """The model with the package's layers, which have its weights."""
    state = to_transformer_engine(model.state_dict(), model.config.to_dict(), fuse_qkv=fused)
    made = type(model)(model.config).eval()
    for index in range(model.config.num_hidden_layers):
        made.model.layers[index] = layer_of(te, model.config, fused)
    missing, unexpected = made.load_state_dict(state, strict=False)
    assert not unexpected and all(name.endswith("_extra_state") for name in missing)
    return made


def drawn() -> torch.Tensor:
    return torch.randint(96, (2, 20), generator=torch.Generator().manual_seed(1))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found = model(drawn())
    return found if isinstance(found, torch.Tensor) else found.logits


def check_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Sums of up to 96 terms in fp32, through two layers; rotations by cosines that each library computes."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=96**0.5 * 2.0**-21 * wanted.abs().max().item())


@EACH
@FUSED
def test_what_a_client_saves_is_a_model_of_the_family(te: Any, family: str, fused: bool, tmp_path: Path) -> None:
    model = plain(family)
    theirs = replaced(te, model, fused)
    wanted = logits(model)
    check_near(logits(theirs), wanted)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = from_pretrained(tmp_path / "theirs")
    check_near(logits(ours), wanted)
    back = from_transformer_engine(theirs.state_dict(), model.config.to_dict())
    state = model.state_dict()
    assert {name for name in back if name not in state} <= {name for name in back if name.endswith(".bias")}
    assert all(torch.equal(back[name], value) for name, value in state.items())
    assert not any(value.any() for name, value in back.items() if name not in state)  # biases that the package alone has


@EACH
@FUSED
def test_the_modules_without_the_package_take_the_same(family: str, fused: bool) -> None:
    model = plain(family)
    check_near(logits(replaced(te_modules, model, fused)), logits(model))


def test_a_model_that_was_trained_in_8_bits_is_read(te: Any, tmp_path: Path) -> None:
    """Its scales stand beside its weights."""
    theirs = replaced(te, plain("Llama"), False)
    recipe = importlib.import_module("transformer_engine.common.recipe").DelayedScaling()
    with te.autocast(recipe=recipe):
        theirs(torch.randint(96, (4, 16))).logits.square().mean().backward()
    theirs.save_pretrained(tmp_path / "theirs")
    check_near(logits(from_pretrained(tmp_path / "theirs")), logits(theirs))
    held = from_pretrained(tmp_path / "theirs", fusible.MXFP8BlockScaling())
    assert (logits(held) - logits(theirs)).norm() < 0.2 * logits(theirs).norm()
    trained = from_pretrained(tmp_path / "theirs", trainable=True)
    fusible.save_pretrained(trained, tmp_path / "plain")
    check_near(logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")), logits(theirs))


@EACH
@pytest.mark.parametrize("interleaved", [False, True])
@FUSED
def test_names_go_there_and_back(family: str, interleaved: bool, fused: bool) -> None:
    model = plain(family)
    state, config = model.state_dict(), model.config.to_dict()
    there = to_transformer_engine(state, config, fuse_qkv=fused, qkv_interleaved=interleaved)
    assert not any("q_proj" in name or "gate_proj" in name for name in there)
    assert any(name.endswith("layernorm_qkv.weight") for name in there) == fused
    back = from_transformer_engine(there, config, qkv_interleaved=interleaved)
    assert all(torch.equal(back[name], value) for name, value in state.items())


def test_a_bias_that_the_family_has_not_is_told(te: Any, tmp_path: Path) -> None:
    model = plain("Qwen2")
    theirs = replaced(te, model, False)
    with torch.no_grad():
        theirs.model.layers[1].layernorm_mlp.fc2_bias[3] = 1.0
    theirs.save_pretrained(tmp_path / "theirs")
    with pytest.raises(CheckpointError, match=r"^a model of this family: expected no such parameter, got model.layers.1.mlp.down_proj.bias; load"):
        from_pretrained(tmp_path / "theirs")


def test_other_layers_are_told(tmp_path: Path) -> None:
    state, config = plain("Llama").state_dict(), plain("Llama").config.to_dict()
    there = to_transformer_engine(state, config)
    cases: list[tuple[Any, str]] = [
        (lambda: to_transformer_engine(state, {**config, "model_type": "gpt2"}), r"^model_type of a decoder of te.TransformerLayer: .* got 'gpt2'"),
        (lambda: from_transformer_engine(there, {**config, "model_type": "gemma3_text"}), r"got 'gemma3_text'"),
        (
            lambda: from_transformer_engine({**there, "model.layers.0.self_attention.layernorm_query.weight": torch.ones(2)}, config),
            r"^a te.TransformerLayer: expected parameters of .*, got model.layers.0.self_attention.layernorm_query.weight",
        ),
        (
            lambda: to_transformer_engine({**state, "model.layers.1.other.weight": torch.ones(2)}, config),
            r"^model.layers.1: expected a parameter that te.TransformerLayer has, got other.weight",
        ),
        (
            lambda: to_transformer_engine({name: value for name, value in state.items() if "0.mlp.up" not in name}, config),
            r"^a decoder: expected model.layers.0.mlp.up_proj.weight, got none",
        ),
    ]
    for call, sentence in cases:
        with pytest.raises(CheckpointError, match=sentence):
            call()
    wrong = {**there, "model.layers.0.layernorm_mlp.fc1_weight": torch.ones(190, 64)}
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    importlib.import_module("safetensors.torch").save_file(wrong, tmp_path / "theirs" / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"^model.layers.0.mlp.gate_proj.weight: expected shape \[96, 64\], as config.json says, got \[95, 64\]"
    ):
        from_pretrained(tmp_path / "theirs")
