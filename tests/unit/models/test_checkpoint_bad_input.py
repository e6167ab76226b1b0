"""What is wrong with a directory is told in one sentence, and nothing else is ever raised."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from stored_checkpoints import CASES, Case, write

from fusible.errors import CheckpointError, DTypeError
from fusible.models.checkpoints import open_checkpoint

SHARD = "model-00001-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
Q = "model.layers.0.self_attn.q_proj.weight"

FORM = re.compile(r"[^\n]+: expected [^\n]+, got [^\n]+; [^\n]+\.")


def edited(folder: Path, name: str, change: Callable[[Any], Any]) -> None:
    """Rewrite a JSON file."""
    told = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(change(told)))


def reheaded(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite the header of a shard."""
    content = (folder / SHARD).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    (folder / SHARD).write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def first_entry(header: dict[str, Any]) -> dict[str, Any]:
    return next(entry for name, entry in header.items() if name != "__metadata__")


def placed(index: dict[str, Any], **names: str) -> dict[str, Any]:
    return {**index, "weight_map": {**index["weight_map"], **names}}


def shifted(header: dict[str, Any]) -> None:
    entry = first_entry(header)
    entry["data_offsets"] = [offset + 8 for offset in entry["data_offsets"]]


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no directory": (lambda at: shutil.rmtree(at), r"config.json: expected a file that can be read, got No such file"),
    "a file": (lambda at: (shutil.rmtree(at), at.write_text("x")), r"expected a directory with config.json"),
    "no config": (lambda at: (at / "config.json").unlink(), r"config.json: expected a file that can be read"),
    "config is no JSON": (lambda at: (at / "config.json").write_text("{"), r"config.json: expected JSON, got damaged text"),
    "config is a list": (lambda at: (at / "config.json").write_text("[]"), r"config.json: expected an object, got list"),
    "config is a folder": (lambda at: ((at / "config.json").unlink(), (at / "config.json").mkdir()), r"expected a regular file, got a directory"),
    "a text for an object": (lambda at: edited(at, "config.json", lambda told: {**told, "quantization_config": "fp8"}), r"expected an object"),
    "no weights": (lambda at: [path.unlink() for path in at.glob("model*")], r"expected model.safetensors or model.saf.*, got neither"),
    "index is no JSON": (lambda at: (at / INDEX).write_text("}"), r"index.json: expected JSON"),
    "index is empty": (lambda at: (at / INDEX).write_text("{}"), r"expected a weight_map of names to files, got None"),
    "index names a missing file": (
        lambda at: edited(at, INDEX, lambda told: placed(told, more="model-9.safetensors")), r"model-9.safetensors: expected a file that can be read"
    ),
    "index leaves the folder": (lambda at: edited(at, INDEX, lambda told: placed(told, more="../x")), r"expected the name of a file beside it"),
    "index names a number": (lambda at: edited(at, INDEX, lambda told: {**told, "weight_map": {"x": 3}}), r"expected the name of a file beside it"),
    "index names a missing tensor": (lambda at: edited(at, INDEX, lambda told: placed(told, more=SHARD)), r"expected the tensor more"),
    "a shard is missing": (lambda at: (at / SHARD).unlink(), r"expected a file that can be read"),
    "a shard is empty": (lambda at: (at / SHARD).write_bytes(b""), r"expected a file with content, got 0 bytes"),
    "a shard is short": (lambda at: (at / SHARD).write_bytes(b"1234567"), r"expected a header of safetensors and its tensors, got 7 bytes"),
    "a header too long": (lambda at: (at / SHARD).write_bytes(struct.pack("<Q", 2**63) + bytes(100)), r"got 108 bytes for a header of"),
    "a header without JSON": (lambda at: (at / SHARD).write_bytes(struct.pack("<Q", 100) + bytes(100)), r"the header of .*: expected JSON"),
    "a header of a list": (lambda at: (at / SHARD).write_bytes(struct.pack("<Q", 2) + b"[]"), r"expected a header that is an object, got list"),
    "bytes behind": (lambda at: (at / SHARD).write_bytes((at / SHARD).read_bytes() + b"more"), r"expected \d+ bytes, as its header says"),
    "an unknown dtype": (lambda at: reheaded(at, lambda header: first_entry(header).update(dtype="F128")), r"for the dtype of .*, got 'F128'"),
    "a dtype of another size": (lambda at: reheaded(at, lambda header: first_entry(header).update(dtype="F64")), r"expected \d+ bytes for"),
    "a negative shape": (lambda at: reheaded(at, lambda header: first_entry(header).update(shape=[-1, -1])), r"expected numbers of at least 0"),
    "a shape of fractions": (lambda at: reheaded(at, lambda header: first_entry(header).update(shape=[1.5])), r"expected numbers of at least 0"),
    "a shape of truth": (lambda at: reheaded(at, lambda header: first_entry(header).update(shape=[True])), r"expected numbers of at least 0"),
    "no offsets": (lambda at: reheaded(at, lambda header: first_entry(header).pop("data_offsets")), r"expected dtype, shape and data_offsets of"),
    "three offsets": (lambda at: reheaded(at, lambda header: first_entry(header).update(data_offsets=[0, 1, 2])), r"expected dtype, shape and"),
    "a text for an entry": (lambda at: reheaded(at, lambda header: header.update(more="x")), r"expected dtype, shape and data_offsets of more"),
    "offsets that overlap": (lambda at: reheaded(at, shifted), r"expected tensors one behind the other"),
    "metadata of numbers": (lambda at: reheaded(at, lambda header: header.update(__metadata__={"x": 1})), r"expected metadata of texts"),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(CASES["deepseek"](), tmp_path / "model", shards=2)


