"""``from_pretrained`` of quantized checkpoints: the weights stay what they are, and the model is that of their values."""

from __future__ import annotations

import gc
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from convert_families import BY_NAME, WORDS, transformers
from pretrained_models import called, drawn, saved

import fusible
from fusible.models import from_pretrained
from fusible.models.checkpoints import MXFP4WeightQuantizer, open_checkpoint, quantize_checkpoint, write_checkpoint
from fusible.models.joining import joined_rows
from fusible.models.side_by_side import SideBySide
from fusible.models.weight_formats import WEIGHT_FORMATS
from fusible.quantized import Float8BlockQuantizer, Float8CurrentScalingQuantizer, MXFP8Quantizer, NVFP4Quantizer, QuantizedTensor
from fusible.tex import DType

E4M3 = DType.kFloat8E4M3
FINE = {"quant_method": "fp8", "activation_scheme": "dynamic"}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}


def _compressed(strategy: str) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    return {**COMPRESSED, "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"]}


def _tiles(powers: bool) -> Any:
    return Float8BlockQuantizer(E4M3, columnwise=False, block_scaling_dim=2, force_pow_2_scales=powers)


SCHEMES: dict[str, tuple[dict[str, Any], Any]] = {
    "tiles": ({**FINE, "weight_block_size": [128, 128]}, _tiles(False)),
    "tiles of powers": ({**FINE, "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}, _tiles(True)),
    "mxfp8": ({**FINE, "weight_block_size": [1, 32]}, MXFP8Quantizer(E4M3, columnwise=False)),
    "tensor": (FINE, Float8CurrentScalingQuantizer(E4M3, columnwise=False)),
    "compressed, tensor": (_compressed("tensor"), Float8CurrentScalingQuantizer(E4M3, columnwise=False)),
    "modelopt, nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, NVFP4Quantizer(columnwise=False)),
    "mxfp4": ({"quant_method": "mxfp4"}, MXFP4WeightQuantizer(columnwise=False)),
}
JOINED = {"tiles", "tiles of powers", "mxfp8", "mxfp4"}
"""Those whose rows of several weights are one tensor; others have a scale for each weight."""
OPTIONS = {"vocab_size": WORDS, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}


def written(folder: Path, scheme: str, **options: Any) -> tuple[Path, Any]:
    """A directory of quantized weights, and transformers' model of their values."""
    config, quantizer = SCHEMES[scheme]
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**OPTIONS, "initializer_range": 0.1, **options})).eval()
    model.save_pretrained(folder / "plain")
    plain = open_checkpoint(folder / "plain")
    tensors = {name: quantizer(plain.tensor(name)) if name.endswith("_proj.weight") else plain.tensor(name) for name in plain.names}
    write_checkpoint(folder / "quantized", {**plain.config, "quantization_config": config}, tensors)
    values = {name: held.dequantize(dtype=torch.float32) if isinstance(held, QuantizedTensor) else held for name, held in tensors.items()}
    model.load_state_dict(values)
    return folder / "quantized", model


def _matrices() -> list[torch.Tensor]:
    """All plain ones of floats that are alive."""
    gc.collect()
    return [o for o in gc.get_objects() if type(o) is torch.Tensor and o.dim() > 1 and o.is_floating_point() and o.device.type == "cpu"]


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_no_second_copy_of_a_weight_is_alive(name: str, trainable: bool, tmp_path: Path) -> None:
    """The tensors that a module was filled with, joined ones among them, are not kept by its initializers, which draw anew."""
    folder = saved(name, tmp_path)
    before = _matrices()  # of other tests, too
    recipe = fusible.MXFP8BlockScaling()
    model: Any = from_pretrained(folder, recipe, trainable=True) if trainable else from_pretrained(folder, recipe)
    held = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()] if not isinstance(p, QuantizedTensor)}
    shapes = {tuple(p.shape) for p in model.parameters()}
    added = [x for x in _matrices() if not any(x is old for old in before) and tuple(x.shape) in shapes]
    assert not [tuple(x.shape) for x in added if x.untyped_storage().data_ptr() not in {0, *held}]
    layer = next(part for part in model.modules() if isinstance(part, fusible.Linear))
    before = layer.weight.detach().float().clone()
    layer.reset_parameters()
    assert not torch.equal(layer.weight.detach().float(), before)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("groups", [4, 1])
