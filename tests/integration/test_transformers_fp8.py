"""transformers' own FP8 models on a CPU: its modules with their weights as the checkpoint has them, and Fusible's products."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from convert_families import peft, transformers
from safetensors.torch import load_file, save_file
from transformers.integrations import finegrained_fp8
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

import fusible
from fusible.errors import CheckpointError, MissingModuleError, NotServedError
from fusible.models.checkpoints import open_checkpoint, quantize_checkpoint, write_checkpoint
from fusible.quantized import Float8BlockQuantizer, Float8CurrentScalingQuantizer, MXFP8Quantizer
from fusible.tex import DType, record

E4M3 = DType.kFloat8E4M3
FINE = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]}
SIZES = {"vocab_size": 128, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "decoder_sparse_step": 1, "head_dim": 64}
INNER = 384
"""The most terms of a product."""


def _tiles(powers: bool) -> Any:
    return Float8BlockQuantizer(E4M3, columnwise=False, block_scaling_dim=2, force_pow_2_scales=powers)


SCHEMES: dict[str, tuple[dict[str, Any], Any]] = {
    "tiles": ({**FINE, "weight_block_size": [128, 128]}, _tiles(False)),
    "tiles of powers": ({**FINE, "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}, _tiles(True)),
    "mxfp8": ({**FINE, "weight_block_size": [1, 32], "scale_fmt": "ue8m0"}, MXFP8Quantizer(E4M3, columnwise=False)),
    "tensor": ({**FINE, "weight_block_size": None}, Float8CurrentScalingQuantizer(E4M3, columnwise=False)),
    "static": ({**FINE, "activation_scheme": "static", "weight_block_size": None}, Float8CurrentScalingQuantizer(E4M3, columnwise=False)),
    "static tiles": ({**FINE, "activation_scheme": "static", "weight_block_size": [128, 128]}, _tiles(False)),
}
EACH = pytest.mark.parametrize("scheme", SCHEMES)


@pytest.fixture(autouse=True)
def transformers_as_it_was() -> Iterator[None]:
    yield
    fusible.serve_transformers_fp8(undo=True)


def plain(folder: Path, name: str = "Llama", **options: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, "initializer_range": 0.1, **options})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    model.save_pretrained(folder)
    return model


def written(folder: Path, scheme: str) -> Path:
    """A checkpoint of a small Llama as the scheme has it. Static scales of activations are those of ``drawn()``."""
    model = plain(folder / "plain")
    config, quantizer = SCHEMES[scheme]
    source = open_checkpoint(folder / "plain")
    tensors = {name: quantizer(source.tensor(name)) if name.endswith("_proj.weight") else source.tensor(name) for name in source.names}
    if config["activation_scheme"] == "static":
        tensors = {**tensors, **{f"{name}.activation_scale": amax / 448 for name, amax in amaxes(model).items()}}
    write_checkpoint(folder / "fp8", {**source.config, "quantization_config": config}, tensors)
    if config["weight_block_size"] is None:  # one scale is no vector there
        stored = load_file(folder / "fp8" / "model.safetensors")
        save_file({name: part.reshape(()) if part.numel() == 1 else part for name, part in stored.items()}, folder / "fp8" / "model.safetensors")
    return folder / "fp8"


def amaxes(model: Any) -> dict[str, torch.Tensor]:
    """The largest magnitude of what each layer reads."""
    found: dict[str, torch.Tensor] = {}
    hooks = [
        module.register_forward_pre_hook(lambda _, x, name=name: found.__setitem__(name, x[0].detach().abs().amax()))
        for name, module in model.named_modules()
        if name.endswith("_proj")
    ]
    logits(model)
    for hook in hooks:
        hook.remove()
    return found


def loaded(folder: Path, **more: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You passed `quantization_config`", category=UserWarning)
        return transformers.AutoModelForCausalLM.from_pretrained(folder, **more).eval()


def dequantized(folder: Path) -> Any:
    return loaded(folder, quantization_config=transformers.FineGrainedFP8Config(dequantize=True))


def drawn() -> torch.Tensor:
    return torch.randint(128, (2, 24), generator=torch.Generator().manual_seed(1))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(drawn()).logits


def check_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Products are summed up in fp32."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=4 * INNER**0.5 * 2.0**-23 * wanted.abs().max().item())


def check_same_files(one: Path, other: Path) -> None:
    """The same tensors, to the bit."""
    first, second = (load_file(each / "model.safetensors") for each in (one, other))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype and tensor.shape == second[name].shape
        assert torch.equal(in_bytes(tensor), in_bytes(second[name])), name


def in_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1).view(torch.uint8)


@EACH
def test_the_model_is_loaded_as_it_lies_and_written_again(scheme: str, tmp_path: Path) -> None:
    folder = written(tmp_path, scheme)
    fusible.serve_transformers_fp8()
    model = loaded(folder)
    weights = [module.weight for module in model.modules() if isinstance(module, finegrained_fp8.FP8Linear)]
    assert len(weights) == 14 and all(weight.dtype is torch.float8_e4m3fn for weight in weights)
    model.save_pretrained(tmp_path / "again")
    check_same_files(folder, tmp_path / "again")


@EACH
def test_with_activations_as_they_are_it_is_the_dequantized_model(scheme: str, tmp_path: Path) -> None:
    folder = written(tmp_path, scheme)
    wanted = logits(dequantized(folder))
    fusible.serve_transformers_fp8(quantize_activations=False)
    model = loaded(folder)
    with record() as calls:
        found = logits(model)
    assert sum(call.function == "generic_gemm" for call in calls) == 14
    check_near(found, wanted)


@EACH
def test_with_activations_as_the_scheme_says_it_is_near(scheme: str, tmp_path: Path) -> None:
    folder = written(tmp_path, scheme)
    reference = dequantized(folder)
    fusible.serve_transformers_fp8()
    model = loaded(folder)
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
        layer, theirs = model.get_submodule(name), reference.get_submodule(name)
        x = torch.randn(2, 5, layer.in_features)
        with torch.no_grad():
            y, wanted = layer(x), theirs(x)
        # Each value of x is off by a sixteenth at most, a small one by half the least step, 2^-10 of its scale; and what is beyond a given scale.
        given = layer.activation_scale.item() if layer.activation_scale is not None else 1.0
        beyond = (x.abs() - 448 * given).clamp_min(0)
        size = (x.abs() * 2.0**-4 + max(float(x.abs().max()) / 448, given) * 2.0**-10 + beyond) @ theirs.weight.abs().T
        assert bool(((y - wanted).abs() <= size).all()) and not torch.allclose(y, wanted, rtol=1e-4)
    found, wanted = logits(model), logits(reference)
    # Each of 14 products adds the error of its activations, which are off by 2^-4 / sqrt(3) in the mean at most.
    assert 0 < (found - wanted).norm() < 14**0.5 * 2.0**-4 / 3**0.5 * wanted.norm()


@EACH
def test_tokens_are_generated(scheme: str, tmp_path: Path) -> None:
    folder = written(tmp_path, scheme)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    wanted = dequantized(folder).generate(drawn()[:1, :5], **options)
    fusible.serve_transformers_fp8(quantize_activations=False)
    assert torch.equal(loaded(folder).generate(drawn()[:1, :5], **options), wanted)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_experts_are_products_of_their_tokens(implementation: str, tmp_path: Path) -> None:
    plain(tmp_path / "plain", "Qwen3Moe", **EXPERTS)
    quantize_checkpoint(tmp_path / "plain", tmp_path / "fp8", "block")
    reference = dequantized(tmp_path / "fp8")
    wanted = logits(reference)
    fusible.serve_transformers_fp8(quantize_activations=False)
    model = loaded(tmp_path / "fp8", experts_implementation=implementation)
    assert model.model.layers[0].mlp.experts.gate_up_proj.dtype is torch.float8_e4m3fn
    check_near(logits(model), wanted)
    fusible.serve_transformers_fp8()
    experts, theirs, weights = model.model.layers[0].mlp.experts, reference.model.layers[0].mlp.experts, torch.rand(9, 2)
    x, index = torch.randn(9, 256), torch.stack([torch.arange(9) % 4, (torch.arange(9) + 1) % 3], 1)  # not the router's: where it errs, all differs
    with torch.no_grad():
        y, wanted = experts(x, index, weights), theirs(x, index, weights)
    assert 0 < (y - wanted).norm() < 3**0.5 * 2.0**-4 / 3**0.5 * wanted.norm()  # gate, projection and the last product
    model.save_pretrained(tmp_path / "again")
    check_same_files(tmp_path / "fp8", tmp_path / "again")


@pytest.mark.parametrize("place", ["cpu", "auto"])
def test_a_map_of_devices_changes_nothing(place: str, tmp_path: Path) -> None:
    folder = written(tmp_path, "tiles")
    fusible.serve_transformers_fp8()
    assert torch.equal(logits(loaded(folder, device_map=place)), logits(loaded(folder)))


def test_a_plain_model_is_quantized_as_it_is_loaded(tmp_path: Path) -> None:
    wanted = logits(plain(tmp_path / "plain"))
    fusible.serve_transformers_fp8()
    model = loaded(tmp_path / "plain", quantization_config=transformers.FineGrainedFP8Config(modules_to_not_convert=["lm_head"]))
    assert model.model.layers[0].mlp.up_proj.weight.dtype is torch.float8_e4m3fn
    # Of each of 14 products both operands are off.
    assert 0 < (logits(model) - wanted).norm() < 28**0.5 * 2.0**-4 / 3**0.5 * wanted.norm()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT asks transformers by an older name
def test_adapters_train_on_weights_as_they_lie(tmp_path: Path) -> None:
    folder = written(tmp_path, "tiles")
    reference = dequantized(folder)
    fusible.serve_transformers_fp8(quantize_activations=False)
    gradients: list[dict[str, Any]] = []
    start: dict[str, torch.Tensor] = {}
    for model in (reference, loaded(folder)):
        adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=4, init_lora_weights=False))
        own = {name: p for name, p in adapted.named_parameters() if "lora" in name}
        start = start or {name: p.detach().clone() for name, p in own.items()}
        adapted.load_state_dict(start, strict=False)
        adapted(input_ids=drawn(), labels=drawn()).loss.backward()
        gradients.append({name: p.grad for name, p in own.items()})
    assert len(gradients[0]) == 8
    for name, wanted in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))


def test_fp4_and_other_blocks_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    folder = written(tmp_path, "tiles")
    fusible.serve_transformers_fp8()
    checkpoint = open_checkpoint(folder)
    config = {**checkpoint.config, "quantization_config": {**FINE, "weight_block_size": [64, 64]}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=r"^model.layers.0.self_attn.q_proj.weight: expected E4M3 .*, got blocks of 64x64 .*; .*dequantize=True"
    ):
        loaded(folder)


def test_what_was_put_in_its_place_is_taken_back(tmp_path: Path) -> None:
    folder = written(tmp_path, "tiles")
    former = finegrained_fp8._FINEGRAINED_FP8, dict(AUTO_QUANTIZER_MAPPING)
    fusible.serve_transformers_fp8()
    fusible.serve_transformers_fp8(quantize_activations=False)
    model = loaded(folder)
    fusible.serve_transformers_fp8(undo=True)
    fusible.serve_transformers_fp8(undo=True)
    assert (finegrained_fp8._FINEGRAINED_FP8, dict(AUTO_QUANTIZER_MAPPING)) == former
    with pytest.raises(ImportError, match="finegrained-fp8"):
        logits(model)
    assert loaded(folder).model.layers[0].mlp.up_proj.weight.dtype is torch.float32


def test_another_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusible.models.fine_grained_fp8 import serving

    def library(name: str, **more: Any) -> Any:
        if "module" in more:
            raise ImportError("cannot import name 'finegrained_fp8'")
        return transformers

    monkeypatch.setattr(serving, "library", library)
    with pytest.raises(
        NotServedError, match=r"^transformers: expected a version with a place for the kernels of FP8 modules, got 5\..*finegrained_fp8"
    ):
        fusible.serve_transformers_fp8()


@EACH
def test_convert_takes_the_modules_without_the_hook(scheme: str, tmp_path: Path) -> None:
    folder = written(tmp_path, scheme)
    reference = dequantized(folder)
    fusible.serve_transformers_fp8()
    model = loaded(folder)
    in_scheme = logits(model)
    fusible.serve_transformers_fp8(undo=True)
    names = list(model.state_dict())
    fusible.convert(model)
    report = fusible.conversion_report(model)
    found = [layer for layer in report.converted if layer.kind == "FP8 weight"]
    assert len(found) == 14 and found[0].text.startswith("FP8Linear 256 -> 256, weights as they lie, in ")
    assert list(model.state_dict()) == names and isinstance(model.model.layers[0].mlp.up_proj, finegrained_fp8.FP8Linear)
    wanted = logits(fusible.convert(reference))
    check_near(logits(model), wanted)
    with fusible.autocast(recipe=fusible.Float8BlockScaling()):
        under = logits(model)
    fusible.convert(model, fusible.Float8CurrentScaling())
    assert torch.equal(logits(model), under)
    check_near_in_scheme(under, in_scheme)
    fusible.convert(model, undo=True)
    fusible.serve_transformers_fp8()
    assert torch.equal(logits(model), in_scheme)


def check_near_in_scheme(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Sums in another order make a value of an activation round to the other side here and there."""
    assert (found - wanted).norm() < 2.0**-4 * wanted.norm()


