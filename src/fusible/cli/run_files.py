"""The files that ``fusible train`` leaves in its --out, of either kind of run: the demo's, and those of a model of the user's. Imports no torch.

A run that overwrites others leaves them whole until its own first save is complete. The manifest of that save names the seals of those that it
replaces, of either kind, so the rename that makes it valid also makes them void, wherever they are. Only then are they removed, the manifests last.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from fusible.cli.training.options import RECIPES
from fusible.errors import ArgumentError, FusibleError, expected
from fusible.files import Replacement, locate, parse_json, read_file

__all__ = [
    "CHECKPOINT",
    "CHECKPOINT_FILES",
    "FOLDERS",
    "MANIFEST",
    "MODEL_FILES",
    "MODEL_REPORTS",
    "REPORT_FILES",
    "check_apart",
    "check_free",
    "check_same_runs",
    "demo_files",
    "demo_places",
    "discard_demo",
    "discard_model",
    "discard_void",
    "has_checkpoint",
    "has_model_run",
    "remove",
    "seals",
    "void_seals",
]

CHECKPOINT_FILES = ("model.safetensors", "state.safetensors", "state.json")
REPORT_FILES = ("metrics.json", "loss.png", "pipeline.txt")
"""Of the demo: checkpoints, which lie in --out itself or in a folder for each recipe, and what is written at the end."""

CHECKPOINT, MANIFEST = "checkpoint", "training.json"
MODEL_FILES = ("parameters.safetensors", "state.safetensors", MANIFEST)
MODEL_REPORTS, FOLDERS = ("metrics.json", "loss.png"), ("model", "adapter")
"""Of a model's training: the folder of its state and the files there, and what is written at the end."""

_SHARDS = "shard-*-model-00001-of-00001.safetensors"
"""Of several processes, beside either kind of manifest."""
_BESIDE = (".{}.new", ".{}.old")
"""Where ``FOLDERS`` are while they are replaced."""


def demo_places(out: Path) -> tuple[Path, ...]:
    """The folders that may have a checkpoint of the demo."""
    return (out, *(out / recipe for recipe in RECIPES))


def demo_files(place: Path) -> list[str]:
    """The names of the files that the demo's checkpoints may have left in ``place``; the manifest is the last."""
    return [*_shards(place), *CHECKPOINT_FILES]


def has_checkpoint(place: Path) -> bool:
    """Whether the demo saved a run in ``place``."""
    return any(os.path.lexists(locate(place, name)) for name in CHECKPOINT_FILES)


def has_model_run(out: Path) -> bool:
    """Whether ``out`` has the state of a model's training that no other run has replaced."""
    seal, _ = _said(path := locate(out / CHECKPOINT, MANIFEST))
    return os.path.lexists(path) and seal not in void_seals(out)


def check_free(out: Path) -> None:
    """Raise ``ArgumentError`` if ``out`` has what a run of either kind wrote: a new one would overwrite it."""
    found = next(_left(out), None)
    if found is not None:
        do = f"go on with it by --resume {out}, name another folder, or write over it by --overwrite"
        raise ArgumentError(expected("a folder without a run", of=f"--out {out}", got=f"the run in {found}", do=do))


def check_apart(out: Path, read: Iterable[tuple[str, Path]]) -> None:
    """Raise ``ArgumentError`` if a new run's first save in ``out`` would remove some of what it reads: files and folders, each behind the option that
    names it."""
    files = [out / name for name in REPORT_FILES] + [place / name for place in demo_places(out) for name in CHECKPOINT_FILES]
    folders = [os.path.realpath(out / name) for name in (*FOLDERS, CHECKPOINT)]
    removed = {os.path.realpath(path) for path in files if os.path.lexists(path)}
    for option, path in read:
        place = os.path.realpath(path)
        within = any(os.path.commonpath([folder, place]) == folder for folder in folders)
        if within or place in removed or place in map(os.path.dirname, removed):
            wanted, do = f"a folder without what {option} names", "name another folder, or move that elsewhere"
            raise ArgumentError(expected(wanted, of=f"--out {out}", got=f"{path}, which this run would remove", do=do))