def test_the_model_is_that_of_the_values(scheme: str, groups: int, tmp_path: Path) -> None:
    """With 1 group, k and v are 64 rows, of which no whole tile is made."""
    folder, reference = written(tmp_path, scheme, num_key_value_heads=groups)
    model, tokens = from_pretrained(folder), drawn(2, 24)
    with torch.no_grad():
        found, wanted = model(tokens), reference(tokens).logits
    # Products are summed up in fp32, of up to 384 terms.
    torch.testing.assert_close(found, wanted, rtol=0, atol=384**0.5 * 2.0**-22 * wanted.abs().max().item())
    quantized = [p for p in model.get_submodule("body").parameters() if isinstance(p, QuantizedTensor)]
    apart = sum(isinstance(module, SideBySide) for module in model.modules())
    ragged = scheme.startswith("tiles") and groups == 1
    assert apart == (0 if scheme in JOINED and not ragged else 2 if ragged else 4)
    assert len(quantized) == 8 + (2 * 2 if ragged else 0 if scheme in JOINED else 2 * 3)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_token_after_another_gives_what_all_at_once_give(scheme: str, tmp_path: Path) -> None:
    folder, _ = written(tmp_path, scheme)
    model: Any = from_pretrained(folder)
    tokens = drawn(1, 6)
    cache, one = model.new_cache(1, 8), torch.ones(1, dtype=torch.int32)
    with torch.inference_mode():
        wanted = model(tokens)[0]
        for place, token in enumerate(tokens[0]):
            logits = model.next_logits(token[None], one, cache)
            cache.advance(one)
            torch.testing.assert_close(logits[0], wanted[place], rtol=0, atol=384**0.5 * 2.0**-22 * wanted.abs().max().item())


def _deepseek(folder: Path, scheme: str) -> tuple[Path, Any]:
    """``written``, of latent attention whose keys make no whole tile, and of experts, as DeepSeek's own checkpoints have them."""
    config, quantizer = SCHEMES[scheme]
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 64}
    sizes |= {"qk_rope_head_dim": 32, "v_head_dim": 64, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
    sizes |= {"moe_intermediate_size": 128, "first_k_dense_replace": 1, "initializer_range": 0.1}
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**{**OPTIONS, **sizes})).eval()
    model.save_pretrained(folder / "plain")
    plain = open_checkpoint(folder / "plain")
    tensors = {name: quantizer(plain.tensor(name)) if re.search(r"_proj(_with_mqa)?\.weight$", name) else plain.tensor(name) for name in plain.names}
    write_checkpoint(folder / "quantized", {**plain.config, "quantization_config": config}, tensors)
    values = {name: held.dequantize(dtype=torch.float32) if isinstance(held, QuantizedTensor) else held for name, held in tensors.items()}
    write_checkpoint(folder / "values", plain.config, values)
    return folder / "quantized", transformers.DeepseekV3ForCausalLM.from_pretrained(folder / "values").eval()


@pytest.mark.parametrize("scheme", ["tiles", "tiles of powers", "mxfp8"])
def test_latent_attention_keeps_the_blocks_of_a_checkpoint(scheme: str, tmp_path: Path) -> None:
    """And so do its experts; a token after another, too, where a product stands elsewhere."""
    folder, reference = _deepseek(tmp_path, scheme)
    model, tokens = from_pretrained(folder), drawn(1, 12)
    with torch.no_grad():
        found, wanted = model(tokens), reference(tokens).logits
    bound = 384**0.5 * 2.0**-22 * wanted.abs().max().item()
    torch.testing.assert_close(found, wanted, rtol=0, atol=bound)
    of_layers = [[name for name, p in layer.named_parameters() if isinstance(p, QuantizedTensor)] for layer in model.body]
    # q_a with kv_a, q_b, kv_b and o; gate with up, and down, of the dense layer, and of the shared expert and the eight others
    assert [len(names) for names in of_layers] == [4, 2, 4, 2 * 9, 0]
    cache, one = model.new_cache(1, 16), torch.ones(1, dtype=torch.int32)
    with torch.inference_mode():
        for place, token in enumerate(tokens[0]):
            logits = model.next_logits(token[None], one, cache)
            cache.advance(one)
            torch.testing.assert_close(logits[0], wanted[0, place], rtol=0, atol=bound)