def test_convert_takes_experts(tmp_path: Path) -> None:
    plain(tmp_path / "plain", "Qwen3Moe", **EXPERTS)
    quantize_checkpoint(tmp_path / "plain", tmp_path / "fp8", "block")
    reference = dequantized(tmp_path / "fp8")
    wanted, losses = logits(reference), []
    fusible.serve_transformers_fp8()
    model = loaded(tmp_path / "fp8")
    fusible.serve_transformers_fp8(undo=True)
    fusible.convert(model)
    texts = [layer.text for layer in fusible.conversion_report(model).converted if "FP8Experts" in layer.text]
    assert texts == ["FP8Experts 4 of 256 -> 128 -> 256, weights as they lie, in blocks of 128x128"] * 2
    check_near(logits(model), wanted)
    for each in (reference, model):  # of the parameters that are no FP8 weights
        each.model.embed_tokens.weight.requires_grad_()
        losses.append(torch.autograd.grad(each(input_ids=drawn(), labels=drawn()).loss, each.model.embed_tokens.weight)[0])
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-3, atol=1e-5 * float(losses[0].abs().max()))


def test_static_scales_of_experts_are_taken(tmp_path: Path) -> None:
    config = transformers.Qwen3MoeConfig(hidden_size=256, moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2)
    experts = finegrained_fp8.FP8Experts(config, block_size=(128, 128), activation_scheme="static")
    torch.manual_seed(0)
    for name, parameter in experts.named_parameters():
        size = 0.002 if name.endswith("activation_scale") else 0.01
        parameter.data = torch.rand(parameter.shape) * size + size if "scale" in name else torch.randn(parameter.shape).to(parameter.dtype)
    x, weights = torch.randn(9, 256), torch.rand(9, 2)
    index = torch.stack([torch.arange(9) % 4, (torch.arange(9) + 1) % 4], 1)
    fusible.serve_transformers_fp8()
    with torch.no_grad():
        by_hook = experts(x, index, weights)
        fusible.serve_transformers_fp8(undo=True)
        fusible.convert(experts)
        plain = experts(x, index, weights)
        fusible.convert(experts, fusible.Float8BlockScaling())
        assert torch.equal(experts(x, index, weights), by_hook)
    assert (by_hook - plain).norm() > 0.02 * plain.norm()  # x of up to 4 is cut at 448 scales, which are about 1.3


