"""What ``fusible quantize`` writes is loaded by transformers, to the values that Fusible reads; what compressed-tensors writes is read by Fusible."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from fusible.cli import main
from fusible.models.checkpoints import Checkpoint, open_checkpoint, quantize_checkpoint, write_checkpoint
from fusible.models.checkpoints.schemes.modelopt import MODELOPT, NVFP4_BYTES

transformers = pytest.importorskip("transformers")
compressors = pytest.importorskip("compressed_tensors.compressors")
converters = pytest.importorskip("compressed_tensors.entrypoints.convert.converters")
quantization = pytest.importorskip("compressed_tensors.quantization")

SIZES = {"vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, intermediate_size=384, tie_word_embeddings=True))


def qwen3_moe() -> Any:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "decoder_sparse_step": 2}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES, intermediate_size=256, head_dim=32, **experts))


def deepseek_v3() -> Any:
    sizes = {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32, "intermediate_size": 256}
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 128,
        "first_k_dense_replace": 1,
    }
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**SIZES, **sizes, **experts))


def gpt_oss() -> Any:
    config = transformers.GptOssConfig(**SIZES, intermediate_size=96, head_dim=32, num_local_experts=3, num_experts_per_tok=2, sliding_window=16)
    return transformers.GptOssForCausalLM(config)


COMPRESSED, FINE, MXFP4 = (
    lambda: transformers.CompressedTensorsConfig(dequantize=True),
    lambda: transformers.FineGrainedFP8Config(dequantize=True),
    lambda: transformers.Mxfp4Config(dequantize=True),
)
FORMATS: dict[str, tuple[Callable[[], Any], int, float]] = {
    "fp8": (COMPRESSED, 10**9, 16 / 448),
    "block": (FINE, 128, 16 / 448),
    "mxfp8": (COMPRESSED, 32, 16 / 256),
    "nvfp4": (COMPRESSED, 16, 1 / 6 + 2**-4),
    "mxfp4": (COMPRESSED, 32, 2 / 8),
}
"""How transformers is asked to dequantize, the elements of a block in a row, and the largest error over the block's amax: half the step between the
largest two numbers; of MXFP8, whose amax may lie anywhere from 224 to 448, over the least; of NVFP4, whose scales are rounded by up to a sixteenth,
that much more; of MXFP4, whose amax is one of 4 to 8, of which 6 to 8 saturate at 6."""

TOGETHER = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


def partners(name: str) -> list[str]:
    """The weights that one scale is shared by."""
    path, _, own = name.removesuffix(".weight").rpartition(".")
    return [f"{path}.{each}.weight" for each in next((group for group in TOGETHER if own in group), (own,))]


def saved(make: Callable[[], Any], folder: Path) -> Any:
    torch.manual_seed(0)
    model = make().to(torch.bfloat16)
    model.save_pretrained(folder)
    return model


def loaded(folder: Path, config: Any) -> dict[str, torch.Tensor]:
    """The parameters of the model as transformers dequantizes it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You passed `quantization_config`", category=UserWarning)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    assert not any(parameter.is_meta for parameter in model.parameters())
    return dict(model.state_dict())