@pytest.mark.parametrize("scheme", ["tensor", "compressed, tensor"])
def test_experts_keep_the_bytes_of_a_checkpoint_whose_matrices_have_a_scale_each(scheme: str, tmp_path: Path) -> None:
    """Gate and up are read as one, in which each row has the scale of its own matrix."""
    folder, reference = _deepseek(tmp_path, scheme)
    model, tokens = from_pretrained(folder), drawn(1, 12)
    with torch.no_grad():
        found, wanted = model(tokens), reference(tokens).logits
    torch.testing.assert_close(found, wanted, rtol=0, atol=384**0.5 * 2.0**-22 * wanted.abs().max().item())
    stored = open_checkpoint(folder)
    (experts,) = [module for module in model.modules() if isinstance(module, fusible.MixtureOfExperts)]
    for number in range(8):
        up = experts.get_parameter(f"up_weight{number}")
        parts = [stored.tensor(f"model.layers.1.mlp.experts.{number}.{name}_proj.weight") for name in ("gate", "up")]
        assert torch.equal(up._rowwise_data, torch.cat([part._data for part in parts]))
        assert up._rowwise_scale_inv.unique().tolist() == sorted(part._scale_inv.item() for part in parts)


@pytest.mark.parametrize("held", [name for name, recipe in WEIGHT_FORMATS.items() if recipe is not None])
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_weights_that_are_held_in_a_format_are_its_values(name: str, held: str, tmp_path: Path) -> None:
    """Whole sequences, and a token after another."""
    folder, tokens = saved(name, tmp_path), drawn(1, 12)
    model, plain = from_pretrained(folder, WEIGHT_FORMATS[held], dtype=torch.float32), from_pretrained(folder, trainable=True)
    changed = 0
    with torch.no_grad():
        values = dict(plain.named_parameters())
        for path, ours in model.named_parameters():
            if isinstance(ours, QuantizedTensor):
                of_all = re.fullmatch(r"(.*weight)(\d+)", path)  # an expert's
                (values[path] if of_all is None else values[of_all[1]][int(of_all[2])]).copy_(ours.dequantize())
                changed += 1
        wanted = plain(tokens)[0]
    experts = sum(2 * module.experts for module in model.modules() if isinstance(module, fusible.MixtureOfExperts))
    assert (changed - experts, experts > 0) == {"llama": (8, False), "deepseek_v3": (18, True)}[name]
    bound, cache, one = 384**0.5 * 2.0**-22 * wanted.abs().max().item(), model.new_cache(1, 16), torch.ones(1, dtype=torch.int32)
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens)[0], wanted, rtol=0, atol=bound)
        for place, token in enumerate(tokens[0]):
            logits = model.next_logits(token[None], one, cache)
            cache.advance(one)
            torch.testing.assert_close(logits[0], wanted[place], rtol=0, atol=bound)


def test_a_recipe_leaves_what_is_quantized(tmp_path: Path) -> None:
    folder, _ = written(tmp_path, "tiles")
    ours, other = from_pretrained(folder), from_pretrained(folder, fusible.Float8BlockScaling())
    assert fusible.parameter_bytes(ours) == fusible.parameter_bytes(other)
    assert [type(p) for p in ours.parameters()] == [type(p) for p in other.parameters()]


def test_a_trainable_model_has_the_values(tmp_path: Path) -> None:
    folder, reference = written(tmp_path, "mxfp8")
    model, tokens = from_pretrained(folder, trainable=True), drawn(2, 24)
    assert not any(isinstance(p, QuantizedTensor) for p in model.parameters())
    assert all(p.requires_grad for p in model.parameters())
    wanted = reference(tokens).logits
    torch.testing.assert_close(model(tokens), wanted, rtol=0, atol=384**0.5 * 2.0**-22 * wanted.abs().max().item())


LARGER: dict[str, dict[str, Any]] = {
    "bert": {"hidden_size": 128, "intermediate_size": 256},
    "vit": {"hidden_size": 128, "intermediate_size": 256},
    "whisper": {"d_model": 128, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256},
    "t5": {"d_model": 128, "d_kv": 32, "d_ff": 256},
    "t5_gated": {"d_model": 128, "d_kv": 32, "d_ff": 256},
}
"""Of whole blocks of 128."""
WRITTEN = {
    "fp8": transformers.CompressedTensorsConfig,
    "block": transformers.FineGrainedFP8Config,
    **dict.fromkeys(("mxfp8", "nvfp4", "mxfp4"), transformers.CompressedTensorsConfig),
}
"""By the formats of ``fusible quantize`` how transformers is asked to dequantize."""


