"""Files that were corrupted: each is refused by a ``CheckpointError`` and nothing has changed, or what it says is what was saved, to the bit.

A corruption is made of a seed. Some are of bytes; others, where the format has a digest, are of what the digest vouches for, which is then made anew:
what a program of another version, or of bad intent, writes. What has no digest (tensors in a safetensors file of the user's own, a state dict) is
corrupted in its structure: of a value that is another one nobody can tell.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import random
import shutil
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from safetensors import safe_open
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

import fusible
from fusible import lazy
from fusible.cli.training.checkpoint import _seal, save_checkpoint
from fusible.cli.training.layout import load_runs
from fusible.cli.training.options import TrainOptions
from fusible.cli.training.shards import fingerprint_of
from fusible.cli.training.text import read_text
from fusible.cli.training.trainer import Trainer
from fusible.errors import CheckpointError
from fusible.files import parse_json, read_file
from fusible.lazy.engine.engines import current_engine
from fusible.lazy.evaluation import binary_cache
from fusible.pytorch import DelayedScaling, autocast
from fusible.quantized import Float8CurrentScalingQuantizer
from fusible.quantized.saving import flatten_state_dict, unflatten_state_dict
from fusible.tex import DType

OPTIONS = TrainOptions(recipes=("delayed",), steps=4, layers=1, hidden=8, heads=2, seq_len=8, batch=2)
TEXT = read_text(None, OPTIONS.seq_len)
X = np.arange(6, dtype=np.float32).reshape(2, 3)
OTHER_KINDS: tuple[Any, ...] = (None, "x", [], {}, True, 7, 1.5, [[[]]])


def compiled(factor: float) -> lazy.Executable:
    constant = lazy.Tensor(np.array([factor, 2.0, 3.0], np.float32))
    rows = lazy.NamedDimension("rows", 1, 2, 8)
    return lazy.compile(lambda x: [x * constant, lazy.softmax(x, 1)], args=[lazy.InputInfo((rows, 3), lazy.float32)])


def trained(seed: int) -> Trainer:
    trainer = Trainer(TrainOptions(**{**vars(OPTIONS), "seed": seed}), "delayed", TEXT)
    trainer.step()
    return trainer


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``one`` and ``two``: files of every kind, of two contents."""
    root = tmp_path_factory.mktemp("saved")
    for seed, name in enumerate(("one", "two")):
        folder = root / name
        save_checkpoint(folder / "run", trained(seed).checkpoint())
        executable = compiled(seed + 1.0)
        executable.save(folder / "program")
        executable.save(folder / "binary", binary=True)
        cached(folder, seed)
        tensors, metadata = flatten_state_dict(quantized(seed))
        (folder / "weights").write_bytes(save_tensors(tensors, metadata))
        torch.save(scaled(seed).state_dict(), folder / "state")
    return root


def cached(folder: Path, seed: int = 0) -> Any:
    """What a program from the binary cache in ``folder`` gives."""
    module = lazy.compile(lambda x: x * (seed + 1.0), args=[lazy.InputInfo((2, 3), lazy.float32)]).stablehlo
    types = [((2, 3), lazy.float32)]
    program = binary_cache.load_or_compile(str(folder / "cache"), current_engine(), module, types, types, 1)
    return [np.array(out) for out in program.run([program.put(0, X)])]


def quantized(seed: int) -> dict[str, Any]:
    quantizer = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, device=torch.device("cpu"))
    weight = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed))
    return {"weight": quantizer(weight), "bias": torch.full((16,), float(seed))}


def scaled(seed: int) -> Any:
    torch.manual_seed(seed)
    model = fusible.Sequential(fusible.pytorch.Linear(16, 16))
    with autocast(recipe=DelayedScaling(amax_history_len=4)):
        model(torch.randn(16, 16)).sum().backward()
    return model


def flat(of: Any) -> Any:
    """A value that ``==`` compares: tensors and arrays as their bytes."""
    if isinstance(of, dict):
        return {key: flat(part) for key, part in of.items()}
    if isinstance(of, (list, tuple)):
        return [flat(part) for part in of]
    if hasattr(of, "dequantize") and type(of) is not torch.Tensor:
        return flat(of.dequantize())
    if isinstance(of, torch.Tensor):
        return str(of.dtype), list(of.shape), of.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if of.numel() else b""
    return (of.dtype.name, of.shape, of.tobytes()) if isinstance(of, np.ndarray) else of


