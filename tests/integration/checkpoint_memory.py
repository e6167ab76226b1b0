"""What loading a sharded checkpoint takes, as a program: ``checkpoint_memory.py FOLDER BYTES`` writes one, and prints JSON: of each way to load it
the seconds, the peak of memory over its size, and beside them what reading the files takes. Each is measured in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fusible.machine import peak_memory
from fusible.models.checkpoints import open_checkpoint, quantize_checkpoint, write_checkpoint

SHAPE = (1024, 4096)


def make(folder: Path, nbytes: int) -> None:
    """Weights of bf16 in eight files. The elements are few different ones: it is not the arithmetic that is measured."""
    count = nbytes // (2 * SHAPE[0] * SHAPE[1])
    weight = torch.randn(SHAPE).to(torch.bfloat16)
    pairs = ((f"model.layers.{place // 4}.mlp.part{place % 4}_proj.weight", weight) for place in range(count))
    write_checkpoint(folder, {"model_type": "llama"}, pairs, shard_size=nbytes // 8, count=count)


def read(folder: Path) -> int:
    """Read every file into a buffer."""
    buffer = bytearray(1 << 24)
    for path in folder.glob("*.safetensors"):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return 0


def mapped(folder: Path) -> int:
    """Open it and look at every page of every tensor, all of which are held."""
    checkpoint = open_checkpoint(folder)
    tensors = dict(checkpoint)
    return sum(int(tensor.view(torch.uint8).view(-1)[::4096].sum()) for tensor in tensors.values())


def copied(folder: Path) -> int:
    """Open it and copy every tensor, as into a model's parameters."""
    return len({name: tensor.clone() for name, tensor in open_checkpoint(folder).items()})


def quantized(folder: Path) -> int:
    """Quantize it, one tensor after the other."""
    return quantize_checkpoint(folder, folder.with_name("quantized"), "fp8", shard_size=open_checkpoint(folder).nbytes // 8).weights


WAYS: dict[str, Callable[[Path], int]] = {way.__name__: way for way in (read, mapped, copied, quantized)}


def measured(way: str, folder: Path) -> dict[str, float]:
    torch.zeros(1).clone()
    before, start = peak_memory(), time.perf_counter()
    WAYS[way](folder)
    seconds = time.perf_counter() - start
    return {"seconds": round(seconds, 3), "peak over size": round((peak_memory() - before) / open_checkpoint(folder).nbytes, 4)}


def main(root: Path, nbytes: int) -> dict[str, dict[str, float]]:
    """Make the checkpoint and measure; what was made is removed."""
    folder = root / "model"
    try:
        make(folder, nbytes)
        found = {}
        for way in WAYS:
            command = [sys.executable, __file__, str(folder), "0", way]
            done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            found[way] = json.loads(done.stdout)
        return found
    finally:
        for name in ("model", "quantized"):
            shutil.rmtree(root / name, ignore_errors=True)


if __name__ == "__main__":
    place, size, *asked = sys.argv[1:]
    print(json.dumps(measured(asked[0], Path(place)) if asked else main(Path(place), int(float(size)))))
