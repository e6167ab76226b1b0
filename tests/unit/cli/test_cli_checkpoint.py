"""Checkpoints: what was saved comes back, and nothing else is taken for one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from fusible.cli.training.checkpoint import Checkpoint, _seal, load_checkpoint, save_checkpoint
from fusible.cli.training.options import TrainOptions
from fusible.cli.training.shards import fingerprint_of
from fusible.cli.training.text import Text, read_text
from fusible.cli.training.trainer import Trainer
from fusible.errors import CheckpointError

OPTIONS = TrainOptions(recipes=("delayed",), steps=4, layers=1, hidden=8, heads=2, seq_len=8, batch=2)


@pytest.fixture(scope="module")
def text() -> Text:
    return read_text(None, OPTIONS.seq_len)


@pytest.fixture(scope="module")
def saved(text: Text, tmp_path_factory) -> Path:
    trainer = Trainer(OPTIONS, "delayed", text)
    trainer.step()
    trainer.step()
    folder = tmp_path_factory.mktemp("saved")
    save_checkpoint(folder, trainer.checkpoint())
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def test_all_of_a_run_comes_back(folder: Path, text: Text) -> None:
    first = load_checkpoint(folder)
    second = Trainer.resumed(first, OPTIONS, text).checkpoint()
    assert (second.options, second.recipe, second.text, second.record) == (first.options, first.recipe, first.text, first.record)
    for name in ("model", "state"):
        one, two = getattr(first, name), getattr(second, name)
        assert set(one) == set(two) and all(torch.equal(one[key], two[key]) for key in one)
    assert "body.scaling_state.0" in first.model and first.record.step == 2


def test_a_run_of_no_steps_comes_back(tmp_path, text: Text) -> None:
    save_checkpoint(tmp_path, Trainer(OPTIONS, "delayed", text).checkpoint())
    trainer = Trainer.resumed(load_checkpoint(tmp_path), OPTIONS, text)
    fresh = Trainer(OPTIONS, "delayed", text)
    assert [trainer.step() for _ in range(2)] == [fresh.step() for _ in range(2)]


def test_weights_are_a_plain_safetensors_file_that_names_its_model(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    assert weights["embedding.weight"].shape == (256, 8) and weights["embedding.weight"].dtype == torch.float32
    header = (folder / "model.safetensors").read_bytes()
    assert b'"__metadata__"' in header[:200] and b"ByteGPT" in header[:400]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"0")


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("name", ["model.safetensors", "state.safetensors", "state.json"])
@pytest.mark.parametrize("damage", [Path.unlink, cut, flip, empty, lengthen, make_folder], ids=lambda function: function.__name__)
def test_a_damaged_file_is_refused(folder: Path, name: str, damage: Callable[[Path], None]) -> None:
    damage(folder / name)
    with pytest.raises(CheckpointError, match=r"^.*: expected [^.]*.*, got .*; .*\.$") as error:
        load_checkpoint(folder)
    assert name in str(error.value) and "\n" not in str(error.value)


def test_files_of_two_saves_are_no_checkpoint(folder: Path, text: Text, tmp_path) -> None:
    trainer = Trainer.resumed(load_checkpoint(folder), OPTIONS, text)
    trainer.step()
    save_checkpoint(tmp_path / "later", trainer.checkpoint())
    shutil.copy(tmp_path / "later" / "model.safetensors", folder)
    with pytest.raises(CheckpointError, match="model.safetensors: expected .*, got an altered one"):
        load_checkpoint(folder)


def reseal(folder: Path, **changes: object) -> None:
    manifest = {**json.loads((folder / "state.json").read_text()), **changes}
    manifest.pop("sha256")
    (folder / "state.json").write_text(json.dumps({**manifest, "sha256": _seal(manifest)}))


@pytest.mark.parametrize(
    "changes",
    [{"format": "other"}, {"version": 2}, {"recipe": "fp8"}, {"recipe": 3}, {"options": {}}, {"record": {}}, {"files": {}}, {"text": None}],
    ids=str,
)
def test_a_sealed_manifest_of_something_else_is_refused(folder: Path, changes: dict) -> None:
    reseal(folder, **changes)
    with pytest.raises(CheckpointError):
        load_checkpoint(folder)


Shard = tuple[dict[str, torch.Tensor], dict[str, dict[str, list[int]]]]
"""The tensors of a file, and where they begin in whole ones."""


def shards_of(tensors: dict[str, torch.Tensor]) -> list[Shard]:
    """The first file has the first row of each tensor, or a number; the second the others."""
    shards: list[Shard] = [({}, {}), ({}, {})]
    for name, tensor in tensors.items():
        for (held, places), first, part in zip(shards, (0, 1), (tensor[:1], tensor[1:]) if tensor.ndim else (tensor,), strict=False):
            if part.numel():
                held[name], places[name] = part.contiguous(), {"saved_offsets": [first, *[0] * (tensor.ndim - 1)] if tensor.ndim else []}
    return shards


def write_shards(folder: Path, shards: list[Shard]) -> None:
    """In the place of ``model.safetensors``, with right digests."""
    files = {"state.safetensors": json.loads((folder / "state.json").read_text())["files"]["state.safetensors"]}
    (folder / "model.safetensors").unlink()
    for number, (held, places) in enumerate(shards, 1):
        name = f"shard-{number:05d}-model-00001-of-00001.safetensors"
        (folder / name).write_bytes(content := save(held, {"DCP_SHARDING_INFO": json.dumps(places)}))
        files[name] = fingerprint_of(content)
    reseal(folder, files=files)


def test_shards_of_several_processes_are_put_together(folder: Path) -> None:
    wanted = load_checkpoint(folder)
    write_shards(folder, shards_of(dict(wanted.model)))
    found = load_checkpoint(folder)
    for name in ("model", "state"):
        assert set(getattr(found, name)) == set(getattr(wanted, name))
        assert all(torch.equal(tensor, getattr(wanted, name)[key]) for key, tensor in getattr(found, name).items())


def no_places(shards: list[Shard]) -> None:
    shards[1][1].clear()


def another_dtype(shards: list[Shard]) -> None:
    shards[1][0]["embedding.weight"] = shards[1][0]["embedding.weight"].double()


def before_the_beginning(shards: list[Shard]) -> None:
    shards[1][1]["embedding.weight"]["saved_offsets"][0] = -1


def far_away(shards: list[Shard]) -> None:
    shards[1][1]["embedding.weight"]["saved_offsets"][0] = 2**40


def of_another_dimension(shards: list[Shard]) -> None:
    shards[1][1]["embedding.weight"]["saved_offsets"].append(0)


def missing(shards: list[Shard]) -> None:
    del shards[0][0]["embedding.weight"], shards[0][1]["embedding.weight"]


def flat(shards: list[Shard]) -> None:
    shards[1][0]["embedding.weight"] = shards[1][0]["embedding.weight"].flatten()
    shards[1][1]["embedding.weight"] = {"saved_offsets": [8]}


@pytest.mark.parametrize(
    "damage", [no_places, another_dtype, before_the_beginning, far_away, of_another_dimension, missing, flat], ids=lambda function: function.__name__
)
def test_shards_that_do_not_make_whole_tensors_are_refused(folder: Path, damage: Callable[[list[Shard]], None]) -> None:
    shards = shards_of(dict(load_checkpoint(folder).model))
    damage(shards)
    write_shards(folder, shards)
    with pytest.raises(
        CheckpointError, match=r"^.*: expected (a place for each tensor|pieces of one tensor|all of it), got .*; use an intact checkpoint"
    ):
        load_checkpoint(folder)


@pytest.mark.parametrize("name", ["../shard-00001-model-00001-of-00001.safetensors", "model.safetensors.bak", "shard-1.safetensors"])
def test_files_of_other_names_are_none_of_a_checkpoint(folder: Path, name: str) -> None:
    files = json.loads((folder / "state.json").read_text())["files"]
    reseal(folder, files={"state.safetensors": files["state.safetensors"], name: files["model.safetensors"]})
    with pytest.raises(CheckpointError, match="another files"):
        load_checkpoint(folder)


def test_a_save_that_fails_leaves_the_former_checkpoint(folder: Path, text: Text, monkeypatch) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    trainer = Trainer.resumed(load_checkpoint(folder), OPTIONS, text)
    trainer.step()

    def failing(path: Path, content: bytes) -> None:
        path.write_bytes(content[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fusible.files.writing._write", failing)
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(folder, trainer.checkpoint())
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert load_checkpoint(folder).record.step == 2


def alter(checkpoint: Checkpoint, **tensors: torch.Tensor | None) -> Checkpoint:
    """The checkpoint with other tensors by name (None: without it)."""
    parts = {}
    for name in ("model", "state"):
        changed = {key: tensors.get(key, tensor) for key, tensor in getattr(checkpoint, name).items()}
        parts[name] = {key: tensor for key, tensor in changed.items() if tensor is not None}
    return replace(checkpoint, **parts)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("embedding.weight", None),
        ("embedding.weight", torch.zeros(256, 9)),
        ("embedding.weight", torch.zeros(256, 8, dtype=torch.bfloat16)),
        ("embedding.weight.exp_avg", None),
        ("embedding.weight.exp_avg", torch.zeros(8, 256)),
        ("embedding.weight.step", torch.zeros(1)),
        ("torch_rng_state", torch.zeros(3, dtype=torch.uint8)),
        ("body.scaling_state.0", None),
        ("body.scaling_state.0", torch.zeros(40, dtype=torch.uint8)),
    ],
    ids=lambda value: value if isinstance(value, str) else "none" if value is None else f"{value.dtype}{list(value.shape)}",
)
def test_tensors_that_do_not_fit_are_refused_before_anything_is_changed(saved: Path, text: Text, name: str, tensor: torch.Tensor | None) -> None:
    altered = alter(load_checkpoint(saved), **{name: tensor})
    with pytest.raises(CheckpointError, match=r"^.*: expected .*\.$"):
        Trainer.resumed(altered, OPTIONS, text)


def test_a_tensor_too_many_is_refused(saved: Path, text: Text) -> None:
    checkpoint = load_checkpoint(saved)
    with pytest.raises(CheckpointError, match="the model in a checkpoint: expected .* tensors, got also extra; use an intact checkpoint."):
        Trainer.resumed(replace(checkpoint, model={**checkpoint.model, "extra": torch.zeros(1)}), OPTIONS, text)


def test_another_text_is_refused(saved: Path, tmp_path) -> None:
    (tmp_path / "text").write_bytes(bytes(1000))
    other = read_text(str(tmp_path / "text"), 8)
    with pytest.raises(CheckpointError, match=r"expected the text of \d+ bytes .*, got another of 1000 bytes .*; give the same with --text."):
        Trainer.resumed(load_checkpoint(saved), OPTIONS, other)


def test_nothing_is_pickled(saved: Path) -> None:
    for path in saved.iterdir():
        assert b"\x80\x02" not in path.read_bytes()[:2] and not path.read_bytes().startswith(b"PK")
