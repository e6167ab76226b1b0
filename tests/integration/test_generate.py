"""``fusible generate`` on a run that was really trained: what it prints, that it repeats, and what it says of mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import Parameter

from fusible.cli import main
from fusible.cli.generation.engine import generate
from fusible.cli.generation.job import load_model
from fusible.cli.training.layout import load_runs
from fusible.cli.training.model import ByteGPT
from fusible.errors import ArgumentError
from fusible.models.generation import Sampling
from fusible.pytorch import KVCache, Linear
from fusible.quantized import QuantizedTensor

SMALL = "--steps 3 --layers 2 --hidden 32 --heads 2 --seq-len 32 --batch 2".split()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    assert main(["train", "--recipe", "delayed,bf16", *SMALL, "--out", str(folder)]) == 0
    return folder


def command(run: Path, *options: str, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    capsys.readouterr()
    assert main(["generate", str(run), *options]) == 0
    printed = capsys.readouterr()
    return printed.out, printed.err


@pytest.mark.parametrize("recipe", ["delayed", "bf16"])
def test_it_goes_on_from_a_prompt_and_repeats_itself(run: Path, recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--prompt", "abc", "--bytes", "40", "--recipe", recipe)
    first, report = command(run, *options, capsys=capsys)
    assert first.startswith("abc") and first.endswith("\n")
    assert "40 bytes in " in report and "; weights 0." in report
    assert command(run, *options, capsys=capsys)[0] == first
    assert command(run, *options, "--seed", "1", capsys=capsys)[0] != first


@pytest.mark.parametrize("recipe", ["block", "mxfp8", "nvfp4"])
def test_weights_are_held_as_the_recipe_quantizes_them(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And give what they give where each call quantizes them anew."""
    assert main(["train", "--recipe", recipe, *SMALL, "--out", str(tmp_path)]) == 0
    model = load_model(tmp_path, None)
    assert sum(isinstance(p, QuantizedTensor) for p in model.parameters()) == len([m for m in model.modules() if isinstance(m, Linear)])
    text, lengths = torch.tensor(list(b"To be or not")), torch.tensor([12], dtype=torch.int32)
    plain = ByteGPT(load_runs(tmp_path, "DIR")[1][recipe].options, recipe).eval()
    plain.load_state_dict(load_runs(tmp_path, "DIR")[1][recipe].model)
    with torch.inference_mode():
        found, wanted = (of.next_bytes(text, lengths, KVCache(1, 12, dtype=of.activation)) for of in (model, plain))
    torch.testing.assert_close(found, wanted, rtol=0, atol=2.0**-7 * wanted.abs().max().item())
    assert command(tmp_path, "--prompt", "abc", "--bytes", "5", capsys=capsys)[0].startswith("abc")


def test_a_run_with_layers_in_bf16_goes_on_with_their_weights_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--recipe", "delayed", *SMALL, "--bf16-layers", "first,head", "--out", str(tmp_path)]) == 0
    assert command(tmp_path, "--prompt", "abc", "--bytes", "5", capsys=capsys)[0].startswith("abc")
    held = [layer.weight.dtype for layer in load_model(tmp_path, None).modules() if isinstance(layer, Linear) and type(layer.weight) is Parameter]
    assert held == [torch.float32] * 5


def test_a_compiled_model_goes_on_as_well(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, report = command(run, "--prompt", "abc", "--bytes", "5", "--executor", "xla", capsys=capsys)
    assert text.startswith("abc") and "5 bytes in " in report


def test_prompts_of_different_lengths_are_continued_as_each_would_be_alone(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    greedy = ("--bytes", "30", "--temperature", "0", "--recipe", "bf16")
    alone = [command(run, "--prompt", prompt, *greedy, capsys=capsys)[0] for prompt in ("The quick brown", "x")]
    for pages in ((), ("--page-size", "4")):
        together, _ = command(run, "--prompt", "The quick brown", "--prompt", "x", *greedy, *pages, capsys=capsys)
        assert together == f"[1]\n{alone[0]}[2]\n{alone[1]}"


def test_steps_give_what_the_model_gives_for_the_whole(run: Path) -> None:
    model = load_model(run, "bf16")
    prompt = list(b"To be")
    cache = KVCache(1, 40, dtype=model.activation)
    made = [tokens[0] for tokens in generate(model.next_bytes, [prompt], 20, Sampling(0.0), torch.Generator(), cache)]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + made]))[0]
    likeliest = logits.topk(2).values
    # Where the two likeliest bytes are closer than bf16 tells them apart, either may be chosen.
    clear = (likeliest[:, 0] - likeliest[:, 1]) > 2.0**-5 * logits.abs().amax(-1)
    expected = logits.argmax(-1)[len(prompt) - 1 : -1]
    assert all(e == m for e, m, c in zip(expected.tolist(), made, clear[len(prompt) - 1 : -1].tolist(), strict=True) if c)
    assert cache.lengths == (len(prompt) + 19,)


def test_choices_among_the_likeliest() -> None:
    logits, generator = torch.tensor([[0.0, 5.0, 4.0, 1.0]]).expand(4000, 4), torch.Generator().manual_seed(0)
    drawn = Sampling(1.0, top_k=2).choose(logits, generator)
    assert set(drawn.tolist()) == {1, 2}
    share = (drawn == 1).double().mean().item()
    expected = torch.tensor([5.0, 4.0]).softmax(0)[0].item()
    assert abs(share - expected) < 5 * (expected * (1 - expected) / 4000) ** 0.5
    assert set(Sampling(0.0).choose(logits, generator).tolist()) == {1}
    assert set(Sampling(1000.0).choose(logits, generator).tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--bytes", "0"), "--bytes: expected at least 1, got 0"),
        (("--temperature", "-1"), "--temperature: expected a number of at least 0, got -1.0"),
        (("--top-k", "0"), "--top-k: expected an integer of at least 1, got 0"),
        (("--prompt", ""), "--prompt: expected at least one byte, got none"),
        (("--recipe", "current"), "--recipe: expected one of bf16, delayed, got current"),
        (("--page-size", "0"), "page_size of KVCache: expected an integer of at least 1 or None, got 0"),
    ],
)
def test_mistakes_are_one_sentence(run: Path, options: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["generate", str(run), *options]) == 2
    printed = capsys.readouterr()
    assert said in printed.err and printed.err.count("\n") == 1 and not printed.out


def test_a_folder_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"DIR {tmp_path}: expected a checkpoint, got none")
    with pytest.raises(ArgumentError):
        Sampling(float("inf"))
