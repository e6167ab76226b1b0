"""``from_pretrained``: what transformers' models give, whole and token by token, and what cannot be loaded in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pretrained_models import DECODERS, FAMILIES, drawn, given, reference, saved, told

import fusible
from fusible.errors import CheckpointError
from fusible.models import from_config, from_pretrained, save_pretrained
from fusible.models.checkpoints import open_checkpoint
from fusible.models.held_formats import HELD_FORMATS

OTHERS = [name for name in FAMILIES if name not in DECODERS]
UNUSED = {"bert_untied": {"cls.predictions.bias"}}
"""What transformers writes, and computes nothing by."""
FP32 = 1e-5
"""Of the largest logit: two layers of width 64 round some hundred times, each by 2^-24."""


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    assert found.shape == wanted.shape
    torch.testing.assert_close(found.float(), wanted.float(), rtol=0, atol=tolerance * wanted.abs().max().item())


@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model, (ours, theirs) = from_pretrained(saved(name, tmp_path)), given(name)
    with torch.no_grad():
        close(model(*ours), told(reference(name)(**theirs)), FP32)


@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_in_bf16_are_as_far_from_fp32_as_transformers(name: str, tmp_path: Path) -> None:
    model, (ours, inputs) = from_pretrained(saved(name, tmp_path, torch.bfloat16)), given(name, torch.bfloat16)
    assert model.dtype is torch.bfloat16
    with torch.no_grad():
        found = model(*ours)
        rounded = told(reference(name, torch.bfloat16)(**inputs))
        exact = told(FAMILIES[name].make(dtype=torch.bfloat16).float()(**{key: _wide(value) for key, value in inputs.items()}))
        theirs = (rounded.float() - exact).norm()
    assert found.dtype is torch.bfloat16
    # What rounds where differs (a norm's product with its weight, a gate's with its factor): as large, not the same.
    assert (found.float() - exact).norm() < 2 * theirs


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.is_floating_point() else value


def elsewhere(model: torch.nn.Module, device: str) -> list[str]:
    """The names of parameters and buffers of which a tensor does not lie on ``device``; of a quantized one codes and scales are looked at."""
    names = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        parts = [tensor, *(part for part in vars(tensor).values() if isinstance(part, torch.Tensor))]
        names += [name for part in parts if part.device.type != device]
    return names


@pytest.mark.parametrize("held", HELD_FORMATS)
@pytest.mark.parametrize("name", FAMILIES)
def test_all_of_a_model_lies_on_the_device_that_is_asked_for(name: str, held: str, tmp_path: Path) -> None:
    """A device without memory, as every machine has it."""
    folder = saved(name, tmp_path)
    model = from_pretrained(folder, HELD_FORMATS[held], device="meta")
    assert model.device.type == "meta" and elsewhere(model, "meta") == []
    assert elsewhere(from_pretrained(folder, HELD_FORMATS[held], trainable=True, device="meta"), "meta") == []
    assert elsewhere(from_config(folder, device="meta"), "meta") == []


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("page_size", [None, 4])
def test_tokens_one_by_one_give_the_same_logits(name: str, page_size: int | None, tmp_path: Path) -> None:
    """Two sequences of different lengths, read in two pieces, and then a token each."""
    model: Any = from_pretrained(saved(name, tmp_path))
    texts = [drawn(20, seed=2), drawn(13, seed=3)]
    cache, read = model.new_cache(2, 32, page_size), [0, 0]
    with torch.no_grad():
        wanted = [reference(name)(text[None]).logits[0] for text in texts]
    with torch.inference_mode():
        for counts in ((7, 11), (0, 1), (11, 0), (1, 1), (1, 0)):
            pieces = [text[start : start + count] for text, start, count in zip(texts, read, counts, strict=True)]
            lengths = torch.tensor(counts, dtype=torch.int32)
            logits = model.next_logits(torch.cat(pieces), lengths, cache)
            cache.advance(lengths)
            read = [start + count for start, count in zip(read, counts, strict=True)]
            for row, count in enumerate(counts):
                if count:
                    close(logits[row], wanted[row][read[row] - 1], FP32)
    assert logits.dtype is torch.float32


def test_a_plain_checkpoint_is_read_where_it_lies(tmp_path: Path) -> None:
    """Weights that are one tensor in the file, of the dtype asked for, are views of the file."""
    folder = saved("phi3", tmp_path)
    model = from_pretrained(folder)
    with open("/proc/self/maps") as maps:
        places = [line.split()[0].split("-") for line in maps if str(folder) in line]
    assert places
    within = [any(int(low, 16) <= p.data_ptr() < int(high, 16) for low, high in places) for p in model.parameters() if p.dim() == 2]
    assert all(within)


def test_a_trainable_model_trains(tmp_path: Path) -> None:
    """And does not write to the file that it came from."""
    folder = saved("llama", tmp_path)
    before = (folder / "model.safetensors").read_bytes()
    model, tokens = from_pretrained(folder, fusible.Float8CurrentScaling(), trainable=True), drawn(4, 24)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    losses = []
    for _ in range(3):
        logits = model(tokens)
        loss = fusible.CrossEntropyLoss()(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]
    assert (folder / "model.safetensors").read_bytes() == before


CHANGES: list[tuple[str, str, dict[str, Any], str]] = [
    ("an unknown family", "llama", {"model_type": "mamba"}, "model_type of config.json: expected one of .*, got 'mamba'"),
    ("no family", "llama", {"model_type": None}, "model_type of config.json: expected an entry, got none"),
    ("a width that is none", "llama", {"hidden_size": -1}, "hidden_size of config.json of a llama model: expected an integer of at least 1"),
    ("another width", "llama", {"hidden_size": 32, "head_dim": 16}, r"embed_tokens.weight: expected shape \[128, 32\], as config.json says"),
    ("another number of layers", "llama", {"num_hidden_layers": 3}, "the checkpoint: expected a parameter model.layers.2"),
    ("another activation", "llama", {"hidden_act": "mish"}, "hidden_act of config.json of a llama model: expected one of gelu, gelu_new"),
    (
        "another kind of positions",
        "llama",
        {"rope_parameters": {"rope_type": "dynamic"}},
        "rope_parameters .*: expected rope_type d",
    ),
    ("positions without a factor", "llama", {"rope_parameters": {"rope_type": "linear"}}, "factor of config.json: expected an entry, got none"),
    (
        "a layer of an unknown kind",
        "qwen2",
        {"layer_types": ["chunked_attention"] * 2},
        "layer_types .* of a qwen2 model: expected full_att",
    ),
    ("attention both ways", "gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention .*: expected false, got True"),
    ("a dtype that is none", "llama", {"dtype": "int4"}, "dtype of config.json: expected one of float32"),
    ("heads that share no keys", "llama", {"num_key_value_heads": 3}, "expected .*, got"),
]


@pytest.mark.parametrize(("name", "changes", "message"), [row[1:] for row in CHANGES], ids=[row[0] for row in CHANGES])
def test_a_config_that_does_not_fit_is_one_sentence(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = saved(name, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(fusible.errors.FusibleError, match=message) as caught:
        from_pretrained(folder)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


def test_older_configs_say_positions_otherwise(tmp_path: Path) -> None:
    """``rope_theta`` and ``rope_scaling``, whose kind is a ``type``."""
    folder = saved("llama_linear", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}}))
    tokens = drawn(2, 24)
    with torch.no_grad():
        close(from_pretrained(folder)(tokens), reference("llama_linear")(tokens).logits, FP32)


def test_a_parameter_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_bias": True}))
    with pytest.raises(CheckpointError, match="expected a parameter model.layers.0.self_attn.q_proj.bias, got none"):
        from_pretrained(folder)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_saved_is_what_transformers_wrote(name: str, tmp_path: Path) -> None:
    """The same names, shapes and values, of which transformers makes the same model."""
    model = from_pretrained(saved(name, tmp_path))
    save_pretrained(model, tmp_path / "ours")
    ours, theirs = open_checkpoint(tmp_path / "ours"), open_checkpoint(tmp_path / name)
    assert set(ours.names) == set(theirs.names) - UNUSED.get(name, set())
    for parameter in ours.names:
        assert torch.equal(ours.tensor(parameter), theirs.tensor(parameter)), parameter
    _, inputs = given(name)
    again = type(reference(name)).from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        assert torch.equal(told(again(**inputs)), told(reference(name)(**inputs)))


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "phi", "qwen2_moe", *OTHERS])
def test_a_new_model_is_one_that_transformers_loads(name: str, tmp_path: Path) -> None:
    config = {**reference(name).config.to_dict(), "architectures": [type(reference(name)).__name__]}
    model = from_config(config, seed=1)
    save_pretrained(model, tmp_path / "new")
    again, (ours, theirs) = type(reference(name)).from_pretrained(tmp_path / "new").eval(), given(name)
    with torch.no_grad():
        close(model.eval()(*ours), told(again(**theirs)), FP32)
    same, other = from_config(config, seed=1), from_config(config, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(("family", "entry"), [("llama", "initializer_range"), ("bert", "initializer_range"), ("whisper", "init_std")])
def test_a_new_model_has_the_deviation_that_its_config_says(family: str, entry: str) -> None:
    model = from_config({**reference(family).config.to_dict(), "architectures": [type(reference(family)).__name__], entry: 0.3})
    for name, parameter in model.stored_parameters():
        if name.endswith("encoder.embed_positions.weight"):
            continue  # sinusoids
        if parameter.dim() >= 2:  # of n draws the deviation is known to 1 / sqrt(2 n); within four of these
            assert abs(parameter.std().item() / 0.3 - 1) < 4 / (2 * parameter.numel()) ** 0.5, name
        else:
            assert (parameter == (0 if name.endswith("bias") else 1)).all(), name


def test_quantized_weights_are_not_saved_as_if_they_were_plain(tmp_path: Path) -> None:
    model = from_pretrained(saved("llama", tmp_path))
    fusible.quantize_parameters(model.body)
    with pytest.raises(fusible.errors.ArgumentError, match="a model to save: expected plain parameters, got a Float8Tensor"):
        save_pretrained(model, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def _as_older_files_say(name: str) -> dict[str, Any]:
    """A config without what is its class's default, without kinds of layers, and with positions by their former names."""
    config = reference(name).config
    entries, usual = json.loads(config.to_json_string(use_diff=False)), json.loads(type(config)().to_json_string(use_diff=False))
    kept = {key: value for key, value in entries.items() if value != usual.get(key) or key in ("model_type", "dtype")}
    kept["architectures"] = [type(reference(name)).__name__]
    rope = kept.pop("rope_parameters", None) or entries.get("rope_parameters")
    kept.pop("layer_types", None)
    if rope and "rope_theta" in rope:
        kept |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    elif rope:  # of each kind of layer
        kept |= {"rope_theta": rope["full_attention"]["rope_theta"], "rope_local_base_freq": rope["sliding_attention"]["rope_theta"]}
        kept |= {"sliding_window_pattern": 2, "sliding_window": 4}
    return kept


OLDER = [name for name in FAMILIES if name not in ("llama_llama3", "llama_yarn", "llama_linear")]


@pytest.mark.parametrize("name", OLDER)
def test_older_configs_are_read_as_transformers_reads_them(name: str, tmp_path: Path) -> None:
    """Which layers have windows, which heads are tied, and every default of a family, where a file says nothing of it."""
    folder = saved(name, tmp_path)
    (folder / "config.json").write_text(json.dumps(_as_older_files_say(name)))
    theirs, (ours, inputs) = type(reference(name)).from_pretrained(folder).eval(), given(name)
    with torch.no_grad():
        close(from_pretrained(folder)(*ours), told(theirs(**inputs)), FP32)


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_a_window_that_nobody_asked_to_use_is_none(name: str, tmp_path: Path) -> None:
    folder = saved(name, tmp_path)
    (folder / "config.json").write_text(json.dumps({**_as_older_files_say(name), "sliding_window": 4}))
    theirs, tokens = type(reference(name)).from_pretrained(folder).eval(), drawn(2, 24)
    with torch.no_grad():
        close(from_pretrained(folder)(tokens), theirs(tokens).logits, FP32)
