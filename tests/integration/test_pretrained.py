"""``from_pretrained``: what transformers' models give, whole and token by token, and what cannot be loaded in one sentence."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from convert_families import WORDS
from pretrained_models import DECODERS, FAMILIES, drawn, given, reference, saved, told

import fusible
from fusible.errors import CheckpointError, DTypeError, OutOfRangeError
from fusible.models import from_config, from_pretrained, parts, save_pretrained
from fusible.models.checkpoints import open_checkpoint, write_checkpoint
from fusible.models.families import Config, blueprint_of
from fusible.models.weight_formats import WEIGHT_FORMATS

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


@pytest.mark.parametrize("held", WEIGHT_FORMATS)
@pytest.mark.parametrize("name", FAMILIES)
def test_all_of_a_model_lies_on_the_device_that_is_asked_for(name: str, held: str, tmp_path: Path) -> None:
    """A device without memory, as every machine has it."""
    folder = saved(name, tmp_path)
    model = from_pretrained(folder, WEIGHT_FORMATS[held], device="meta")
    assert model.device.type == "meta" and elsewhere(model, "meta") == []
    assert elsewhere(from_pretrained(folder, WEIGHT_FORMATS[held], trainable=True, device="meta"), "meta") == []
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


def test_a_cache_of_latents_has_nothing_of_each_head(tmp_path: Path) -> None:
    """A latent and a rotated key of a token, of each layer."""
    model = from_pretrained(saved("deepseek_v3", tmp_path))
    cache = model.new_cache(2, 32, 4)
    with torch.inference_mode():
        model.next_logits(drawn(7), torch.tensor([4, 3], dtype=torch.int32), cache)
    assert cache.nbytes == 3 * 2 * 32 * (32 + 32) * 4


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    """DeepSeek's own checkpoints have one behind the last layer."""
    folder, tokens = saved("deepseek_v3", tmp_path), drawn(2, 24)
    checkpoint = open_checkpoint(folder)
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.names}
    further = {name.replace("layers.2", "layers.3"): tensor for name, tensor in tensors.items() if "layers.2" in name}
    config = {**checkpoint.config, "num_nextn_predict_layers": 1}
    write_checkpoint(tmp_path / "more", config, {**tensors, **further, "model.layers.3.eh_proj.weight": torch.zeros(64, 128)})
    with torch.no_grad():
        assert torch.equal(from_pretrained(tmp_path / "more")(tokens), from_pretrained(folder)(tokens))


