"""A checkpoint of Hugging Face's kind, as it lies on a disk: its config, and its weights, plain and quantized, read when they are asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fusible.errors import CheckpointError, check_path, expected
from fusible.files import parse_json, read_file
from fusible.models.checkpoints.header import Entry
from fusible.models.checkpoints.layouts import Weight, WeightLayout
from fusible.models.checkpoints.schemes import Config, Scheme, scheme_of
from fusible.models.checkpoints.shards import Shards, open_shards

__all__ = ["CONFIG", "Checkpoint", "open_checkpoint", "quantization_of", "read_config"]

CONFIG, _MODELOPT_CONFIG = "config.json", "hf_quant_config.json"
_CONFIG_LIMIT = 1 << 26
_INTACT = "use an intact checkpoint"

_OF_INPUTS = ("input_scale", "activation_scale", "input_global_scale")
_NOT_OF_WEIGHTS = (*_OF_INPUTS, "output_scale", "k_scale", "v_scale", "q_scale", "prob_scale")
"""How the names of scales end that belong to activations and to caches of keys and values: calibration found them, and they are kept."""

_OF_LAYERS = (".pre_quant_scale", ".weight_g_idx")
"""How the names end of what a layer does beside the product by its weight: it multiplies its input by something, or takes it in another order."""


@dataclass(frozen=True, eq=False)
class Checkpoint(Mapping[str, Any]):
    """The tensors of a directory by their logical names: a quantized weight and its scales are one.

    ``config``: what ``config.json`` says. ``names``: of the parameters. ``activation_scales``: the names of static scales of activations, fp32
    numbers that are stored beside them. As a mapping it has both, and ``checkpoint[name]`` is ``checkpoint.tensor(name)``. ``quantization``: how its
    weights are quantized, or None.
    """

    directory: Path
    config: Mapping[str, Any]
    quantization: Scheme | None
    quantization_config: Config
    layouts: tuple[WeightLayout, ...]
    names: tuple[str, ...]
    activation_scales: tuple[str, ...]
    weights: Mapping[str, Weight]
    """The quantized weights."""
    plain: Mapping[str, Entry]
    """What is stored as it is."""
    shards: Shards

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as they are stored."""
        return sum(entry.nbytes for entry in self.shards.entries.values())

    @property
    def dtype(self) -> torch.dtype:
        """The nominal dtype of the weights: what the config says, else bfloat16."""
        text = self.config.get("text_config")
        told = [part.get(key) for part in (self.config, text) if isinstance(part, Mapping) for key in ("dtype", "torch_dtype")]
        found = next((getattr(torch, name, None) for name in told if isinstance(name, str)), None)
        return found if isinstance(found, torch.dtype) and found.is_floating_point else torch.bfloat16

    def shape(self, name: str) -> tuple[int, ...]:
        """The logical shape of a tensor: of a quantized weight the one that it stands for."""
        weight = self.weights.get(name)
        return self.plain[name].shape if weight is None else weight.shape

    def tensor(self, name: str) -> Any:
        """A tensor: a plain one as a view of the file, without a copy; a quantized weight as Fusible's own quantized tensor over the file's bytes.

        Raises ``KeyError`` for a name that is not there, and ``CheckpointError`` where the file has been changed since.
        """
        weight = self.weights.get(name)
        if weight is None:
            return self.shards.at(self.plain[name])
        return weight.layout.decode(self.parts(name), self.dtype, weight.note)

    def release(self, name: str) -> None:
        """Let the system have back the memory of a tensor that was copied and that nobody looks at any more. It can be read again."""
        weight = self.weights.get(name)
        for entry in [self.plain[name]] if weight is None else [self.shards.entries[stored] for stored in weight.stored.values()]:
            self.shards.release(entry)

    def parts(self, name: str) -> dict[str, torch.Tensor]:
        """The stored tensors of a quantized weight, by what their names have behind its own."""
        return {suffix: self.shards.at(self.shards.entries[stored]) for suffix, stored in self.weights[name].stored.items()}

    def activation_scale(self, name: str) -> torch.Tensor | None:
        """The static scale of the activations that meet the weight ``name``; None where they are scaled when they come."""
        module = name.removesuffix(".weight")
        found = next((scale for ending in _OF_INPUTS if (scale := f"{module}.{ending}") in self.plain), None)
        return None if found is None else self.tensor(found)

    def __getitem__(self, name: str) -> Any:
        return self.tensor(name)

    def __iter__(self) -> Iterator[str]:
        yield from self.names
        yield from self.activation_scales

    def __len__(self) -> int:
        return len(self.names) + len(self.activation_scales)

    def __contains__(self, name: object) -> bool:
        return name in self.weights or name in self.plain

    __eq__ = object.__eq__
    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        kind = "plain" if self.quantization is None else f"quantized by {self.quantization}"
        return f"Checkpoint({str(self.directory)!r}, {len(self.names)} parameters, {self.nbytes} bytes, {kind})"