def check_same_runs(out: Path, found: tuple[str, ...], overwrite: bool) -> None:
    """Raise ``ArgumentError`` unless the ``seals`` in ``out`` are those that were ``found`` there, before the folder was held, or may be any."""
    if not overwrite and seals(out) != found:
        do = "start this command anew"
        raise ArgumentError(expected("the runs that were there when this command began", of=f"--out {out}", got="a later save", do=do))


def seals(out: Path) -> tuple[str, ...]:
    """The seals of all manifests in ``out``, which a run that replaces them names in its own. Those that cannot be read are left out."""
    return tuple(seal for path in _manifests(out) if (seal := _said(path)[0]) is not None)


def void_seals(out: Path) -> frozenset[str]:
    """The seals that manifests in ``out`` say they have replaced."""
    return frozenset(seal for path in _manifests(out) for seal in _said(path)[1])


def discard_demo(out: Path, keep: Collection[Path] = ()) -> None:
    """Remove the demo's reports, and its checkpoints except those in the places ``keep``.

    The manifest of a checkpoint is removed last: as long as other files are there, it says that they were replaced.
    """
    for name in REPORT_FILES:
        remove(out, name)
    for place in demo_places(out):
        for name in demo_files(place) if place not in keep else ():
            remove(place, name)


def discard_model(out: Path, state: bool = True) -> None:
    """Remove what a model's training wrote at its end; and, with ``state``, what it can be resumed from, the manifest last."""
    for name in MODEL_REPORTS:
        remove(out, name)
    for name in FOLDERS:
        for folder in (name, *(form.format(name) for form in _BESIDE)):
            shutil.rmtree(out / folder, ignore_errors=True)
    place = out / CHECKPOINT
    if state and place.is_dir():
        for name in (*_shards(place), *MODEL_FILES):
            remove(place, name)
        shutil.rmtree(Replacement.place(place), ignore_errors=True)
        if not any(place.iterdir()):
            place.rmdir()


def discard_void(out: Path) -> None:
    """Remove the runs that others say they have replaced: by a process that ended before it did so."""
    void = void_seals(out)
    if _said(locate(out / CHECKPOINT, MANIFEST))[0] in void:
        discard_model(out)
    kept = [place for place in demo_places(out) if _said(locate(place, CHECKPOINT_FILES[-1]))[0] not in void]
    if len(kept) < len(demo_places(out)):
        discard_demo(out, kept)


def remove(place: Path, name: str) -> None:
    """Remove a file, and what would take its place."""
    while os.path.lexists(path := locate(place, name)):
        path.unlink()


def _left(out: Path) -> Iterator[Path]:
    if os.path.lexists(locate(out / CHECKPOINT, MANIFEST)):
        yield out / CHECKPOINT
    yield from (place for place in demo_places(out) if has_checkpoint(place))
    yield from (out / name for name in (*FOLDERS, *REPORT_FILES) if os.path.lexists(locate(out, name)))


def _manifests(out: Path) -> list[Path]:
    return [locate(out / CHECKPOINT, MANIFEST), *(locate(place, CHECKPOINT_FILES[-1]) for place in demo_places(out))]


def _said(manifest: Path) -> tuple[str | None, list[str]]:
    """The seal of a manifest, and those that it replaces; None and none where it cannot be read. Whoever goes on with a run checks all of it."""
    try:
        found: Any = parse_json(read_file(manifest), of=str(manifest)) if manifest.exists() else None
    except FusibleError:
        found = None
    seal, replaces = (found.get("sha256"), found.get("replaces", [])) if isinstance(found, dict) else (None, [])
    replaces = replaces if isinstance(replaces, list) else []
    return seal if isinstance(seal, str) else None, [one for one in replaces if isinstance(one, str)]


def _shards(place: Path) -> list[str]:
    return sorted({path.name for folder in Replacement.places(place) for path in folder.glob(_SHARDS)})