def read_run(folder: Path) -> Any:
    checkpoint = load_runs(folder / "run")[1]["delayed"]
    again = Trainer.resumed(checkpoint, checkpoint.options, TEXT).checkpoint()
    return flat([vars(again.options), again.recipe, vars(checkpoint.record), checkpoint.text, dict(again.model), dict(again.state)])


def read_program(name: str) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        executable = lazy.Executable.load(folder / name, trust_binary=name == "binary")
        return [repr(executable), repr(executable.input_infos), flat([out.numpy() for out in executable(X)])]

    return read


def read_weights(folder: Path) -> Any:
    """The file itself is read by safetensors, whose errors are its own."""
    try:
        tensors = load_tensors(read_file(folder / "weights"))
        with safe_open(folder / "weights", "pt") as file:
            metadata = file.metadata()
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"weights: {error}") from None
    return flat(unflatten_state_dict(tensors, metadata))


def read_state(folder: Path) -> Any:
    with torch.random.fork_rng():
        model = fusible.Sequential(fusible.pytorch.Linear(16, 16))
    try:
        model.load_state_dict(torch.load(folder / "state", weights_only=True))
    except RuntimeError as error:  # torch's own, of names and shapes
        if type(error) is RuntimeError:
            raise CheckpointError(f"state: {error}") from None
        raise
    return flat(model.state_dict())


READERS: dict[str, Callable[[Path], Any]] = {
    "run": read_run,
    "program": read_program("program"),
    "binary": read_program("binary"),
    "cache": lambda folder: flat(cached(folder)),
    "weights": read_weights,
    "state": read_state,
}


def file_of(folder: Path, kind: str, rng: random.Random) -> Path:
    path = folder / kind
    return rng.choice(sorted(path.iterdir())) if path.is_dir() else path


# Corruptions: each takes the folder to corrupt, the other one, and a generator, and returns what it did.


def flip(path: Path, rng: random.Random) -> str:
    content = bytearray(path.read_bytes())
    at = rng.randrange(len(content))
    content[at] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    return f"a bit of byte {at}"


def truncate(path: Path, rng: random.Random) -> str:
    content = path.read_bytes()
    kept = rng.randrange(len(content))
    path.write_bytes(content[:kept])
    return f"{kept} of {len(content)} bytes"


def lengthen(path: Path, rng: random.Random) -> str:
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.randrange(1, 100)))
    return "more bytes"


def blank(path: Path, rng: random.Random) -> str:
    content = bytearray(path.read_bytes())
    at = rng.randrange(len(content))
    content[at : at + 512] = bytes(len(content[at : at + 512]))
    path.write_bytes(content)
    return f"zeros from byte {at}"


def remove(path: Path, rng: random.Random) -> str:
    path.unlink()
    return "no file"


BYTES = (flip, flip, truncate, lengthen, blank, remove)


def in_bytes(kind: str) -> Callable[[Path, Path, random.Random], str]:
    def corrupt(folder: Path, other: Path, rng: random.Random) -> str:
        path = file_of(folder, kind, rng)
        if kind == "run" and rng.random() < 0.3:
            source = rng.choice([other / kind / path.name, *[near for near in path.parent.iterdir() if near != path]])
            shutil.copy(source, path)
            return f"{path.name}: {source.parent.parent.name}/{source.name} in its place"
        return f"{path.name}: {rng.choice(BYTES)(path, rng)}"

    return corrupt