def test_convert_leaves_what_no_product_takes(tmp_path: Path) -> None:
    layer = finegrained_fp8.FP8Linear(256, 128, block_size=(64, 64))
    model = fusible.convert(torch.nn.ModuleDict({"layer": layer, "other": torch.nn.Linear(4, 4)}))
    (left,) = (each for each in fusible.conversion_report(model).left if each.kind == "FP8 weight")
    assert left.text == "its weight is of blocks of 64x64 with scales of float32"


def test_a_compiled_model_is_one_graph(tmp_path: Path) -> None:
    folder = written(tmp_path, "tiles")
    fusible.serve_transformers_fp8()
    model = loaded(folder)
    layer = model.model.layers[0].mlp
    x = torch.randn(3, 256)
    with torch.no_grad():
        whole = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert torch.equal(whole(drawn()).logits, logits(model))
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))
        fusible.convert(layer)
        assert torch.allclose(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))


def test_stored_scales_of_another_name_are_read(tmp_path: Path) -> None:
    """DeepSeek-V4's are called ``scale``."""
    folder = written(tmp_path, "tiles")
    held = load_file(folder / "model.safetensors")
    save_file({name.replace("weight_scale_inv", "scale"): tensor for name, tensor in held.items()}, folder / "model.safetensors", {"format": "pt"})
    wanted = logits(dequantized(folder))
    fusible.serve_transformers_fp8(quantize_activations=False)
    check_near(logits(loaded(folder)), wanted)