def sentence(folder: Path) -> str:
    with pytest.raises(CheckpointError) as found:
        open_checkpoint(folder)
    assert FORM.fullmatch(str(found.value)), str(found.value)
    return str(found.value)


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_told_in_a_sentence(name: str, folder: Path) -> None:
    open_checkpoint(folder)
    damage, wanted = DAMAGE[name]
    damage(folder)
    assert re.search(wanted, sentence(folder))


def test_a_shard_cut_anywhere_is_refused(folder: Path) -> None:
    content = (folder / SHARD).read_bytes()
    rng = random.Random(3)
    (length,) = struct.unpack("<Q", content[:8])
    cuts = [*range(0, 12), 8 + length - 1, 8 + length, len(content) - 1, *(rng.randrange(len(content)) for _ in range(60))]
    for cut in cuts:
        (folder / SHARD).write_bytes(content[:cut])
        assert SHARD in sentence(folder)


def test_a_header_altered_anywhere_is_refused_or_read(folder: Path) -> None:
    """What is altered to another name, or to another text of metadata, is a checkpoint still; nothing but a sentence comes of the rest."""
    content = (folder / SHARD).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    rng, refused = random.Random(5), 0
    for place in (*range(200), *range(200, 8 + length, 5)):
        changed = bytearray(content)
        changed[place] = rng.choice([changed[place] ^ 1, 0, 0xFF, ord("9"), ord('"')])
        (folder / SHARD).write_bytes(changed)
        try:
            checkpoint = open_checkpoint(folder)
            assert all(tuple(checkpoint[name].shape) == checkpoint.shape(name) for name in checkpoint)
        except CheckpointError as error:
            assert FORM.fullmatch(str(error)), str(error)
            refused += 1
    assert refused > length // 12


def with_config(case: Case, **changes: Any) -> Case:
    assert case.quantization_config is not None
    return replace(case, quantization_config={**case.quantization_config, **changes})


def without(case: Case, suffix: str) -> Case:
    return replace(case, stored={name: tensor for name, tensor in case.stored.items() if name != f"{Q}{suffix}"})


def with_more(case: Case) -> Case:
    return replace(case, stored={**case.stored, Q: torch.zeros(64, 96)})