DEEPSEEK_V3: dict[str, Any] = {
    **{"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 128},
    **{"num_key_value_heads": 128, "vocab_size": 129280, "max_position_embeddings": 163840, "rope_theta": 10000, "moe_layer_freq": 1},
    **{"scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 1, "tie_word_embeddings": False},
    "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
    | {"original_max_position_embeddings": 4096},
}
"""What the file of the model itself says, where it is not the default of the family."""


def test_the_published_model_has_the_parameters_that_are_told_of_it() -> None:
    """671 billion; each layer attends with YaRN's scale, and keeps 576 numbers of a token."""

    def numbers(part: Any) -> int:
        if isinstance(part, parts.Product):
            return sum(part.rows) * part.columns
        if isinstance(part, parts.Experts):
            return part.count * (3 * part.inner * part.features + part.features + 1)
        own = part.features if isinstance(part, parts.Norm) else 0
        inside = [value for value in vars(part).values() if isinstance(value, parts.Product | parts.Experts | tuple)]
        return own + sum(numbers(each) for value in inside for each in (value if isinstance(value, tuple) else (value,)) if not isinstance(each, str))

    made = blueprint_of(Config(DEEPSEEK_V3))
    assert sum(map(numbers, made.body)) + 2 * made.vocabulary * made.hidden == 671_026_419_200
    blocks: list[Any] = list(made.body)
    attention = blocks[0].parts[1]
    assert attention.rank + attention.rope_width == 576 and attention.options["rope_scale"] == 1.0
    assert attention.options["scale"] == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2, rel=1e-12)
    assert blocks[7].parts[1].experts.options["top_groups"] == 4 and not isinstance(blocks[5].parts[1], parts.SharedExpert)


def _by_their_names(tensors: list[torch.Tensor], model: Any, write: Any, place: Path) -> dict[str, torch.Tensor]:
    """``tensors``, one for each of the model's parameters, by the names and in the shapes that its checkpoint has."""
    with torch.no_grad():
        for parameter, tensor in zip(model.parameters(), tensors, strict=True):
            parameter.copy_(tensor)
    write(model, place)
    checkpoint = open_checkpoint(place)
    return {name: checkpoint.tensor(name).clone() for name in checkpoint.names}


@pytest.mark.parametrize("form", ["batch", "padded", "packed"])
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v3_yarn", "deepseek_v3_halves", "qwen2_moe"])
def test_gradients_are_those_of_transformers(name: str, form: str, tmp_path: Path) -> None:
    """Of every parameter; in sequences of two lengths that are padded, or packed one behind the other."""
    model, theirs = from_pretrained(saved(name, tmp_path), trainable=True), DECODERS[name].make()
    lengths, tokens, weights = [14, 14] if form == "batch" else [14, 9], drawn(2, 14), torch.randn(2, 14, WORDS)
    lens, kept = torch.tensor(lengths, dtype=torch.int32), [(row, length) for row, length in enumerate(lengths)]
    packed = torch.cat([tokens[row, :length] for row, length in kept])
    given = {"batch": (tokens,), "padded": (tokens, lens), "packed": (packed, lens)}[form]
    logits = model(*given)
    rows = logits if form == "packed" else torch.cat([logits[row, :length] for row, length in kept])
    wanted = torch.cat([theirs(tokens[row : row + 1, :length]).logits[0] for row, length in kept])
    close(rows.detach(), wanted.detach(), FP32)
    factors = torch.cat([weights[row, :length] for row, length in kept])
    (rows * factors).sum().backward()
    (wanted * factors).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    ours = _by_their_names([p.grad for p in model.parameters()], model, save_pretrained, tmp_path / "ours")  # type: ignore[misc]
    found = _by_their_names([p.grad for p in theirs.parameters()], theirs, lambda m, place: m.save_pretrained(place), tmp_path / "theirs")
    for parameter, gradient in found.items():
        if not parameter.endswith("e_score_correction_bias"):
            assert gradient.any(), parameter
            close(ours[parameter], gradient, 8 * FP32)


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
    (
        "half of the columns rotated",
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor .* of a llama model: expected 1, got 0.5",
    ),
    ("a classifier", "llama", {"architectures": ["LlamaForSequenceClassification"]}, "architectures .*: expected a language model, .*, got LlamaFor"),
    ("a classifier whose head is the table", "gemma", {"architectures": ["GemmaForTokenClassification"]}, "architectures .*: expected a language m"),
    ("two heads", "gpt2", {"architectures": ["GPT2DoubleHeadsModel"]}, "architectures .* of a gpt2 model: expected a language model"),
    ("no head", "deepseek_v3", {"architectures": ["DeepseekV3Model"]}, "architectures .*: expected a language model"),
    ("positions without a factor", "llama", {"rope_parameters": {"rope_type": "linear"}}, "factor of config.json: expected an entry, got none"),
    (
        "a layer of an unknown kind",
        "qwen2",
        {"layer_types": ["chunked_attention"] * 2},
        "layer_types .* of a qwen2 model: expected full_att",
    ),
    ("attention both ways", "gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention .*: expected false, got True"),
    ("a dtype that is none", "llama", {"dtype": "int4"}, "dtype of config.json: expected one of float32"),
    ("another number of keys", "deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads .* deepseek_v3 model: expected 4, as there are heads"),
    ("another sum of groups", "deepseek_v3", {"topk_group": 1}, "topk_group .*: expected half of the 4 experts of a token, or all 4 groups, got 1"),
    ("another choice", "deepseek_v3", {"scoring_func": "softmax"}, "scoring_func .* of a deepseek_v3 model: expected 'sigmoid', got 'softmax'"),
    ("a rank that is none", "deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank .* of a deepseek_v3 model: expected an integer of at least 1, got 0"),
    ("biases of keys alone", "deepseek_v3", {"attention_bias": True, "q_lora_rank": None}, "attention_bias .*: expected false without a q_lora_rank"),
    (
        "another number of dense layers",
        "deepseek_v3",
        {"first_k_dense_replace": 0},
        "expected a parameter model.layers.0.mlp.shared_experts.gate_proj",
    ),
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


@pytest.mark.parametrize("name", ["llama_linear", "deepseek_v3_yarn"])
def test_older_configs_say_positions_otherwise(name: str, tmp_path: Path) -> None:
    """``rope_theta`` and ``rope_scaling``, whose kind is a ``type``."""
    folder = saved(name, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    told = config.pop("rope_parameters")
    older = {"rope_theta": told.pop("rope_theta"), "rope_scaling": {"type": told.pop("rope_type"), **told}}
    (folder / "config.json").write_text(json.dumps({**config, **older}))
    tokens = drawn(2, 24)
    with torch.no_grad():
        close(from_pretrained(folder)(tokens), reference(name)(tokens).logits, FP32)


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


@pytest.mark.parametrize("trainable", [False, True])
def test_a_router_stays_in_fp32_beside_weights_in_bf16(trainable: bool, tmp_path: Path) -> None:
    """As transformers keeps it, and the bias of its experts: what is saved again is the same to the bit, dtypes included."""
    theirs = type(reference("deepseek_v3")).from_pretrained(saved("deepseek_v3", tmp_path), dtype=torch.bfloat16)
    theirs.save_pretrained(tmp_path / "half")
    model = from_pretrained(tmp_path / "half", trainable=trainable)
    save_pretrained(model, tmp_path / "ours")
    ours, wanted = open_checkpoint(tmp_path / "ours"), open_checkpoint(tmp_path / "half")
    assert {name: ours.tensor(name).dtype for name in ours.names} == {name: wanted.tensor(name).dtype for name in wanted.names}
    assert all(torch.equal(ours.tensor(name), wanted.tensor(name)) for name in wanted.names)
    kept = [name for name in ours.names if ours.tensor(name).dtype is torch.float32]
    assert len(kept) == 2 * 2 and all(".mlp.gate." in name for name in kept)
    assert all(not torch.equal(ours.tensor(name), ours.tensor(name).bfloat16().float()) for name in kept)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "phi", "qwen2_moe", "deepseek_v3", *OTHERS])
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