def leaves(of: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything within a value of JSON, and of the value."""
    parts = of.items() if isinstance(of, dict) else enumerate(of) if isinstance(of, list) else ()
    return [path, *[leaf for key, part in parts for leaf in leaves(part, (*path, key))]]


def other_kind(of: Any, rng: random.Random) -> Any:
    """A value of another kind of JSON's. An integer is no other kind than a number with a fraction."""
    number = lambda x: type(x) in (int, float)  # noqa: E731
    return rng.choice([x for x in OTHER_KINDS if type(x) is not type(of) and not (number(x) and number(of))])


def in_json(manifest: Any, rng: random.Random, free: Callable[[tuple[Any, ...]], bool]) -> str:
    """Change a manifest in place: a value of another kind, an entry missing or too many. ``free`` are entries that may be anything."""
    paths = [path for path in leaves(manifest) if path and not free(path)]
    *place, key = path = rng.choice(paths)
    holder = manifest
    for step in place:
        holder = holder[step]
    what = rng.choice(["kind", "kind", "missing", "extra"])
    if what == "kind":
        holder[key] = other_kind(holder[key], rng)
    elif isinstance(holder, list):
        holder.pop(key) if what == "missing" else holder.insert(key, {"extra": 1})
    elif what == "missing":
        del holder[key]
    else:
        holder["extra"] = rng.choice([1, "x", None])
    return f"{'.'.join(map(str, path))}: {what}"


def in_manifest(folder: Path, other: Path, rng: random.Random) -> str:
    """Of a run: ``state.json`` with a right seal."""
    path = folder / "run" / "state.json"
    manifest = json.loads(path.read_text())
    del manifest["sha256"]
    if rng.random() < 0.15:
        manifest[rng.choice(["version", "format"])] = rng.choice([2, "x", None])
        said = "another version"
    else:
        # The number of losses is the number of steps, and which backends were called may be anything.
        said = in_json(manifest, rng, lambda path: path[:3] == ("record", "observation", "calls") or path[:2] == ("record", "loss"))
    path.write_text(json.dumps({**manifest, "sha256": _seal(manifest)}))
    if rng.random() < 0.15:
        path.write_text(path.read_text().replace('"version"', '"version": 1, "version"', 1))
        said += ", a key twice"
    return said


def in_tensors(folder: Path, other: Path, rng: random.Random) -> str:
    """Of a run: a tensor with another type or shape, missing or too many, with right digests."""
    path = folder / "run" / rng.choice(["model.safetensors", "state.safetensors"])
    tensors = load_tensors(path.read_bytes())
    said = change_tensor(tensors, rng)
    path.write_bytes(save_tensors(tensors))
    manifest = json.loads((folder / "run" / "state.json").read_text())
    del manifest["sha256"]
    manifest["files"][path.name] = fingerprint_of(path.read_bytes())
    (folder / "run" / "state.json").write_text(json.dumps({**manifest, "sha256": _seal(manifest)}))
    return f"{path.name}: {said}"


def change_tensor(tensors: dict[str, torch.Tensor], rng: random.Random) -> str:
    name = rng.choice(sorted(tensors))
    tensor, what = tensors[name], rng.choice(["dtype", "shape", "missing", "extra", "name"])
    if what == "dtype":
        tensors[name] = tensor.to(rng.choice([of for of in (torch.float64, torch.int64, torch.bool, torch.bfloat16) if of != tensor.dtype]))
    elif what == "shape":
        tensors[name] = rng.choice([tensor[None].clone(), torch.cat([tensor.flatten(), tensor.flatten()]), tensor.flatten()[:-1].clone()])
    elif what == "extra":
        tensors[f"{name}.extra"] = tensor.clone()
    else:
        removed = tensors.pop(name)
        if what == "name":
            tensors[f"{name}x"] = removed
    return f"{name}: {what}"


def in_archive(folder: Path, other: Path, rng: random.Random) -> str:
    """Of an executable: a part of it, with a right digest."""
    path = folder / "program"
    content = path.read_bytes()
    head = content.index(b"\n") + 1
    with zipfile.ZipFile(io.BytesIO(content[head + 65 :])) as archive:
        parts = [(name, archive.read(name)) for name in archive.namelist()]
    held = dict(parts)
    what = rng.choice(["manifest", "manifest", "manifest", "constants", "constants", "missing", "twice", "swapped", "compressed", "version", "cut"])
    name = rng.choice(sorted(held))
    if what == "manifest":
        manifest = json.loads(held["executable.json"])
        what = in_json(manifest, rng, lambda path: path == ("engine",))
        held["executable.json"] = json.dumps(manifest).encode()
    elif what == "constants":
        tensors = {key: torch.from_numpy(value) for key, value in safetensors.numpy.load(held["constants.safetensors"]).items()}
        what = change_tensor(tensors, rng)
        held["constants.safetensors"] = save_tensors(tensors)
    elif what == "missing":
        del held[name]
    elif what == "swapped":
        held[name] = held[rng.choice([each for each in sorted(held) if each != name])]
    elif what == "cut":
        held[name] = held[name][: rng.randrange(len(held[name]))]
    members = [*held.items(), (name, held.get(name, b""))] if what == "twice" else list(held.items())
    body = io.BytesIO()
    compression = zipfile.ZIP_DEFLATED if what == "compressed" else zipfile.ZIP_STORED
    with warnings.catch_warnings(action="ignore"), zipfile.ZipFile(body, "w", compression) as archive:  # of a name that is there twice
        for member, part in members:
            archive.writestr(member, part)
    first = b"fusible executable 2\n" if what == "version" else content[:head]
    path.write_bytes(first + hashlib.sha256(body.getvalue()).hexdigest().encode() + b"\n" + body.getvalue())
    return f"{name}: {what}"


def in_weights(folder: Path, other: Path, rng: random.Random) -> str:
    """Of quantized tensors in a safetensors file: a cut file, a buffer of another type or shape, a header that says something else."""
    path = folder / "weights"
    if rng.random() < 0.2:
        return truncate(path, rng)
    tensors = load_tensors(path.read_bytes())
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    if rng.random() < 0.5:
        parts = {name: tensors[name] for name in tensors if name.startswith("weight:")}
        said = change_tensor(parts, rng)
        tensors = {**{name: tensor for name, tensor in tensors.items() if not name.startswith("weight:")}, **parts}
    else:
        header = json.loads(metadata["weight"])
        said = in_json(header, rng, lambda path: False)
        metadata["weight"] = json.dumps(header)
    path.write_bytes(save_tensors(tensors, metadata))
    return said


def in_state(folder: Path, other: Path, rng: random.Random) -> str:
    """Of a module's state dict: the scaling state cut, of another type, or with other tensors in it."""
    path = folder / "state"
    state = torch.load(path, weights_only=True)
    name = next(name for name in state if "scaling_state" in name)
    what = rng.choice(["cut", "dtype", "tensor", "tensor"])
    if what == "cut":
        state[name] = state[name][: rng.randrange(state[name].numel())].clone()
    elif what == "dtype":
        state[name] = state[name].to(rng.choice([torch.int8, torch.int64, torch.float32]))
    else:
        tensors = load_tensors(state[name].numpy().tobytes())
        what = change_tensor(tensors, rng)
        state[name] = torch.frombuffer(bytearray(save_tensors(tensors)), dtype=torch.uint8)
    torch.save(state, path)
    return what


CORRUPTIONS: list[tuple[str, Callable[[Path, Path, random.Random], str]]] = [
    ("run", in_bytes("run")),
    ("run", in_manifest),
    ("run", in_tensors),
    ("program", in_bytes("program")),
    ("program", in_archive),
    ("program", in_archive),
    ("binary", in_bytes("binary")),
    ("cache", in_bytes("cache")),
    ("weights", in_weights),
    ("state", in_state),
]


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def sweep(saved: Path, scratch: Path, seeds: range) -> Counter[str]:
    """How each corruption ended: ``refused``, or ``harmless`` where all that was saved is read."""
    wanted = {kind: read(saved / "one") for kind, read in READERS.items()}
    ended: Counter[str] = Counter()
    for seed in seeds:
        kind, corrupt = CORRUPTIONS[seed % len(CORRUPTIONS)]
        folder = scratch / str(seed)
        shutil.copytree(saved / "one", folder)
        said = corrupt(folder, saved / "two", random.Random(seed))
        before, generator = content(folder), torch.get_rng_state()
        case = f"{kind}, seed {seed}, {said}"
        try:
            found = READERS[kind](folder)
        except CheckpointError as error:
            ended[f"{kind} refused"] += 1
            sentence = str(error).splitlines()[-1]
            named = any(name in sentence for name in (str(folder), " in a checkpoint", "scaling state"))
            assert named or kind in ("weights", "state"), (case, sentence)
            assert content(folder) == before, case
            assert torch.equal(torch.get_rng_state(), generator) or kind == "run", case
        else:
            assert found == wanted[kind], case
            ended[f"{kind} harmless"] += 1
        shutil.rmtree(folder)
    return ended


def test_what_is_not_corrupted_is_read(saved: Path) -> None:
    for kind, read in READERS.items():
        one = read(saved / "one")
        assert one == read(saved / "one") and (kind == "cache" or one != read(saved / "two")), kind


def test_corruptions(saved: Path, tmp_path: Path) -> None:
    ended = sweep(saved, tmp_path, range(80))
    print(dict(ended))
    assert sum(ended.values()) == 80 and sum(count for name, count in ended.items() if "refused" in name) >= 60


@pytest.mark.slow
def test_many_corruptions(saved: Path, tmp_path: Path) -> None:
    ended = sweep(saved, tmp_path, range(1000, 1500))
    print(dict(ended))
    assert sum(ended.values()) == 500 and sum(count for name, count in ended.items() if "refused" in name) >= 380


def test_in_json_changes_something() -> None:
    """The corruptions themselves: each differs from what it was made of."""
    manifest = {"a": [1, {"b": 2.5}], "c": None}
    for seed in range(100):
        changed = copy.deepcopy(manifest)
        in_json(changed, random.Random(seed), lambda path: False)
        assert json.dumps(changed) != json.dumps(manifest) and parse_json(json.dumps(changed), of="x") == changed
