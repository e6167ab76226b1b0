"""Decoders whose layers are Transformer Engine's ``TransformerLayer``: its names and shapes of parameters, and those of Hugging Face, both ways.

Such is a model of transformers in which ``te.TransformerLayer`` stands in the place of each decoder layer: its checkpoint has the configuration and
the names of the model, but for ``layers.<n>.self_attention`` and ``layers.<n>.layernorm_mlp``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from fusible.errors import CheckpointError, expected
from fusible.models.families.config import Config

__all__ = ["OfTransformerEngine", "Stored", "from_transformer_engine", "is_of_transformer_engine", "to_transformer_engine"]

_THEIRS = re.compile(r"(?P<layer>(?:.*\.)?layers\.\d+)\.(?P<own>(?:self_attention|layernorm_mlp)\..+)")
_OURS = re.compile(r"(?P<layer>(?:.*\.)?layers\.\d+)\.(?P<own>.+)\.(?P<kind>weight|bias)")
_FAMILIES = ("gemma", "llama", "mistral", "qwen2", "qwen3")
_QKV, _UP = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")
_FUSED = "self_attention.layernorm_qkv."
_SEPARATE = dict(zip(_QKV, (f"{_FUSED}{name}_" for name in ("query", "key", "value")), strict=True))
_NAMES = {
    "input_layernorm": f"{_FUSED}layer_norm_",
    **_SEPARATE,
    "self_attn.o_proj": "self_attention.proj.",
    "self_attn.q_norm": "self_attention.q_norm.",
    "self_attn.k_norm": "self_attention.k_norm.",
    "post_attention_layernorm": "layernorm_mlp.layer_norm_",
    "mlp.down_proj": "layernorm_mlp.fc2_",
}
"""By the name of a layer of Hugging Face's, what stands before ``weight`` or ``bias`` in the package's."""
_FIRST = "layernorm_mlp.fc1_"

Rows = Callable[[Any], Any]


class Stored(Protocol):
    """A checkpoint as a model reads it, by the names of its family."""

    def __contains__(self, name: object) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def tensor(self, name: str) -> Any: ...

    def release(self, name: str) -> None: ...


@dataclass(frozen=True)
class _Heads:
    """How queries, keys and values lie in one matrix. ``interleaved``: a group's queries, its key and its value, group after group, as the package
    has it by default; else all queries before all keys, and these before all values."""

    heads: int
    groups: int
    width: int
    interleaved: bool

    @classmethod
    def of(cls, config: Mapping[str, Any], interleaved: bool) -> _Heads:
        of = Config(config)
        heads = of.size("num_attention_heads")
        default = 128 if of.model_type == "qwen3" else of.size("hidden_size") // heads
        return cls(heads, of.size("num_key_value_heads", heads), of.size("head_dim", default), interleaved)

    @property
    def rows(self) -> tuple[int, int, int]:
        return self.heads * self.width, self.groups * self.width, self.groups * self.width

    def split(self, fused: torch.Tensor) -> list[torch.Tensor]:
        if not self.interleaved:
            return list(fused.split(self.rows))
        parts = fused.unflatten(0, (self.groups, -1, self.width)).split([self.heads // self.groups, 1, 1], dim=1)
        return [part.flatten(0, 2) for part in parts]

    def joined(self, parts: list[torch.Tensor]) -> torch.Tensor:
        if not self.interleaved:
            return torch.cat(parts)
        return torch.cat([part.unflatten(0, (self.groups, -1, self.width)) for part in parts], dim=1).flatten(0, 2)


@dataclass(frozen=True)
class _Place:
    """Where a parameter lies: the rows that ``take`` gives of a tensor of the package's, ``count`` of them; all where that is None."""

    source: str
    take: Rows | None = None
    count: int = 0


def is_of_transformer_engine(names: Mapping[str, Any] | tuple[str, ...]) -> bool:
    """Whether parameters of these names are those of ``te.TransformerLayer``."""
    return any(_THEIRS.fullmatch(name) for name in names)


@dataclass(frozen=True)
class OfTransformerEngine:
    """A checkpoint of the package's layers by the names of the family. Whole rows of a tensor are looked at where they lie; of an interleaved one
    they are copied."""

    checkpoint: Any
    places: Mapping[str, _Place]
    _read: set[str] = field(default_factory=set, repr=False)

    @classmethod
    def of(cls, checkpoint: Any, config: Mapping[str, Any], *, qkv_interleaved: bool = True) -> OfTransformerEngine:
        """``checkpoint``: a mapping that also has ``shape`` and ``release``. Raises ``CheckpointError`` for a family whose layers are others."""
        shapes = {name: tuple(checkpoint.shape(name)) for name in checkpoint}
        return cls(checkpoint, _places(shapes, config, qkv_interleaved))

    def __contains__(self, name: object) -> bool:
        return name in self.places

    def shape(self, name: str) -> tuple[int, ...]:
        place = self.places[name]
        whole = tuple(self.checkpoint.shape(place.source))
        return whole if place.take is None else (place.count, *whole[1:])

    def tensor(self, name: str) -> Any:
        self._read.add(name)
        place = self.places[name]
        whole = self.checkpoint.tensor(place.source)
        return whole if place.take is None else place.take(whole)

    def release(self, name: str) -> None:
        self.checkpoint.release(self.places[name].source)

    def check_read(self) -> None:
        """Raise ``CheckpointError`` for a parameter that nobody has asked for, but for biases of 0: the package has all biases or none."""
        for name in self.places.keys() - self._read:
            if _OURS.fullmatch(name) and not (name.endswith(".bias") and not self.tensor(name).any()):
                do = "load the configuration that belongs to these weights"
                raise CheckpointError(expected("no such parameter", of="a model of this family", got=name, do=do))