def test_groups_of_columns_have_a_product_each() -> None:
    """DeepSeek-V4's output projection."""
    torch.manual_seed(0)
    layer = finegrained_fp8.FP8GroupedLinear(256, 384, 3, block_size=(128, 128))
    values = torch.randn(384, 256).to(torch.float8_e4m3fn)
    layer.weight.data.copy_(values)
    layer.weight_scale_inv.data.uniform_(0.5, 1.0)
    x = torch.randn(2, 5, 3, 256)
    fusible.serve_transformers_fp8(quantize_activations=False)
    with torch.no_grad():
        y = layer(x)
    whole = values.double() * layer.weight_scale_inv.detach().double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    wanted = torch.einsum("btgi,goi->btgo", x.double(), whole.view(3, 128, 256))
    size = torch.einsum("btgi,goi->btgo", x.double().abs(), whole.view(3, 128, 256).abs())
    assert bool(((y - wanted).abs() <= (256**0.5 + 4) * 2.0**-23 * size).all())
    report = fusible.conversion_report(fusible.convert(torch.nn.ModuleDict({"layer": layer, "other": torch.nn.Linear(4, 4)})))
    elsewhere = torch.nn.ModuleDict({"layer": finegrained_fp8.FP8Linear(256, 128, block_size=(128, 128)).to("meta"), "other": torch.nn.Linear(4, 4)})
    assert "it lies on another device" in str(fusible.conversion_report(fusible.convert(elsewhere)))
    assert "its class has a forward of its own" in {each.text for each in report.left}


def test_without_transformers_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingModuleError, match=r"^the package transformers: expected an installed package, got none; install transformers\.$"):
        fusible.serve_transformers_fp8()
    monkeypatch.undo()
