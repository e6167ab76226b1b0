"""A checkpoint whose weights are quantized takes no other format: what asks for one is refused in a sentence, and what only a part takes says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from convert_families import BY_NAME
from pretrained_models import DECODERS, saved
from test_evaluate import TEXT, with_tokenizer

import fusible
from fusible.cli import main
from fusible.cli.generation.loading import load_language_model
from fusible.errors import ArgumentError
from fusible.models import from_pretrained
from fusible.models.checkpoints import open_checkpoint, quantize_checkpoint, write_checkpoint
from fusible.models.pretrained import stored_formats_in
from fusible.models.stored_formats import StoredFormats
from fusible.models.weight_formats import WEIGHT_FORMATS, format_of_recipe, format_of_weight
from fusible.quantized import Float8CurrentScalingQuantizer, NVFP4Quantizer, QuantizedTensor
from fusible.tex import DType

SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
"""Of whole blocks of 128 but for keys and values, of 64 rows."""


def quantized(folder: Path, form: str, name: str = "llama", **options: Any) -> Path:
    """A directory with a tokenizer, whose weights ``fusible quantize`` has held in ``form``; beside it the one that it was made of."""
    family = DECODERS.get(name) or BY_NAME[name]
    torch.manual_seed(0)
    model = type(family.make())(type(family.make().config)(**{**family.options, **options})).eval()
    model.save_pretrained(folder / "plain")
    quantize_checkpoint(with_tokenizer(folder / "plain"), folder / form, form)
    return folder / form


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_a_recipe_says_what_its_weights_are_held_in(name: str) -> None:
    recipe = WEIGHT_FORMATS[name]
    if recipe is not None:
        state = torch.random.get_rng_state()
        assert format_of_recipe(recipe) == name
        assert torch.equal(torch.random.get_rng_state(), state)
    assert format_of_recipe(fusible.DelayedScaling()) == "fp8"


LARGER: dict[str, dict[str, int]] = {"llama": SIZES, "mixtral": SIZES, "deepseek_v3": {}, "t5": {"d_model": 128, "d_kv": 32, "d_ff": 256}}


@pytest.mark.parametrize("form", ["fp8", "block", "mxfp8", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("name", LARGER)
def test_what_stays_is_what_the_model_has(name: str, form: str, tmp_path: Path) -> None:
    """Asked for the format that is stored, a model has the weights that are told of in it; asked for another, it is refused unless some are plain."""
    if (name, form) == ("deepseek_v3", "block"):
        pytest.skip("its small matrices are no blocks")
    folder = quantized(tmp_path, form, name, **LARGER[name])
    stored, model = stored_formats_in(folder), from_pretrained(folder)
    found = {format_of_weight(p) for p in model.parameters() if isinstance(p, QuantizedTensor)}
    by_rows = {"blocks of 1x128"} if form == "fp8" and name in ("mixtral", "deepseek_v3") else set[str]()  # gates and ups of experts, as one
    assert stored.counts.keys() == {form} and found == {form} | by_rows
    assert fusible.parameter_bytes(from_pretrained(folder, WEIGHT_FORMATS[form])) <= fusible.parameter_bytes(model)
    other = "nvfp4" if form != "nvfp4" else "fp8"
    if stored.plain:
        assert fusible.parameter_bytes(from_pretrained(folder, WEIGHT_FORMATS[other])) < fusible.parameter_bytes(model)
        return
    with pytest.raises(
        ArgumentError, match=f"^recipe of from_pretrained: expected none, as the weights are quantized already, in {form}, got {other}"
    ):
        from_pretrained(folder, WEIGHT_FORMATS[other])


COMMANDS: dict[str, Callable[[Path, str], list[str]]] = {
    "generate": lambda folder, form: ["generate", str(folder), "--format", form, "--prompt", "abc", "--max-tokens", "2"],
    "serve": lambda folder, form: ["serve", str(folder), "--format", form, "--port", "0"],
    "evaluate": lambda folder, form: ["evaluate", str(folder), "--formats", form, "--text", "text", "--window", "32", "--tokens", "64"],
    "export": lambda folder, form: ["export", str(folder), "--format", form, "--out", "made.onnx"],
    "train": lambda folder, form: [
        *("train", "--model", str(folder), "--data", "text.txt", "--lora", "2", "--base-format", form, "--steps", "1"),
        *("--seq-len", "16", "--batch", "1", "--eval-share", "0", "--out", "made"),
    ],
}
"""Of each command that takes a format the words that ask for one."""
OPTIONS = {"evaluate": "--formats", "train": "--base-format"}


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantized(tmp_path_factory.mktemp("held"), "fp8", **SIZES)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("text", "text.txt"):
        (tmp_path / name).write_text(TEXT)
    return tmp_path


@pytest.mark.parametrize("form", [name for name in WEIGHT_FORMATS if name != "fp8"])
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_takes_another_format(command: str, form: str, held: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if command == "train" and form == "bf16":
        pytest.skip("as-is is its name for what is stored")
    assert main(COMMANDS[command](held, form)) == 2
    said, option = capsys.readouterr(), OPTIONS.get(command, "--format")
    assert said.err.startswith(f"{option}: expected none, as the weights are quantized already, in fp8, got {form}; leave it out, or ")
    assert said.err.count("\n") == 1 and not said.out and {path.name for path in here.iterdir()} == {"text", "text.txt"}


@pytest.mark.parametrize("command", ["generate", "evaluate", "train"])
def test_every_command_takes_the_format_that_is_stored(command: str, held: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(COMMANDS[command](held, "fp8")) == 0
    assert "stay as" not in capsys.readouterr().err


def test_t5_is_refused_too(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = quantized(here, "mxfp8", "t5")
    assert main(COMMANDS["generate"](folder, "nvfp4")) == 2
    assert capsys.readouterr().err.startswith("--format: expected none, as the weights are quantized already, in mxfp8, got nvfp4")


def test_an_evaluation_of_a_quantized_model_is_of_it_alone(held: Path, here: Path) -> None:
    plain = held.parent / "plain"
    for folder, rows in ((held, ["fp8"]), (plain, list(WEIGHT_FORMATS))):
        assert main(["evaluate", str(folder), "--text", "text", "--window", "64", "--tokens", "64", "--out", folder.name]) == 0
        figures = json.loads((here / folder.name / "quality.json").read_text())
        assert list(figures) == rows
    assert figures["nvfp4"]["divergence"] > 0 and figures["bf16"]["divergence"] == 0


def test_the_rest_of_a_model_that_is_quantized_in_part_takes_a_format(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = quantized(here, "block", **SIZES)
    stored = stored_formats_in(folder)
    assert stored == StoredFormats({"block": 10}, 4)  # keys and values of both layers stay plain
    model = load_language_model(folder, "nvfp4")
    note = "--format nvfp4: 10 of 14 weights stay as the directory has them, in block.\n"
    assert capsys.readouterr().err == note
    kinds = [format_of_weight(p) for p in model.parameters() if isinstance(p, QuantizedTensor)]  # type: ignore[attr-defined]
    assert set(kinds) == {"block", "nvfp4"} and kinds.count("nvfp4") == 4
    command = ["evaluate", str(folder), "--text", "text", "--window", "64", "--tokens", "64"]
    assert main([*command, "--formats", "bf16,block,nvfp4", "--out", "named"]) == 0
    assert list(json.loads(Path("named/quality.json").read_text())) == ["bf16 (4 of 14 weights)", "block", "nvfp4 (4 of 14 weights)"]
    assert main([*command, "--out", "whole"]) == 0
    assert list(json.loads(Path("whole/quality.json").read_text())) == ["as stored"]


def test_weights_in_two_formats_take_no_third_and_none_of_both() -> None:
    stored = StoredFormats({"nvfp4": 4, "fp8": 2}, 0)
    for name in ("nvfp4", "fp8", "mxfp8"):
        with pytest.raises(ArgumentError, match=f"^it: expected none, as the weights are quantized already, in fp8 and nvfp4, got {name}; leave"):
            stored.check(name, of="it", do="leave it out")
    StoredFormats({"fp8": 2}, 0).check("fp8", of="it", do="leave it out")
    StoredFormats({}, 6).check("mxfp4", of="it", do="leave it out")


def test_a_trainable_model_takes_any_recipe(held: Path) -> None:
    assert from_pretrained(held, fusible.MXFP8BlockScaling(), trainable=True).recipe is not None


def rewritten(folder: Path, name: str, quantizer: Any, config: dict[str, Any], *endings: str) -> Path:
    """A directory whose weights with one of these ``endings``, each by itself, are quantized."""
    plain = open_checkpoint(saved(name, folder))
    tensors = {each: quantizer(plain.tensor(each)) if each.endswith(endings) else plain.tensor(each) for each in plain.names}
    write_checkpoint(folder / "quantized", {**plain.config, "quantization_config": config}, tensors)
    return folder / "quantized"


def test_weights_that_are_stored_transposed_take_any_format(tmp_path: Path) -> None:
    """A model reads the values of such: none of them stays."""
    quantizer = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, columnwise=False)
    folder = rewritten(tmp_path, "gpt2", quantizer, {"quant_method": "fp8"}, "c_fc.weight")
    assert len(open_checkpoint(folder).weights) == 2 and stored_formats_in(folder) == StoredFormats({}, 8)
    held = [format_of_weight(p) for p in from_pretrained(folder, WEIGHT_FORMATS["mxfp8"]).parameters() if isinstance(p, QuantizedTensor)]
    assert held == ["mxfp8"] * 8


def test_experts_by_which_no_layer_multiplies_at_once_take_any_format(tmp_path: Path) -> None:
    """Gates and ups in NVFP4 whose scales were chosen apart are no one matrix: a model reads their values."""
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    folder = rewritten(tmp_path, "mixtral", NVFP4Quantizer(columnwise=False), config, "_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
    assert len(open_checkpoint(folder).weights) > 8 and stored_formats_in(folder).counts == {"nvfp4": 8}  # those of attention
    held = [format_of_weight(p) for p in from_pretrained(folder, WEIGHT_FORMATS["fp8"]).parameters() if isinstance(p, QuantizedTensor)]
    assert held.count("nvfp4") == 8 and held.count("fp8") > 0
