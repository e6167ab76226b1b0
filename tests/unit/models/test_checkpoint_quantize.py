"""Which weights of a checkpoint are quantized, to what, and when it is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fusible.errors import ArgumentError, CheckpointError, FileError, FusibleError, MissingFileError
from fusible.models.checkpoints import open_checkpoint, quantize_checkpoint
from fusible.models.checkpoints.quantize import FORMATS
from fusible.tex import DType

CONFIG: dict[str, Any] = {"model_type": "llama", "vocab_size": 12, "hidden_size": 128, "num_hidden_layers": 2, "dtype": "bfloat16"}
SHAPES = {
    "self_attn.q_proj": (128, 128), "self_attn.k_proj": (128, 128), "self_attn.v_proj": (128, 128), "self_attn.o_proj": (128, 128),
    "mlp.gate": (4, 128), "mlp.shared_expert_gate": (1, 128), "mlp.gate_proj": (256, 128), "mlp.up_proj": (256, 128),
    "mlp.down_proj": (128, 256), "mlp.odd_proj": (100, 130), "input_layernorm": (128,), "self_attn.q_norm": (128,), "mlp.conv1d": (128, 1, 4),
}  # fmt: skip
LINEARS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(4)
    made = {"model.embed_tokens.weight": torch.randn(12, 128), "lm_head.weight": torch.randn(12, 128), "model.norm.weight": torch.randn(128)}
    for layer in range(2):
        for place, (name, shape) in enumerate(SHAPES.items()):
            made[f"model.layers.{layer}.{name}.weight"] = torch.randn(shape) * (1 + place)
        made[f"model.layers.{layer}.self_attn.q_proj.bias"] = torch.randn(128)
    return {name: tensor.to(torch.bfloat16) for name, tensor in made.items()}


def put(folder: Path, config: dict[str, Any] = CONFIG, change: Callable[[dict[str, torch.Tensor]], Any] = lambda made: None) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    made = tensors()
    change(made)
    save_file(made, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("format", FORMATS)
def test_linear_layers_in_blocks_are_quantized_and_nothing_else(format: str, tmp_path: Path) -> None:
    source = open_checkpoint(put(tmp_path / "model"))
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    made = quantize_checkpoint(tmp_path / "model", tmp_path / "out", format, shard_size=100_000)
    checkpoint = open_checkpoint(tmp_path / "out")
    odd = {"odd_proj"} if format == "fp8" else set()  # which one scale takes as it takes all
    assert {name.split(".")[-2] for name in checkpoint.weights} == LINEARS | odd and made.weights == 2 * len(LINEARS | odd)
    assert set(checkpoint.names) == set(source.names) and made.nbytes == checkpoint.nbytes < made.nbytes_before == source.nbytes
    for name in source.names:
        assert checkpoint.shape(name) == source.shape(name)
        if name not in checkpoint.weights:
            assert torch.equal(checkpoint[name], source[name])
            continue
        original, found = source[name].float(), checkpoint[name].dequantize(dtype=torch.float32)
        assert 0 < float((original - found).norm() / original.norm()) < 0.13
    routers = {f"model.layers.{layer}.mlp.{name}" for layer in (0, 1) for name in ("gate", "shared_expert_gate")}
    assert checkpoint.quantization is not None
    kept = set(checkpoint.quantization.high_precision(checkpoint.quantization_config))
    assert kept == {"lm_head"} | routers | {f"model.layers.{layer}.mlp.odd_proj" for layer in (0, 1) if not odd} == set(made.kept)
    assert (tmp_path / "out" / "tokenizer.json").exists() and checkpoint.config["vocab_size"] == 12


@pytest.mark.parametrize(("format", "field"), [("fp8", "_scale_inv"), ("nvfp4", "_amax_rowwise")])
def test_layers_of_one_product_have_one_scale(format: str, field: str, tmp_path: Path) -> None:
    """That of the largest element of all of them."""
    source = open_checkpoint(put(tmp_path / "model"))
    quantize_checkpoint(tmp_path / "model", tmp_path / "out", format)
    checkpoint = open_checkpoint(tmp_path / "out")
    for group in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",)):
        names = [f"model.layers.1.{each}.weight" for each in group]
        scales = {float(getattr(checkpoint[name], field)) for name in names}
        amax = max(float(source[name].abs().amax()) for name in names)
        (scale,) = scales
        assert scale == (amax if field.startswith("_amax") else pytest.approx(amax / 448, rel=2**-22))
    apart = {float(getattr(checkpoint[f"model.layers.1.{each}.weight"], field)) for each in ("self_attn.o_proj", "mlp.down_proj")}
    assert len(apart) == 2


def test_a_weight_of_zeros_and_a_large_one_are_met(tmp_path: Path) -> None:
    def change(made: dict[str, torch.Tensor]) -> None:
        made["model.layers.0.self_attn.o_proj.weight"].zero_()
        made["model.layers.0.mlp.down_proj.weight"].mul_(2.0**100)

    source = open_checkpoint(put(tmp_path / "model", change=change))
    for format in FORMATS:
        quantize_checkpoint(tmp_path / "model", tmp_path / format, format)
        checkpoint = open_checkpoint(tmp_path / format)
        assert not bool(checkpoint["model.layers.0.self_attn.o_proj.weight"].dequantize(dtype=torch.float32).any())
        name = "model.layers.0.mlp.down_proj.weight"
        ratio = checkpoint[name].dequantize(dtype=torch.float32) / source[name].float()
        assert 0.7 < float(ratio[source[name].abs() > 2.0**102].median()) < 1.3


@pytest.mark.parametrize("told", [{"is_encoder_decoder": True}, {"vision_config": {}}, {"num_hidden_layers": 1, "num_nextn_predict_layers": 1}])
def test_other_stacks_of_blocks_are_no_contradiction(told: dict[str, Any], tmp_path: Path) -> None:
    made = quantize_checkpoint(put(tmp_path / "model", {**CONFIG, "num_hidden_layers": 1, **told}), tmp_path / "out", "mxfp8")
    assert made.weights == 2 * len(LINEARS)


def without(*endings: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda made: [made.pop(name) for name in list(made) if name.endswith(endings)]


def infinite(made: dict[str, torch.Tensor]) -> None:
    made["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.inf


REFUSED: dict[str, tuple[dict[str, Any], Callable[[dict[str, torch.Tensor]], Any], str, type[FusibleError], str]] = {
    "another format": (CONFIG, lambda made: None, "int4", ArgumentError, "expected fp8, block, mxfp8, nvfp4 or mxfp4, got 'int4'"),
    "no architecture": ({}, lambda made: None, "fp8", CheckpointError, "config.json of .*: expected a model_type, got None"),
    "a family of Conv1D": ({**CONFIG, "model_type": "gpt2"}, lambda made: None, "fp8", CheckpointError, "expected weights of linear layers .*gpt2"),
    "no blocks": (CONFIG, without("proj.weight"), "fp8", CheckpointError, "a model to quantize to fp8: expected weights of linear layers"),
    "no whole blocks": (
        CONFIG, without(*(f".{name}.weight" for name in LINEARS)), "block", CheckpointError, "in multiples of 128 x 128, got none in this llama"
    ),
    "a vocabulary of another size": ({**CONFIG, "vocab_size": 13}, lambda made: None, "fp8", CheckpointError, r"embed_tokens.*shape \[13, 128\]"),
    "another width": ({**CONFIG, "hidden_size": 64}, lambda made: None, "fp8", CheckpointError, r"shape \[12, 64\], as the config has it"),
    "more blocks": ({**CONFIG, "num_hidden_layers": 3}, lambda made: None, "fp8", CheckpointError, "expected 3 blocks, got blocks 0 to 1, 2 in all"),
    "fewer blocks": ({**CONFIG, "num_hidden_layers": 1}, lambda made: None, "fp8", CheckpointError, "expected 1 blocks, got blocks 0 to 1"),
    "an infinite weight": (CONFIG, infinite, "mxfp8", CheckpointError, "model.layers.1.mlp.up_proj.weight: expected finite numbers"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_quantized_is_refused_and_nothing_is_written(name: str, tmp_path: Path) -> None:
    config, change, format, kind, wanted = REFUSED[name]
    source = put(tmp_path / "model", config, change)
    with pytest.raises(kind) as found:
        quantize_checkpoint(source, tmp_path / "out", format)
    assert re.search(wanted, str(found.value)) and "\n" not in str(found.value)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_quantized_model_is_not_quantized_again(tmp_path: Path) -> None:
    quantize_checkpoint(put(tmp_path / "model"), tmp_path / "out", "fp8")
    with pytest.raises(CheckpointError, match="expected a model in high precision, got one quantized by compressed-tensors"):
        quantize_checkpoint(tmp_path / "out", tmp_path / "again", "block")
    with pytest.raises(FileError, match="expected a new folder"):
        quantize_checkpoint(tmp_path / "model", tmp_path / "out", "block")
    with pytest.raises(MissingFileError):
        quantize_checkpoint(tmp_path / "none", tmp_path / "again", "block")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_values_of_fp8_are_those_of_the_formula(tmp_path: Path) -> None:
    """``cast(x * 448 / amax)``, by torch's own cast, which rounds to nearest even."""
    source = open_checkpoint(put(tmp_path / "model"))
    quantize_checkpoint(tmp_path / "model", tmp_path / "out", "fp8")
    name = "model.layers.0.self_attn.o_proj.weight"
    weight, found = source[name].float(), open_checkpoint(tmp_path / "out")[name]
    scale = torch.tensor(448.0) / weight.abs().amax()
    assert found._fp8_dtype == DType.kFloat8E4M3
    assert torch.equal(found._data.view(torch.float8_e4m3fn).float(), (weight * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float())
