"""Models of transformers' checkpoints on a GPU: loaded, converted, held in 8 and 4 bits, generated from and trained, beside the same on the CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from gpu_cases import DEVICE, apart, only

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
import finetune_models
from convert_families import BY_NAME, RECIPES, Family, logits
from pretrained_models import DECODERS, ENCODER_DECODERS, FAMILIES, drawn, given, reference, saved, told
from test_evaluate import folder_with_tokenizer
from test_generate_pretrained import generated, wanted
from test_pretrained_quantized import SCHEMES, written

import fusible
from fusible.cli import main
from fusible.models import EncoderDecoderModel, from_pretrained
from fusible.models.weight_formats import WEIGHT_FORMATS

FP32 = 1e-5
EIGHT_BITS = {"nvfp4": 2.0**-2}
"""What a rounding that falls to the other side changes under a recipe, beyond 2^-3."""


@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model, (ours, theirs) = from_pretrained(saved(name, tmp_path), device=DEVICE), given(name)
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {DEVICE.type}
    with torch.no_grad():
        found = model(*(value.to(DEVICE) for value in ours))
        assert apart([found.double().cpu()], [told(reference(name)(**theirs)).double()]) <= FP32


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_texts_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model, ((inputs, _), theirs) = from_pretrained(saved(name, tmp_path), device=DEVICE), given(name)
    del theirs["decoder_input_ids"]
    assert isinstance(model, EncoderDecoderModel)
    with torch.no_grad():
        texts = reference(name).generate(**theirs, do_sample=False, max_new_tokens=32, min_new_tokens=32)[:, -32:]
    assert model.generate(inputs.to(DEVICE), 32) == texts.tolist()


@pytest.mark.parametrize("name", DECODERS)
def test_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Five prompts of different lengths, two at a time, over pages."""
    prompts = [drawn(length, seed=length) for length in (3, 19, 1, 30, 8)]
    assert generated(from_pretrained(saved(name, tmp_path), device=DEVICE), prompts) == wanted(name, prompts)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantized_checkpoints_stay_what_they_are(scheme: str, tmp_path: Path) -> None:
    folder, plain = written(tmp_path, scheme, num_key_value_heads=2)
    model, tokens = from_pretrained(folder, device=DEVICE), drawn(2, 24)
    with torch.no_grad():
        assert apart([model(tokens.to(DEVICE)).double().cpu()], [plain(tokens).logits.double()]) <= FP32


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("name", [name for name, recipe in WEIGHT_FORMATS.items() if recipe is not None])
def test_weight_formats_are_the_cpus(name: str, rows: int, tmp_path: Path) -> None:
    folder, tokens = written(tmp_path, "tensor")[0].parent / "plain", drawn(1, rows)
    with torch.no_grad(), only("torch"):
        host = from_pretrained(folder, WEIGHT_FORMATS[name], dtype=torch.float32)(tokens)
    with torch.no_grad():
        found = from_pretrained(folder, WEIGHT_FORMATS[name], dtype=torch.float32, device=DEVICE)(tokens.to(DEVICE))
    assert apart([found.double().cpu()], [host.double()]) <= FP32


@pytest.mark.parametrize("family", BY_NAME.values(), ids=lambda family: family.name)
def test_a_converted_model_computes_what_it_did(family: Family) -> None:
    host, inputs = family.make(), family.inputs()
    there = {name: value.to(DEVICE) for name, value in inputs.items()}
    model = fusible.convert(family.make().to(DEVICE))
    assert apart([logits(model, there).double().cpu()], [logits(host, inputs).double()]) <= FP32
    assert torch.equal(logits(fusible.convert(model, undo=True), there), logits(family.make().to(DEVICE), there))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "bert", "t5"])
def test_a_converted_model_learns_as_on_the_cpu(name: str, recipe: str) -> None:
    family, inputs = BY_NAME[name], BY_NAME[name].inputs()

    def losses(device: torch.device) -> list[float]:
        model = fusible.convert(family.make().to(device), RECIPES[recipe]).train()
        given = {name: value.to(device) for name, value in inputs.items()}
        optimizer = fusible.FusedAdam(model.parameters(), lr=1e-3)
        found = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(**given).loss
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    with only("torch"):
        host = losses(torch.device("cpu"))
    assert losses(DEVICE) == pytest.approx(host, rel=EIGHT_BITS.get(recipe, 2.0**-3) / 4)


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_of_a_converted_model_are_held_in_8_bits(recipe: str) -> None:
    family, inputs = BY_NAME["llama"], BY_NAME["llama"].inputs()
    there = {name: value.to(DEVICE) for name, value in inputs.items()}
    with torch.no_grad():
        model = fusible.convert(family.make(), RECIPES[recipe])
        fusible.pytorch.quantize_parameters(model, recipe=RECIPES[recipe])
        with only("torch"):
            host = logits(model, inputs)
        moved = logits(model.to(DEVICE), there)
    assert apart([moved.double().cpu()], [host.double()]) <= EIGHT_BITS.get(recipe, 2.0**-3)


@pytest.mark.parametrize("more", [[], ["--lora", "2", "--merge"], ["--recipe", "block"]], ids=["whole", "lora", "block"])
def test_the_command_trains_there_and_goes_on_here(more: list[str], tmp_path: Path) -> None:
    finetune_models.checkpoint(tmp_path / "base")
    finetune_models.documents(tmp_path / "documents.jsonl")
    runs = {name: tmp_path / name for name in ("there", "here")}
    for name, out in runs.items():
        device = str(DEVICE) if name == "there" else "cpu"
        assert main([*finetune_models.small_run(tmp_path, out, "--steps", "4", "--device", device), *more]) == 0
    losses = {name: json.loads((out / "metrics.json").read_text())["loss"] for name, out in runs.items()}
    assert losses["there"] == pytest.approx(losses["here"], rel=2.0**-6)
    assert main(["train", "--resume", str(runs["there"]), "--steps", "6", "--device", "cpu"]) == 0


def test_the_commands_take_a_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, text = folder_with_tokenizer(tmp_path), tmp_path / "text.txt"
    text.write_text("abcd " * 200)
    options = ["generate", str(folder), "--prompt", "abc", "--temperature", "0", "--max-tokens", "8"]
    printed = []
    for device in (str(DEVICE), "cpu"):
        assert main([*options, "--device", device]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert main(["evaluate", str(folder), "--text", str(text), "--window", "32", "--device", str(DEVICE)]) == 0
