"""``fusible train --model`` under ``torchrun``: whatever the layout, the losses of one process; and a run goes on in any other layout."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from convert_families import transformers
from finetune_models import WORDS, checkpoint, documents, metrics, small_run
from forked_ranks import Launcher
from safetensors.torch import load_file, save_file
from tiny_tokenizers import save_tokenizer

from fusible.models.training import load_run, read_manifest

_MIXTRAL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
_MIXTRAL |= {"vocab_size": WORDS, "max_position_embeddings": 64, "initializer_range": 0.1, "num_local_experts": 4, "tie_word_embeddings": False}
STEPS = 4
RUN = ("--steps", str(STEPS), "--micro-batch", "1", "--eval-every", "2")
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one": (1, []),
    "data": (2, []),
    "columns": (2, ["--tensor-parallel", "2"]),
    "columns and rows": (2, ["--tensor-parallel", "2", "--sequence-parallel"]),
    "shards": (2, ["--shard-parameters"]),
    "columns x data": (4, ["--tensor-parallel", "2"]),
    "columns x shards": (4, ["--tensor-parallel", "2", "--shard-parameters"]),
}
_ROWS = ["--tensor-parallel", "2", "--sequence-parallel"]
EXPERTS: dict[str, tuple[int, list[str]]] = {
    "experts": (2, ["--expert-parallel", "2"]),
    "experts x data": (4, ["--expert-parallel", "2"]),
    "columns and rows": (2, _ROWS),
    "experts x columns and rows": (4, ["--expert-parallel", "2", *_ROWS]),
}
LAUNCHER = Launcher()


@pytest.fixture(scope="module", autouse=True)
def launched() -> Iterator[None]:
    with LAUNCHER:
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint ``base`` and documents."""
    made = tmp_path_factory.mktemp("finetune")
    checkpoint(made / "base")
    documents(made / "documents.jsonl")
    return made


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of a mixture of experts."""
    made = tmp_path_factory.mktemp("mixture")
    torch.manual_seed(0)
    transformers.MixtralForCausalLM(transformers.MixtralConfig(**_MIXTRAL)).save_pretrained(made / "base")
    save_tokenizer(made / "base", vocabulary=WORDS)
    documents(made / "documents.jsonl")
    return made


def train(folder: Path, layout: tuple[int, list[str]], words: list[str]) -> str:
    """What the command says in that layout."""
    processes, options = layout
    ended = LAUNCHER.run(folder, [[*words[1:], *options]] * processes)
    said = "".join(text for _, *texts in ended for text in texts)
    assert not any(code for code, *_ in ended), said
    return said


def saved(out: Path) -> dict[str, torch.Tensor]:
    return load_run(out / "checkpoint", read_manifest(out / "checkpoint"))


def near(found: Path, wanted: Path, relative: float) -> None:
    one, other = metrics(found), metrics(wanted)
    assert len(one["loss"]) == len(other["loss"]) > 0
    torch.testing.assert_close(torch.tensor(one["loss"]), torch.tensor(other["loss"]), rtol=relative, atol=0)
    evaluations = [torch.tensor([each["loss"] for each in run["held_out_loss"]]) for run in (one, other)]
    torch.testing.assert_close(*evaluations, rtol=relative, atol=0)


@pytest.fixture(scope="module")
def alone(place: Path) -> Path:
    """The run of one process, in fp32."""
    train(place, LAYOUTS["one"], small_run(place, place / "alone", *RUN, "--recipe", "fp32"))
    return place / "alone"


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one"])
def test_a_layout_trains_what_one_process_does(layout: str, place: Path, alone: Path, tmp_path: Path) -> None:
    said = train(tmp_path, LAYOUTS[layout], small_run(place, tmp_path / "out", *RUN, "--recipe", "fp32"))
    assert said.count("steps: held-out loss") == 1
    near(tmp_path / "out", alone, 1e-5)
    found, wanted = saved(tmp_path / "out"), saved(alone)
    assert {name: (t.shape, t.dtype) for name, t in found.items()} == {name: (t.shape, t.dtype) for name, t in wanted.items()}
    of_model, of_alone = (load_file(out / "model" / "model.safetensors") for out in (tmp_path / "out", alone))
    assert of_model.keys() == of_alone.keys()
    for name, tensor in of_alone.items():
        assert (of_model[name] - tensor).norm() <= 1e-3 * tensor.norm(), name


@pytest.mark.parametrize("layout", EXPERTS)
def test_a_mixture_trains_what_one_process_does(layout: str, mixture: Path, tmp_path: Path) -> None:
    for out, of in ((tmp_path / "alone", LAYOUTS["one"]), (tmp_path / "out", EXPERTS[layout])):
        train(tmp_path, of, small_run(mixture, out, *RUN, "--recipe", "fp32"))
    near(tmp_path / "out", tmp_path / "alone", 1e-5)


@pytest.mark.parametrize("recipe", ["delayed", *(pytest.param(recipe, marks=pytest.mark.slow) for recipe in ("bf16", "current", "mxfp8"))])
@pytest.mark.parametrize("layout", ["columns and rows", "shards"])
def test_the_weights_of_16_bits_have_masters_in_each_layout(layout: str, recipe: str, place: Path, tmp_path: Path) -> None:
    for out, of in ((tmp_path / "alone", LAYOUTS["one"]), (tmp_path / "out", LAYOUTS[layout])):
        train(tmp_path, of, small_run(place, out, *RUN, "--recipe", recipe))
    near(tmp_path / "out", tmp_path / "alone", 2e-2)
    found, wanted = saved(tmp_path / "out"), saved(tmp_path / "alone")
    assert {name: (t.shape, t.dtype) for name, t in found.items()} == {name: (t.shape, t.dtype) for name, t in wanted.items()}
    assert any(name.endswith(".master_param") for name in found)


GO_ON = [("columns and rows", "shards"), ("shards", "one"), ("one", "columns x data")]
OTHERS = [(before, after) for before in LAYOUTS for after in LAYOUTS if before != after and (before, after) not in GO_ON]


@pytest.mark.parametrize(("before", "after"), [*GO_ON, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in OTHERS)])
def test_a_run_goes_on_in_any_layout(before: str, after: str, place: Path, alone: Path, tmp_path: Path) -> None:
    half = ("--steps", "2", "--micro-batch", "1", "--eval-every", "2")
    train(tmp_path, LAYOUTS[before], small_run(place, tmp_path / "out", *half, "--recipe", "fp32"))
    train(tmp_path, LAYOUTS[after], ["train", "--resume", str(tmp_path / "out"), "--steps", str(STEPS)])
    near(tmp_path / "out", alone, 1e-5)


@pytest.mark.parametrize("layout", ["data", "columns", "shards"])
def test_a_run_that_is_resumed_is_to_the_bit_the_run_at_once(layout: str, place: Path, tmp_path: Path) -> None:
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    words = "--micro-batch", "1", "--recipe", "delayed"
    train(tmp_path, LAYOUTS[layout], small_run(place, whole, "--steps", "4", *words))
    train(tmp_path, LAYOUTS[layout], small_run(place, parted, "--steps", "2", *words))
    train(tmp_path, LAYOUTS[layout], ["train", "--resume", str(parted), "--steps", "4"])
    assert metrics(whole)["loss"] == metrics(parted)["loss"]
    one, other = saved(whole), saved(parted)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_adapters_are_trained_on_several_processes(place: Path, tmp_path: Path) -> None:
    more = ("--lora", "2", "--base-format", "fp8", "--merge", "--recipe", "fp32")
    for out, of in ((tmp_path / "alone", LAYOUTS["one"]), (tmp_path / "out", LAYOUTS["data"])):
        train(tmp_path, of, small_run(place, out, *RUN, *more))
    near(tmp_path / "out", tmp_path / "alone", 1e-5)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(path.name for path in (tmp_path / "alone").iterdir())


BAD: dict[str, tuple[int, list[str], str]] = {
    "batch": (3, [], "--batch: expected a multiple of 3, the processes that share it, got 4"),
    "micro": (2, ["--micro-batch", "4"], "--micro-batch: expected a divisor of the 2 windows of each process, got 4"),
    "count": (2, ["--tensor-parallel", "4"], "the number of processes: expected the 2 that were started"),
    "context": (2, ["--context-parallel", "2"], "--context-parallel: expected no such option"),
    "stages": (2, ["--pipeline-parallel", "2"], "--pipeline-parallel: expected no such option"),
    "adapters": (2, ["--lora", "2", "--shard-parameters"], "--lora on several processes: expected --data-parallel alone, got --shard-parameters"),
    "device": (2, ["--device", "meta"], "--device on several processes: expected cpu"),
    "heads": (3, ["--tensor-parallel", "3"], "expected"),
    "experts": (2, ["--expert-parallel", "2"], "expected a MixtureOfExperts"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_shared_out_is_said_once_and_nothing_is_written(case: str, place: Path, tmp_path: Path) -> None:
    processes, more, sentence = BAD[case]
    ended = LAUNCHER.run(tmp_path, [[*small_run(place, tmp_path / "out", "--steps", "1")[1:], *more]] * processes)
    assert [code for code, *_ in ended] == [2] * processes
    errors = [err for _, _, err in ended if err]
    assert sentence in errors[0] and all(each.count("\n") == 1 for each in errors)
    assert not (tmp_path / "out").exists()


def test_processes_with_other_data_or_weights_are_refused(place: Path, tmp_path: Path) -> None:
    documents(tmp_path / "other.jsonl", 4)
    words = small_run(place, tmp_path / "out", "--steps", "1", "--overwrite")[1:]
    ended = LAUNCHER.run(tmp_path, [words, [*words, "--data", str(tmp_path / "other.jsonl")]])
    assert [code for code, *_ in ended] == [2, 2] and "rank 1: expected what rank 0 has, got another data" in ended[0][2]
    shutil.copytree(place / "base", tmp_path / "base")
    weights = load_file(tmp_path / "base" / "model.safetensors")
    weights["model.norm.weight"][3] += 0.5
    save_file(weights, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    ended = LAUNCHER.run(tmp_path, [words, [*words, "--model", str(tmp_path / "base")]])
    assert [code for code, *_ in ended] == [2, 2] and "rank 1: expected what rank 0 has, got another weights" in ended[0][2]
    assert not (tmp_path / "out").exists()


IN_A_STEP = """
import os, signal
from fusible.cli.finetuning.run import Run
advance = Run.advance