@pytest.mark.parametrize("form", WRITTEN)
@pytest.mark.parametrize("name", LARGER)
def test_encoders_that_fusible_quantizes_are_those_that_transformers_reads(name: str, form: str, tmp_path: Path) -> None:
    family = replace(BY_NAME[name], options={**BY_NAME[name].options, **LARGER[name]})
    family.make().save_pretrained(tmp_path / "plain")
    made = quantize_checkpoint(tmp_path / "plain", tmp_path / form, form)
    model = from_pretrained(tmp_path / form)
    held = [p for p in model.parameters() if isinstance(p, QuantizedTensor)]
    apart = sum(isinstance(module, SideBySide) for module in model.modules())
    assert made.weights == {"bert": 12, "vit": 12, "whisper": 32, "t5": 32, "t5_gated": 36}[name]
    # Of a layer 4 weights of attention, 3 of which are one product; of the decoder's second attention k and v are. Not where each has its own scale.
    joined = 2 * 4 if name in ("bert", "vit") else 2 * 4 + 2 * 7
    assert (len(held), apart > 0) == ((made.weights, True) if form == "fp8" else (joined, False))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You passed `quantization_config`", category=UserWarning)
        theirs = getattr(transformers, family.model).from_pretrained(tmp_path / form, quantization_config=WRITTEN[form](dequantize=True)).eval()
    ours, inputs = called(family)
    with torch.no_grad():
        found, wanted = model(*ours), theirs(**inputs).logits
    # transformers rounds the values of NVFP4 to bf16.
    assert (found - wanted).norm() < (2.0**-7 if form == "nvfp4" else 1e-5) * wanted.norm()


QUANTIZERS = {
    "1x128": Float8BlockQuantizer(E4M3, columnwise=False, block_scaling_dim=1),
    **{name: quantizer for name, (_, quantizer) in SCHEMES.items() if name in JOINED},
}


@pytest.mark.parametrize("form", QUANTIZERS)
@pytest.mark.parametrize("rows", [(128, 256), (128, 32, 96), (256, 64)])
def test_joined_rows_have_the_values_of_the_parts(form: str, rows: tuple[int, ...]) -> None:
    parts = [QUANTIZERS[form](torch.randn(n, 384, generator=torch.Generator().manual_seed(n)) * n) for n in rows]
    joined = joined_rows(parts)
    if form.startswith("tiles") and any(n % 128 for n in rows[:-1]):
        assert joined is None
        return
    assert isinstance(joined, QuantizedTensor) and tuple(joined.shape) == (sum(rows), 384)
    assert torch.equal(joined.dequantize(dtype=torch.float32), torch.cat([part.dequantize(dtype=torch.float32) for part in parts]))


def test_what_has_a_scale_for_all_of_it_is_not_joined() -> None:
    x = torch.randn(32, 64)
    quantizer = Float8CurrentScalingQuantizer(E4M3, columnwise=False)
    assert joined_rows([quantizer(x), quantizer(2 * x)]) is None
    four = NVFP4Quantizer(columnwise=False)
    assert joined_rows([four(x), four(2 * x)]) is None
    assert joined_rows([four(x), x]) is None
    assert torch.equal(joined_rows([x, 2 * x]), torch.cat([x, 2 * x]))  # pyright: ignore[reportArgumentType]
    same = joined_rows([four(x), four(x)])
    assert isinstance(same, QuantizedTensor) and torch.equal(same.dequantize(), torch.cat([four(x).dequantize()] * 2))


@pytest.mark.parametrize("recipe", [None, fusible.MXFP8BlockScaling()])
def test_what_was_copied_from_a_file_is_not_held_beside_its_copy(recipe: fusible.Recipe | None, tmp_path: Path) -> None:
    """With a recipe, of a file's pages those stay that the model looks at: the embedding's and the head's. Without, also those of what is not joined;
    what was only looked at for its values is gone."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**OPTIONS, "hidden_size": 1024, "intermediate_size": 2048}))
    model.save_pretrained(tmp_path / "plain")
    made = from_pretrained(tmp_path / "plain", recipe)
    file = str(tmp_path / "plain" / "model.safetensors")
    held, within = 0, False
    with open("/proc/self/smaps") as maps:
        for line in maps:
            if "-" in line.split()[0]:
                within = line.rstrip().endswith(file)
            elif within and line.startswith("Rss:"):
                held += 1024 * int(line.split()[1])
    size = (tmp_path / "plain" / "model.safetensors").stat().st_size
    joined = 4 * 2 * (3 * 1024 * 1024 + 2 * 1024 * 2048)  # bytes of q, k, v, gate and up of two layers in fp32
    assert size > joined > 0.6 * size
    # The system reads a few pages around each that is looked at.
    assert held < (size - joined if recipe is None else 0) + 0.05 * size
    assert made.vocabulary == WORDS