def open_checkpoint(directory: str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint in ``directory``: ``config.json``, and ``model.safetensors`` or the files that ``model.safetensors.index.json`` names.

    Headers are read and checked: that tensors lie within their files, that the index's are there, that scales and weights have shapes that belong
    together. No tensor is read. Raises ``CheckpointError``, or ``MissingFileError`` where a file is missing.
    """
    check_path(directory, "directory of open_checkpoint")
    folder = Path(directory)
    config = read_config(folder)
    told = quantization_of(config, folder)
    shards = open_shards(folder)
    scheme = None if told is None else scheme_of(told)
    layouts = () if scheme is None or told is None else tuple(scheme.layouts(told))
    weights = _found(shards, layouts)
    taken = {stored for weight in weights.values() for stored in weight.stored.values()}
    plain = {name: entry for name, entry in shards.entries.items() if name not in taken}
    _check_left(plain, shards, layouts)
    both = next((name for name in weights if name in plain), None)
    if both is not None:
        got = f"both {both} and {', '.join(weights[both].stored.values())}"
        raise CheckpointError(expected("a weight once", of=str(folder), got=got, do=_INTACT))
    scales = tuple(name for name in plain if layouts and name.endswith(_NOT_OF_WEIGHTS))
    first = {next(iter(weight.stored.values())): name for name, weight in weights.items()}
    names = (first.get(stored, stored) for stored in shards.entries if stored in first or (stored in plain and stored not in scales))
    return Checkpoint(folder, config, scheme, told or {}, layouts, tuple(names), scales, weights, plain, shards)


def read_config(folder: Path) -> dict[str, Any]:
    """The config of the model in ``folder``. Raises ``MissingFileError`` where there is none, and ``CheckpointError`` where it is no object."""
    path = folder / CONFIG
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(expected("a directory with config.json and model.safetensors", of=str(folder), got="a file", do="name the directory"))
    do = "name a directory that save_pretrained, or fusible quantize, has written"
    config = parse_json(read_file(path, limit=_CONFIG_LIMIT, of=str(path), do=do), of=str(path), unbounded=True)
    if not isinstance(config, dict):
        raise CheckpointError(expected("an object", of=str(path), got=type(config).__name__, do=_INTACT))
    return config


def quantization_of(config: Mapping[str, Any], folder: Path | None = None) -> dict[str, Any] | None:
    """The ``quantization_config`` of a config, of its ``text_config``, or of a ModelOpt checkpoint's own file in ``folder``; None where none is."""
    text = config.get("text_config")
    places = [config, text] if isinstance(text, Mapping) else [config]
    told = next((part[key] for part in places for key in ("quantization_config", "compression_config") if part.get(key) is not None), None)
    if told is None and folder is not None and (folder / _MODELOPT_CONFIG).exists():
        path = folder / _MODELOPT_CONFIG
        own = parse_json(read_file(path, limit=_CONFIG_LIMIT), of=str(path))
        quantization = own.get("quantization") if isinstance(own, dict) else None
        told = {"producer": own.get("producer"), **quantization, "quant_method": "modelopt"} if isinstance(quantization, dict) else own
    if told is not None and not isinstance(told, dict):
        raise CheckpointError(expected("an object", of="quantization_config", got=repr(told)[:80], do=_INTACT))
    return told


def _found(shards: Shards, layouts: tuple[WeightLayout, ...]) -> dict[str, Weight]:
    """The quantized weights by name: each by the first layout that fits it."""
    weights: dict[str, Weight] = {}
    for layout in layouts:
        for weight in layout.find(shards.entries, shards.metadata):
            weights.setdefault(weight.name, weight)
    return weights


def _check_left(plain: Mapping[str, Entry], shards: Shards, layouts: tuple[WeightLayout, ...]) -> None:
    """Raise for parts of weights that no layout fits: elements and scales of shapes or types that do not go together, or one without the others; and
    for what makes a layer another than the product by its weight."""
    beside = next((stored for stored in plain if layouts and stored.endswith(_OF_LAYERS)), None)
    if beside is not None:
        wanted, do = "quantized weights by which layers multiply their input as it is", "quantize the model without it"
        raise CheckpointError(expected(wanted, of=str(shards.directory), got=beside, do=do))
    marks = {suffix: layout for layout in reversed(layouts) for suffix in layout.suffixes if suffix}
    for stored, entry in plain.items():
        suffix = next((suffix for suffix in marks if stored.endswith(suffix)), None)
        if suffix is None or stored.endswith(_NOT_OF_WEIGHTS):
            continue
        name, others = stored.removesuffix(suffix), [each for each in marks[suffix].suffixes if each != suffix]
        found = [f"{name}{each} of {shards.entries[f'{name}{each}'].dtype} {list(shards.entries[f'{name}{each}'].shape)}" for each in others
                 if f"{name}{each}" in shards.entries]  # fmt: skip
        if found or name.endswith("weight") or suffix == marks[suffix].suffixes[0]:
            wanted = f"what belongs to {stored} of {entry.dtype} {list(entry.shape)} in {', '.join(name + each for each in others)}"
            got, do = ", ".join(found) or "none of them", "use an intact checkpoint"
            raise CheckpointError(expected(wanted, of=str(shards.directory), got=got, do=do))