def with_part(case: Case, suffix: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Case:
    return replace(case, stored={name: change(tensor) if name == f"{Q}{suffix}" else tensor for name, tensor in case.stored.items()})


WRONG: dict[str, tuple[Callable[[], Case], str]] = {
    "unknown method": (lambda: with_config(CASES["deepseek"](), quant_method="gptq"), r"quant_method of quantization_config: .*'gptq'"),
    "blocks of 64": (lambda: with_config(CASES["deepseek"](), weight_block_size=[64, 64]), r"weight_block_size .*got \[64, 64\]"),
    "unknown scale format": (lambda: with_config(CASES["deepseek"](), scale_fmt="e5m10"), r"scale_fmt .*'e5m10'"),
    "int4": (lambda: with_config(CASES["compressed, tensor"](), format="pack-quantized"), r"format of quantization_config.*'pack-quantized'"),
    "AWQ": (lambda: with_config(CASES["modelopt, nvfp4"](), quant_algo="NVFP4_AWQ"), r"quant_algo .*'NVFP4_AWQ'"),
    "zero points": (
        lambda: with_config(CASES["compressed, tensor"](), config_groups={"group_0": {"weights": {"symmetric": False}}}),
        r"symmetric of weights of quantization_config.* got False",
    ),
    "no scales": (lambda: without(CASES["compressed, nvfp4"](), "_scale"), r"expected what belongs to .*weight_"),
    "no weight": (lambda: without(CASES["deepseek"](), ""), r"expected what belongs to .*weight_scale_inv .*got none of them"),
    "no second scale": (lambda: without(CASES["modelopt, nvfp4"](), "_scale_2"), r"expected what belongs to"),
    "elements alone": (lambda: without(without(CASES["compressed, mxfp4"](), "_scale"), "_scale"), r"expected what belongs to .*weight_packed"),
    "a weight twice": (lambda: with_more(CASES["compressed, nvfp4"]()), r"expected a weight once, got both"),
    "scales of another shape": (
        lambda: with_part(CASES["deepseek"](), "_scale_inv", lambda x: x[:, :2].clone()), r"weight_scale_inv of torch.float32 \[2, 2\].*\[256, 384\]"
    ),
    "scales of another type": (lambda: with_part(CASES["deepseek"](), "_scale_inv", lambda x: x.double()), r"weight_scale_inv of torch.float64"),
    "rows that are no whole blocks": (
        lambda: with_part(with_part(CASES["compressed, mxfp8"](), "", lambda x: x[:40].clone()), "_scale", lambda x: x[:40].clone()),
        r"expected rows in multiples of 32, got \[40, 96\]",
    ),
}  # fmt: skip


def with_transform(case: Case, apply: Any) -> Case:
    return with_config(case, transform_config={"config_groups": {"R": {"type": "hadamard", "apply": apply}}})


def test_transforms_are_read_where_weights_have_them_in_them(tmp_path: Path) -> None:
    places = list(pytest.importorskip("compressed_tensors.transform").TransformLocation)
    assert len(places) > 3
    for place in places:
        case = with_transform(CASES["compressed, nvfp4"](), [{"location": "weight_output"}, {"location": place.value, "targets": ["Linear"]}])
        folder = write(case, tmp_path / place.value)
        if place.is_online():
            assert re.search(f"location of a transform .*weight_input, weight_output, got '{place.value}'", sentence(folder))
        else:
            assert open_checkpoint(folder).shape(Q) == (64, 96)


@pytest.mark.parametrize("apply", [None, 3, "input", [None], [3], [{}], {"location": "input"}])
def test_what_is_no_transform_is_told(apply: Any, tmp_path: Path) -> None:
    assert "location of a transform" in sentence(write(with_transform(CASES["compressed, tensor"](), apply), tmp_path / "model"))


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name]().quantization_config is not None])
@pytest.mark.parametrize("ending", ["pre_quant_scale", "weight_g_idx"])
def test_a_layer_that_does_more_than_multiply_by_its_weight_is_told(name: str, ending: str, tmp_path: Path) -> None:
    case, beside = CASES[name](), f"{Q.removesuffix('.weight')}.{ending}"
    folder = write(replace(case, stored={**case.stored, beside: torch.ones(96)}), tmp_path / "model")
    assert re.search(rf"by which layers multiply their input as it is, got {re.escape(beside)}; ", sentence(folder))


@pytest.mark.parametrize("name", WRONG)
def test_a_scheme_that_is_not_read_is_told(name: str, tmp_path: Path) -> None:
    make, wanted = WRONG[name]
    assert re.search(wanted, sentence(write(make(), tmp_path / "model")))


def test_a_file_that_is_another_by_now_is_not_read(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    replacement = folder / "new"
    save_file({"x": torch.zeros(3)}, replacement)
    os.replace(replacement, folder / SHARD)
    name = next(name for name in checkpoint.plain if checkpoint.plain[name].file == SHARD)
    with pytest.raises(CheckpointError, match="as when it was opened"):
        checkpoint.tensor(name)


def test_a_name_that_is_not_there_is_a_key_error(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    for name in ("none", f"{Q}_scale_inv"):
        assert name not in checkpoint
        with pytest.raises(KeyError):
            checkpoint[name]


def test_a_number_is_no_directory() -> None:
    with pytest.raises(DTypeError, match="expected a file's path"):
        open_checkpoint(3)  # type: ignore[arg-type]