def test_objects_of_transformers_are_refused_in_one_sentence(tmp_path: Path) -> None:
    theirs = reference("llama")
    with pytest.raises(
        DTypeError, match=r"^config of from_config: expected entries, or the path of a config.json, got a LlamaConfig; pass config.to_"
    ):
        from_config(theirs.config)  # type: ignore[arg-type]
    with pytest.raises(DTypeError, match=r"^config of from_config: expected entries, .*, got a int; pass a dict, or a path\.$"):
        from_config(3)  # type: ignore[arg-type]
    with pytest.raises(
        DTypeError, match=r"^model of save_pretrained: expected a model of from_pretrained or from_config, got a LlamaForCausalLM; call"
    ):
        save_pretrained(theirs, tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5"])
def test_what_are_no_tokens_is_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    model, (inputs, *others) = from_pretrained(saved(name, tmp_path)), given(name)[0]
    for wrong, got in ((inputs.float(), "one of torch.float32"), (inputs.bool(), "one of torch.bool"), (inputs.tolist(), "a list")):
        for given_to in ("encoder", "decoder") if others else ("it",):
            arguments = [wrong, *others] if given_to != "decoder" else [inputs, wrong]
            if others and given_to == "encoder" and isinstance(wrong, list):
                continue  # which generate takes, and a call does not
            with pytest.raises(DTypeError, match=rf"^tokens of .*: expected a tensor of int64, got {got}; give what"):
                model(*arguments)
    for token in (WORDS, -1):
        with pytest.raises(OutOfRangeError, match=rf"^a token: expected one from 0 to {WORDS - 1}, got {token}; use the tokenizer of this model\.$"):
            model(inputs.clone().index_fill_(1, torch.tensor([2]), token), *others)


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