def from_transformer_engine(tensors: Mapping[str, Any], config: Mapping[str, Any], *, qkv_interleaved: bool = True) -> dict[str, torch.Tensor]:
    """The parameters of a decoder of ``te.TransformerLayer``s by Hugging Face's names, e.g. for ``load_state_dict`` of transformers' model.

    ``tensors``: a state dict of the model; ``config``: the entries of its ``config.json``. Queries, keys and values may lie in one matrix
    (``fuse_qkv_params``), ``qkv_interleaved`` as ``qkv_weight_interleaved`` says. Extra states are left out: ``fusible.compat`` has them. Raises
    ``CheckpointError`` for names that are no such layer's, and for a family whose layers are others.
    """
    shapes = {name: tuple(value.shape) for name, value in tensors.items() if isinstance(value, torch.Tensor)}
    places = _places(shapes, config, qkv_interleaved)
    return {name: tensors[place.source] if place.take is None else place.take(tensors[place.source]) for name, place in places.items()}


def to_transformer_engine(
    tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], *, fuse_qkv: bool = False, qkv_interleaved: bool = True
) -> dict[str, torch.Tensor]:
    """The parameters of a decoder by the names of ``te.TransformerLayer``, for ``load_state_dict`` of a model of such layers; other names stay.

    ``fuse_qkv``: queries, keys and values are one matrix, as the layers have them that are made with ``fuse_qkv_params=True``; ``qkv_interleaved``:
    the layers' ``qkv_weight_interleaved``, which is off where they are not fused. Where one product has a bias, the others get biases of 0. Raises
    ``CheckpointError`` for a family whose layers are others.
    """
    heads = _Heads.of(_checked(config), qkv_interleaved)
    made: dict[str, torch.Tensor] = {}
    layers: dict[str, dict[tuple[str, str], torch.Tensor]] = {}
    for name, tensor in tensors.items():
        found = _OURS.fullmatch(name)
        if found is None:
            made[name] = tensor
        else:
            layers.setdefault(found["layer"], {})[found["own"], found["kind"]] = tensor
    for layer, parts in layers.items():
        made |= {f"{layer}.{name}": tensor for name, tensor in _of_layer(layer, parts, heads, fuse_qkv)}
    return made


def _of_layer(layer: str, parts: dict[tuple[str, str], torch.Tensor], heads: _Heads, fuse_qkv: bool) -> Iterator[tuple[str, torch.Tensor]]:
    products = (*_QKV, "self_attn.o_proj", *_UP, "mlp.down_proj")
    missing = next((name for name in products if (name, "weight") not in parts), None)
    if missing is not None:
        raise CheckpointError(expected(f"{layer}.{missing}.weight", of="a decoder", got="none", do="give the whole state dict"))
    if any((name, "bias") in parts for name in products):
        parts = {**{(name, "bias"): parts[name, "weight"].new_zeros(len(parts[name, "weight"])) for name in products}, **parts}
    kinds = [kind for kind in ("weight", "bias") if (_UP[0], kind) in parts]
    for kind in kinds:
        yield f"{_FIRST}{kind}", torch.cat([parts.pop((name, kind)) for name in _UP])
        if fuse_qkv:
            yield f"{_FUSED}{kind}", heads.joined([parts.pop((name, kind)) for name in _QKV])
    for (own, kind), tensor in parts.items():
        if own not in _NAMES:
            do = "give parameters of a layer with attention and a gated MLP"
            raise CheckpointError(expected("a parameter that te.TransformerLayer has", of=layer, got=f"{own}.{kind}", do=do))
        yield f"{_NAMES[own]}{kind}", tensor


def _places(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], interleaved: bool) -> dict[str, _Place]:
    heads = _Heads.of(_checked(config), interleaved)
    ours = {theirs: own for own, theirs in _NAMES.items()}
    places: dict[str, _Place] = {}
    for name, shape in shapes.items():
        found = _THEIRS.fullmatch(name)
        if name.endswith("_extra_state"):
            continue
        if found is None:
            places[name] = _Place(name)
            continue
        before, kind = next(((found["own"].removesuffix(kind), kind) for kind in ("weight", "bias") if found["own"].endswith(kind)), ("", ""))
        if before == _FUSED:
            places |= _split(name, found["layer"], kind, _QKV, heads.rows, heads.split)
        elif before == _FIRST:
            half = shape[0] // 2
            places |= _split(name, found["layer"], kind, _UP, (half, half), lambda whole: whole.chunk(2))
        elif before in ours:
            places[f"{found['layer']}.{ours[before]}.{kind}"] = _Place(name)
        else:
            do = "convert the model by fusible.convert"
            raise CheckpointError(expected("parameters of self-attention and a gated MLP", of="a te.TransformerLayer", got=name, do=do))
    return places


def _split(source: str, layer: str, kind: str, names: tuple[str, ...], rows: tuple[int, ...], split: Rows) -> dict[str, _Place]:
    def part(index: int) -> Rows:
        return lambda whole: split(whole)[index]

    return {f"{layer}.{name}.{kind}": _Place(source, part(index), rows[index]) for index, name in enumerate(names)}


def _checked(config: Mapping[str, Any]) -> Mapping[str, Any]:
    kind = Config(config).model_type
    if kind not in _FAMILIES:
        do = "load the model by the library that it was made with"
        raise CheckpointError(expected(f"one of {', '.join(_FAMILIES)}", of="model_type of a decoder of te.TransformerLayer", got=repr(kind), do=do))
    return config