def struck(self):
    if self.ranks.rank == 1 and self.step == 1:
        {what}
    return advance(self)

Run.advance = struck
"""


def test_a_launcher_that_ends_one_process_has_all_save_and_stop(place: Path, alone: Path, tmp_path: Path) -> None:
    words = [*small_run(place, tmp_path / "out", *RUN, "--recipe", "fp32")[1:], *LAYOUTS["columns"][1]]
    ended = LAUNCHER.run(tmp_path, [words] * 2, code=IN_A_STEP.format(what="os.kill(os.getpid(), signal.SIGTERM)"))
    assert [code for code, *_ in ended] == [130, 130]
    assert ended[0][2].startswith("Interrupted and saved after step 2 of 4: go on with 'fusible train --resume ") and ended[1][2] == ""
    train(tmp_path, LAYOUTS["data"], ["train", "--resume", str(tmp_path / "out")])
    near(tmp_path / "out", alone, 1e-5)


def test_who_does_not_answer_is_named_by_the_others_and_the_save_before_is_whole(place: Path, tmp_path: Path) -> None:
    words = [*small_run(place, tmp_path / "out", *RUN, "--save-every", "1")[1:], *LAYOUTS["columns"][1]]
    (ended, _, said), (killed, *_) = LAUNCHER.run(tmp_path, [words] * 2, code=IN_A_STEP.format(what="os.kill(os.getpid(), signal.SIGKILL)"))
    assert (ended, killed) == (2, -signal.SIGKILL) and said.count("\n") == 1
    assert said.startswith("rank 0 at step 2: expected every process to answer, got nothing from rank 1, which was last at step 2 ("), said
    assert len(saved(tmp_path / "out")) > 10 and read_manifest(tmp_path / "out" / "checkpoint")["record"]["loss"]
