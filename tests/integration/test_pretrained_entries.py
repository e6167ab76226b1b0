"""Entries of a config.json that change what transformers computes: each is applied or refused; those that it passes over change nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pretrained_models import given, reference, saved, told

from fusible.errors import CheckpointError
from fusible.models import from_pretrained
from fusible.models.families import FAMILIES, left_to_chance

_WINDOW: dict[str, Any] = {"sliding_window": 4}
_TYPED = {**_WINDOW, "layer_types": ["full_attention", "sliding_attention"]}
_USED = {**_WINDOW, "use_sliding_window": True}
_LINEAR = {"rope_type": "linear", "factor": 2.0}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
_OF_KINDS = {"full_attention": _YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}

APPLIED: list[tuple[str, dict[str, Any]]] = [
    *((name, _TYPED) for name in ("llama", "gemma", "phi", "mistral", "mixtral", "phi3", "gemma2", "gemma3")),
    ("mistral", {**_WINDOW, "use_sliding_window": False}),
    *((name, {**_USED, "layer_types": None, "max_window_layers": 1}) for name in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")),
    *((name, {**_TYPED, "use_sliding_window": True}) for name in ("qwen2", "qwen2_moe", "qwen3_moe")),
    ("qwen3_moe", {**_USED, "max_window_layers": 9}),
    ("llama", {"rope_scaling": _LINEAR, "rope_theta": 500.0}),
    ("qwen2", {"rope_scaling": {**_LINEAR, "rope_theta": 500.0}}),
    ("llama", {"rope_parameters": _YARN, "original_max_position_embeddings": 64}),
    ("gemma2", {"rope_parameters": _YARN}),
    ("gemma3", {**_TYPED, "rope_parameters": _OF_KINDS}),
    ("gpt2", {"n_head": None, "num_attention_heads": 2}),
    ("llama", {"is_causal": True}),
    ("bert", {"is_causal": False}),
]


@pytest.mark.parametrize(("name", "changes"), APPLIED, ids=[f"{name} {' '.join(changes)}" for name, changes in APPLIED])
def test_entries_are_taken_as_transformers_takes_them(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    folder = _changed(name, changes, tmp_path)
    theirs, (ours, inputs) = type(reference(name)).from_pretrained(folder).eval(), given(name)
    with torch.no_grad():
        y, wanted = from_pretrained(folder)(*ours), told(theirs(**inputs))
    assert (y - wanted).abs().max() < 2e-5 * wanted.abs().max()  # some 2^8 roundings of fp32, one behind another


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *((name, {"use_bidirectional_attention": True}, "expected false, got True") for name in ("gemma", "gemma2", "gemma3")),
    *((name, {"is_causal": False}, "expected True, got False") for name in ("llama", "mistral", "qwen3_moe", "gpt2", "phi", "deepseek_v3")),
    *((name, {"is_causal": True}, "expected False, got True") for name in ("bert", "vit")),
    *((name, {"is_causal": told}, f"expected none, got {told}") for name in ("whisper", "t5") for told in (True, False)),
    ("llama", {"partial_rotary_factor": 0.5}, "expected 1, got 0.5"),
    ("gemma3", {"attn_logit_softcapping": 0.5}, "expected None, got 0.5"),
    ("gemma3", {"rope_parameters": _YARN}, "expected those of full_attention and of sliding_attention"),
    ("gemma3", {"rope_scaling": _LINEAR}, "expected none beside rope_parameters of each kind of layer"),
    ("gpt2", {"num_attention_heads": 2}, "expected 4, as n_head says, got 2"),
    ("whisper", {"num_key_value_heads": 2}, "expected 4, as encoder_attention_heads says, got 2"),
    ("t5", {"head_dim": 8}, "expected 16, as d_kv says, got 8"),
    ("deepseek_v3", {"head_dim": 8}, "expected 32, got 8"),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED, ids=[f"{name} {changes}" for name, changes, _ in REFUSED])
def test_entries_that_our_models_are_not_made_with_are_refused(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    (entry,) = changes
    with pytest.raises(CheckpointError, match=f"^{entry} of config.json of a .* model: {message}"):
        from_pretrained(_changed(name, changes, tmp_path))


DECODERS = ("deepseek_v3", "gemma", "gemma2", "gemma3_text", "gpt2", "llama", "mistral", "mixtral", "phi", "phi3")
DECODERS += ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")


@pytest.mark.parametrize("kind", DECODERS)
def test_entries_of_dropout_are_told(kind: str) -> None:
    """All that transformers' configurations have: what counts in training alone can be told by no logits."""
    usual = type(transformers.AutoConfig.for_model(kind))().to_dict()
    names = {name for name in usual if "drop" in name or "jitter" in name} - {"summary_first_dropout"}  # of a classifier
    assert left_to_chance({"model_type": kind}) == {name: usual[name] for name in names if usual[name]}
    assert left_to_chance({"model_type": kind, **dict.fromkeys(names, 0.3)}) == dict.fromkeys(names, 0.3) and names
    assert left_to_chance({"model_type": kind, **dict.fromkeys(names, 0)}) == {}
    assert left_to_chance({"model_type": kind, **dict.fromkeys(names)}) == {}


def test_every_decoder_is_asked_for_its_dropout() -> None:
    assert {*DECODERS, "bert", "vit", "t5", "whisper"} == {*FAMILIES}


def _changed(name: str, changes: dict[str, Any], place: Path) -> Path:
    """The directory that transformers writes, but for these entries; those of None are left out."""
    folder = saved(name, place)
    entries = {**json.loads((folder / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(json.dumps({entry: value for entry, value in entries.items() if value is not None or entry not in changes}))
    return folder
