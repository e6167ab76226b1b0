"""What is written appears whole or not at all, in files that safetensors and torch read, however the tensors come."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from stored_checkpoints import CASES, write

from fusible.errors import ArgumentError, CheckpointError, FileError, FusibleError
from fusible.machine import peak_memory, reset_peak_memory
from fusible.models.checkpoints import open_checkpoint, write_checkpoint
from fusible.models.checkpoints.writing import other_files
from fusible.quantized import Float8BlockQuantizer, Float8CurrentScalingQuantizer, MXFP8Quantizer, NVFP4Quantizer, QuantizedTensor
from fusible.tex import DType

CONFIG: dict[str, Any] = {"model_type": "llama"}
E4M3 = DType.kFloat8E4M3


def some(count: int = 7) -> dict[str, torch.Tensor]:
    """Of odd sizes, so that none would be aligned by itself, and of every kind."""
    torch.manual_seed(1)
    dtypes = (torch.uint8, torch.float32, torch.bfloat16, torch.bool, torch.float64, torch.int64, torch.float8_e4m3fn)
    return {f"t{place}": torch.randn(3 + place, 5).mul(9).to(dtypes[place % len(dtypes)]) for place in range(count)}


@pytest.mark.parametrize("shard_size", [1, 100, 500, 10**9])
def test_files_are_read_by_safetensors(shard_size: int, tmp_path: Path) -> None:
    tensors = {**some(20), "empty": torch.empty(0, 4), "number": torch.tensor(2.5), "strided": torch.arange(12.0).view(3, 4).t()}
    write_checkpoint(tmp_path / "model", CONFIG, tensors.items(), shard_size=shard_size)
    files = sorted((tmp_path / "model").glob("*.safetensors"))
    found: dict[str, torch.Tensor] = {}
    for path in files:
        with safe_open(path, "pt") as file:
            part = {name: file.get_tensor(name) for name in file.keys()}
        assert len(part) == 1 or sum(tensor.nbytes for tensor in part.values()) <= shard_size
        found |= part
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype is tensor.dtype and torch.equal(found[name], tensor)
    assert json.loads((tmp_path / "model" / "config.json").read_text()) == CONFIG
    checkpoint = open_checkpoint(tmp_path / "model")
    assert all(torch.equal(checkpoint[name], tensor) for name, tensor in tensors.items())
    if len(files) > 1:
        index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == set(tensors) and index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    else:
        assert [path.name for path in files] == ["model.safetensors"]


def test_a_header_that_needs_more_room_goes_to_the_next_file(tmp_path: Path) -> None:
    names = {f"{place}." + "x" * 30_000: torch.tensor([place]) for place in range(5)}
    write_checkpoint(tmp_path / "model", CONFIG, names)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    assert {name: int(tensor) for name, tensor in open_checkpoint(tmp_path / "model").items()} == {name: int(x) for name, x in names.items()}


def quantized(x: torch.Tensor) -> Iterator[tuple[str, QuantizedTensor]]:
    """Of every format, with both copies, and with options."""
    yield "current", Float8CurrentScalingQuantizer(E4M3)(x)
    yield "e5m2", Float8CurrentScalingQuantizer(DType.kFloat8E5M2, columnwise=False)(x)
    yield "rows", Float8BlockQuantizer(E4M3, block_scaling_dim=1)(x)
    yield "tiles", Float8BlockQuantizer(E4M3)(x)
    yield "mxfp8", MXFP8Quantizer(E4M3)(x)
    yield "nvfp4", NVFP4Quantizer(with_2d_quantization=True)(x)
    yield "row_scaled", NVFP4Quantizer(row_scaled_nvfp4=True, columnwise=False)(x)


def test_own_checkpoints_hold_everything(tmp_path: Path) -> None:
    torch.manual_seed(2)
    config = {**CONFIG, "quantization_config": {"quant_method": "fusible", "modules_to_not_convert": ["lm_head"]}}
    tensors = {**dict(quantized(torch.randn(128, 256))), "plain": torch.randn(3)}
    write_checkpoint(tmp_path / "model", config, tensors, shard_size=100_000)
    checkpoint = open_checkpoint(tmp_path / "model")
    assert set(checkpoint.names) == set(tensors) and checkpoint.quantization is not None
    for name, tensor in tensors.items():
        found = checkpoint[name]
        if name == "plain":
            assert torch.equal(found, tensor)
            continue
        assert type(found) is type(tensor) and checkpoint.shape(name) == (128, 256)
        mine, theirs = tensor.get_metadata(), found.get_metadata()
        for part in tensor._TENSORS:
            one, other = mine[part], theirs[part]
            assert (one is None and other is None) or (one.dtype is other.dtype and torch.equal(one, other)), part
        assert mine["quantizer"].quantizes_like(theirs["quantizer"])
    write_checkpoint(tmp_path / "again", checkpoint.config, checkpoint, shard_size=100_000)
    for path in sorted((tmp_path / "model").iterdir()):
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


REFUSED: dict[str, tuple[dict[str, Any], Any, type[FusibleError], str]] = {
    "a list": (CONFIG, {"x": [1.0]}, ArgumentError, "x of write_checkpoint: expected a tensor, got list"),
    "a complex tensor": (CONFIG, {"x": torch.zeros(2, dtype=torch.complex128)}, ArgumentError, "the dtype of x: expected one of .*complex128"),
    "a name twice": (CONFIG, [("x", torch.zeros(2)), ("x", torch.zeros(2))], ArgumentError, "expected every name once, got x twice"),
    "no scheme": (CONFIG, {"x": Float8CurrentScalingQuantizer(E4M3)(torch.ones(2, 2))}, CheckpointError, "x: expected a tensor of a format that"),
    "another scheme": (
        {"quantization_config": {"quant_method": "mxfp4"}}, {"x": MXFP8Quantizer(E4M3)(torch.ones(32, 32))}, CheckpointError, "x: expected a tensor"
    ),
    "an unknown scheme": ({"quantization_config": {"quant_method": "x"}}, {}, CheckpointError, "expected one of .*, got 'x'"),
    "scales that E8M0 has not": (
        {"quantization_config": {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}},
        {"x": Float8BlockQuantizer(E4M3, force_pow_2_scales=False)(torch.full((128, 128), 3.0))}, CheckpointError, "scales that .* has exactly"
    ),
    "a size of 0": (CONFIG, {}, ArgumentError, "shard_size"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_written_leaves_nothing(name: str, tmp_path: Path) -> None:
    config, tensors, kind, wanted = REFUSED[name]
    before = [("first", torch.zeros(1000))]
    pairs = before + list(tensors.items() if isinstance(tensors, dict) else tensors)
    with pytest.raises(kind, match=wanted):
        write_checkpoint(tmp_path / "model", config, pairs, shard_size=0 if name == "a size of 0" else 100)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="expected at least one tensor, got none"):
        write_checkpoint(tmp_path / "model", CONFIG, {})
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        yield from some().items()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path / "deep" / "model", CONFIG, pairs(), shard_size=100)
    assert list((tmp_path / "deep").iterdir()) == []


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        with pytest.raises(FileError, match="expected room and permission to write, got File too large; make room there"):
            write_checkpoint(tmp_path / "model", CONFIG, {"x": torch.zeros(10_000), "y": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write_checkpoint(tmp_path / "empty", CONFIG, some())
    before = {path: path.read_bytes() for path in (tmp_path / "empty").iterdir()}
    (tmp_path / "file").write_text("x")
    for place, got in (("empty", "a folder with files in it"), ("file", "a file")):
        with pytest.raises(FileError, match=f"expected a new folder, got {got}"):
            write_checkpoint(tmp_path / place, CONFIG, some(3))
    with pytest.raises(FileError):
        write_checkpoint(tmp_path / "file" / "model", CONFIG, some(3))
    assert before == {path: path.read_bytes() for path in (tmp_path / "empty").iterdir()}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file"]


def test_what_a_killed_process_left_is_swept_and_what_another_writes_is_not(tmp_path: Path) -> None:
    left = tmp_path / ".model.999999999.saving"
    left.mkdir()
    (left / "00000.part").write_bytes(b"half")

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        assert not left.exists()
        yield "x", torch.zeros(2)
        with pytest.raises(FileError):  # while this one is being written, by the same process
            write_checkpoint(tmp_path / "model", CONFIG, some(1))

    write_checkpoint(tmp_path / "model", CONFIG, pairs())
    assert [path.name for path in tmp_path.iterdir()] == ["model"] and set(open_checkpoint(tmp_path / "model")) == {"x"}


def test_a_config_may_have_infinities(tmp_path: Path) -> None:
    """As those of Mamba-2 have: ``"time_step_limit": [0.0, Infinity]``."""
    config = {**CONFIG, "time_step_limit": [0.0, float("inf")]}
    write_checkpoint(tmp_path / "model", config, some(1))
    assert "Infinity" in (tmp_path / "model" / "config.json").read_text()
    assert open_checkpoint(tmp_path / "model").config == config


def test_other_files_are_copied(tmp_path: Path) -> None:
    folder = write(CASES["plain"](), tmp_path / "model", shards=2)
    for name in ("tokenizer.json", "chat_template.jinja", "pytorch_model.bin", "model.gguf", ".hidden", "vocab.txt"):
        (folder / name).write_bytes(name.encode())
    (folder / "original").mkdir()
    checkpoint = open_checkpoint(folder)
    assert list(other_files(folder)) == ["chat_template.jinja", "tokenizer.json", "vocab.txt"]
    write_checkpoint(tmp_path / "again", checkpoint.config, checkpoint, files=other_files(folder))
    found = {path.name for path in (tmp_path / "again").iterdir()}
    assert found == {"config.json", "model.safetensors", "chat_template.jinja", "tokenizer.json", "vocab.txt"}
    assert (tmp_path / "again" / "vocab.txt").read_bytes() == b"vocab.txt"


def test_tensors_are_held_one_at_a_time(tmp_path: Path) -> None:
    """200 MB in all, of which a process whose memory is counted from here on holds a few: the allocator keeps some of what was freed."""
    size = 10_000_000

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        for place in range(20):
            yield f"t{place}", torch.full((size // 4,), float(place))

    write_checkpoint(tmp_path / "warm", CONFIG, {"x": torch.zeros(size // 4)})
    reset_peak_memory()
    before = peak_memory()
    write_checkpoint(tmp_path / "model", CONFIG, pairs())
    assert peak_memory() - before < 10 * size