def values(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    tensor = checkpoint[name]
    return tensor.dequantize(dtype=torch.bfloat16) if name in checkpoint.weights else tensor


@pytest.mark.parametrize("name", FORMATS)
def test_a_model_is_quantized_and_loaded(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, (config, block, bound) = saved(llama, tmp_path / "model"), FORMATS[name]
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    assert main(["quantize", str(tmp_path / "model"), "--format", name, "--out", str(tmp_path / name), "--shard-size", "0.0002"]) == 0
    assert f"14 weights in {name}" in capsys.readouterr().out
    assert (tmp_path / name / "tokenizer.json").read_text() == "{}" and (tmp_path / name / "model.safetensors.index.json").exists()
    checkpoint, found = open_checkpoint(tmp_path / name), loaded(tmp_path / name, config())
    assert len(checkpoint.weights) == 14 and all("_proj" in each for each in checkpoint.weights)
    assert "lm_head" in json.loads((tmp_path / name / "config.json").read_text())["quantization_config"].get("ignore", ["lm_head"])
    for each, original in model.state_dict().items():
        if each == "lm_head.weight":
            continue  # the embeddings'
        mine = values(checkpoint, each)
        assert torch.equal(found[each], mine), each
        if each not in checkpoint.weights:
            assert torch.equal(mine, original)
            continue
        blocks = original.float().reshape(-1, min(block, original.numel()))
        error = (mine.float().reshape(blocks.shape) - blocks).abs().amax(1)
        whole = torch.stack([model.state_dict()[partner].abs().amax() for partner in partners(each)]).amax().float()
        amax = whole if block > 100 else blocks.abs().amax(1)
        assert bool((error <= (bound + 2**-8) * amax).all()) and bool((error > 0).any()), each


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_values_are_those_of_the_dtype_of_the_model(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """To the bit, in fp32 too, but for NVFP4: compressed-tensors (0.20) rounds its values to bf16, and of models in fp16 scales to fp16 before."""
    torch.manual_seed(1)
    llama().to(dtype).save_pretrained(tmp_path / "model")
    quantize_checkpoint(tmp_path / "model", tmp_path / name, name)
    checkpoint, found = open_checkpoint(tmp_path / name), loaded(tmp_path / name, FORMATS[name][0]())
    assert len(checkpoint.weights) == 14
    for each in checkpoint.weights:
        exact = checkpoint[each].dequantize(dtype=torch.float32)
        assert found[each].dtype is dtype
        if name == "nvfp4" and dtype is torch.float16:
            assert torch.equal(found[each], found[each].bfloat16().half())
            torch.testing.assert_close(found[each].float(), exact, rtol=2**-8, atol=0)
        else:
            assert torch.equal(found[each], exact.to(torch.bfloat16 if name == "nvfp4" else dtype).to(dtype)), each


@pytest.mark.parametrize("make", [qwen3_moe, deepseek_v3])
@pytest.mark.parametrize("name", FORMATS)
def test_experts_are_quantized_and_routers_are_not(name: str, make: Callable[[], Any], tmp_path: Path) -> None:
    model = saved(make, tmp_path / "model")
    assert main(["quantize", str(tmp_path / "model"), "--format", name, "--out", str(tmp_path / name)]) == 0
    checkpoint = open_checkpoint(tmp_path / name)
    found = loaded(tmp_path / name, FINE() if name == "mxfp8" else FORMATS[name][0]())
    quantized = set(checkpoint.weights)
    assert sum(".experts." in each for each in quantized) == 12 and not any(each.endswith("gate.weight") for each in quantized)
    for each, original in model.state_dict().items():
        if each in quantized:
            assert torch.equal(found[each], values(checkpoint, each)), each
        elif ".experts." not in each:
            assert torch.equal(found[each], original), each
    fused = "model.layers.1.mlp.experts.down_proj"
    experts = [values(checkpoint, f"model.layers.1.mlp.experts.{place}.down_proj.weight") for place in range(4)]
    if name == "nvfp4":  # transformers (5.24) leaves the scale of the tensor out where it dequantizes experts
        experts = [expert * checkpoint.parts(f"model.layers.1.mlp.experts.{place}.down_proj.weight")["_global_scale"]
                   for place, expert in enumerate(experts)]  # fmt: skip
        torch.testing.assert_close(found[fused].float(), torch.stack(experts), rtol=2**-7, atol=0)
    else:
        assert torch.equal(found[fused], torch.stack(experts))


def test_the_experts_of_gpt_oss_are_quantized(tmp_path: Path) -> None:
    """As transformers' ``Mxfp4Config`` has them: its own parameters are the transposed ones, ``[experts, in, out]``."""
    model = saved(gpt_oss, tmp_path / "model")
    assert main(["quantize", str(tmp_path / "model"), "--format", "mxfp4", "--out", str(tmp_path / "mxfp4")]) == 0
    checkpoint, found = open_checkpoint(tmp_path / "mxfp4"), loaded(tmp_path / "mxfp4", MXFP4())
    assert {each.rpartition(".")[2] for each in checkpoint.weights} == {"gate_up_proj", "down_proj"} and len(checkpoint.weights) == 4
    for each, original in model.state_dict().items():
        if each not in checkpoint.weights:
            assert torch.equal(found[each], original), each
            continue
        mine = values(checkpoint, each).mT
        assert torch.equal(found[each], mine) and mine.shape == original.shape, each
        assert float((mine - original).norm() / original.norm()) < 0.2


def test_gpt_oss_in_another_format_keeps_its_experts(tmp_path: Path) -> None:
    model = saved(gpt_oss, tmp_path / "model")
    assert main(["quantize", str(tmp_path / "model"), "--format", "fp8", "--out", str(tmp_path / "fp8")]) == 0
    checkpoint, found = open_checkpoint(tmp_path / "fp8"), loaded(tmp_path / "fp8", COMPRESSED())
    assert len(checkpoint.weights) == 8
    for each, original in model.state_dict().items():
        assert torch.equal(found[each], values(checkpoint, each) if each in checkpoint.weights else original), each


def test_modelopt_is_written_as_its_converter_reads_it(tmp_path: Path) -> None:
    """From compressed-tensors' NVFP4, by Fusible, and back by the converter of compressed-tensors."""
    saved(llama, tmp_path / "model")
    quantize_checkpoint(tmp_path / "model", tmp_path / "compressed", "nvfp4")
    compressed = open_checkpoint(tmp_path / "compressed")
    config = {**compressed.config, "quantization_config": MODELOPT.written(NVFP4_BYTES, ["lm_head"])}
    write_checkpoint(tmp_path / "modelopt", config, dict(compressed))
    assert open_checkpoint(tmp_path / "modelopt").quantization is MODELOPT
    with safe_open(tmp_path / "modelopt" / "model.safetensors", "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}
    converter = converters.ModelOptNvfp4Converter(ignore=["lm_head"], targets=["re:.*_proj$"])
    found = converter.process(stored)
    assert set(found) == set(compressed.shards.entries)
    for name in compressed.weights:
        for suffix, part in compressed.parts(name).items():
            if part.dtype is torch.float32:  # a reciprocal, rounded once more
                torch.testing.assert_close(found[f"{name}{suffix}"].reshape(1), part.reshape(1), rtol=2**-22, atol=0)
            else:
                assert torch.equal(found[f"{name}{suffix}"].view(torch.uint8), part.view(torch.uint8))


PRESETS = {
    "FP8": "float-quantized",
    "FP8_DYNAMIC": "float-quantized",
    "FP8_BLOCK": "float-quantized",
    "MXFP8": "mxfp8-quantized",
    "NVFP4A16": "nvfp4-pack-quantized",
    "NVFP4": "nvfp4-pack-quantized",
    "MXFP4A16": "mxfp4-pack-quantized",
}
"""By the name of a scheme of compressed-tensors the format that it is stored in."""


@pytest.mark.parametrize("preset", PRESETS)
def test_what_compressed_tensors_stores_is_read(preset: str, tmp_path: Path) -> None:
    """Compressed by its compressors, with scales of this test, and compared with what they decompress it to."""
    torch.manual_seed(3)
    scheme = quantization.preset_name_to_scheme(preset, ["Linear"])
    weight = torch.randn(64 if "BLOCK" not in preset else 256, 256)
    compressor = compressors.BaseCompressor.get_value_from_registry(PRESETS[preset])
    stored = compressor.compress({"weight": weight, **_scales(weight, scheme)}, scheme)
    again = compressor.decompress(dict(stored), scheme)
    config = quantization.QuantizationConfig(config_groups={"group_0": scheme}, format=PRESETS[preset], quantization_status="compressed")
    told = {"model_type": "llama", "dtype": "float32", "quantization_config": json.loads(config.model_dump_json())}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(told))
    names = {f"layers.0.q_proj.{part}": tensor.detach().clone().contiguous() for part, tensor in stored.items()}
    save_file(names, tmp_path / "model" / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path / "model")
    assert checkpoint.names == ("layers.0.q_proj.weight",)
    found = checkpoint["layers.0.q_proj.weight"].dequantize(dtype=torch.float32)
    # Scales of bf16 and products of bf16, where it decompresses so, are rounded to 8 bits twice.
    torch.testing.assert_close(found, again["weight"].float(), rtol=2**-7, atol=0)
    write_checkpoint(tmp_path / "again", checkpoint.config, checkpoint)
    rewritten = open_checkpoint(tmp_path / "again")
    assert {name: entry.shape for name, entry in rewritten.shards.entries.items()} == {name: tuple(tensor.shape) for name, tensor in names.items()}


def _scales(weight: torch.Tensor, scheme: Any) -> dict[str, torch.Tensor]:
    """Scales as the observers of compressed-tensors give them: the amax of each group over the largest number."""
    told = scheme.weights
    largest = 448.0 if told.num_bits == 8 else 6.0
    strategy, rows, columns = str(told.strategy), *weight.shape
    if strategy == "tensor":
        return {"weight_scale": weight.abs().amax().reshape(1) / largest}
    if strategy == "channel":
        return {"weight_scale": weight.abs().amax(1, keepdim=True) / largest}
    if strategy == "block":
        return {"weight_scale": weight.abs().view(rows // 128, 128, columns // 128, 128).amax((1, 3)) / largest}
    amax = weight.abs().view(rows, columns // told.group_size, told.group_size).amax(2)
    if strategy == "group":
        return {"weight_scale": torch.exp2(torch.floor(torch.log2(amax / largest)))}
    whole = 2688.0 / weight.abs().amax().reshape(1)
    return {"weight_scale": (amax / largest * whole).to(torch.float8_e4m3fn).float(), "weight_global_scale": whole}


def t5() -> Any:
    sizes = {"d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 1, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=256, decoder_start_token_id=0, **sizes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("make", [llama, t5])
@pytest.mark.parametrize("name", FORMATS)
def test_transformers_computes_with_what_is_written(name: str, make: Callable[[], Any], dtype: torch.dtype, tmp_path: Path) -> None:
    """Of a model in any dtype, loaded as it is and in fp32, with nothing said of its quantization."""
    torch.manual_seed(0)
    model, tokens = make().to(dtype).eval(), torch.randint(3, 256, (2, 12))
    call = {"input_ids": tokens} | ({"decoder_input_ids": tokens} if make is t5 else {})
    model.save_pretrained(tmp_path / "model")
    quantize_checkpoint(tmp_path / "model", tmp_path / name, name)
    checkpoint = open_checkpoint(tmp_path / name)
    with torch.no_grad():
        for each in checkpoint.weights:
            model.get_parameter(each).copy_(checkpoint[each].dequantize(dtype=dtype))
        wanted = model.float()(**call).logits
        for asked in (None, torch.float32):
            found = type(model).from_pretrained(tmp_path / name, **({} if asked is None else {"dtype": asked})).eval()
            assert found.dtype is (asked or dtype)
            logits = found(**call).logits.float()
            bound = 2**-4 if name in ("fp8", "block") or asked is None else 2**-6  # activations of FP8 are rounded too, and others to the dtype
            assert (logits - wanted).norm() < bound * wanted.norm()
