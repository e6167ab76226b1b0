"""From a blueprint and a source of parameters to a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import singledispatch
from typing import Any, Protocol

import torch
from torch import nn

from fusible.errors import CheckpointError, expected
from fusible.models.blueprints import EncoderBlueprint, EncoderDecoderBlueprint
from fusible.models.encoder_decoder_model import EncoderDecoderModel, Modules
from fusible.models.encoder_model import EncoderModel
from fusible.models.joining import joined_rows
from fusible.models.language_model import LanguageModel
from fusible.models.parts import Blueprint, Part, Product, Weights
from fusible.models.pretrained_model import PretrainedModel
from fusible.models.tokens import table_of
from fusible.models.transformer_engine import Stored
from fusible.models.tying import tied_product
from fusible.pytorch import Recipe, Sequential, quantize_parameters
from fusible.quantized import QuantizedTensor

__all__ = ["Read", "Seeded", "Source", "assembled"]


class Source(Weights, Protocol):
    """Parameters for a whole model. ``trainable``: they get gradients, and are memory of its own. ``new``: they are made, not read."""

    @property
    def trainable(self) -> bool: ...

    @property
    def new(self) -> bool: ...

    def has(self, name: str) -> bool:
        """Whether there is a parameter of that name."""
        ...


def assembled(config: Mapping[str, Any], blueprint: Any, source: Source, recipe: Recipe | None) -> PretrainedModel:
    """The model of ``blueprint`` with the parameters of ``source``, which computes under ``recipe``."""
    model = _model(blueprint, config, source, recipe)
    model.requires_grad_(source.trainable)
    return model.train(source.trainable)


@singledispatch
def _model(blueprint: Any, config: Mapping[str, Any], source: Source, recipe: Recipe | None) -> PretrainedModel:
    """By the class of the blueprint: what makes models of such, a function registered below."""
    raise NotImplementedError(type(blueprint).__name__)


@_model.register
def _(blueprint: Blueprint, config: Mapping[str, Any], source: Source, recipe: Recipe | None) -> LanguageModel:
    embedding, positions = table_of(source, blueprint.embedding, blueprint.vocabulary, blueprint.hidden), None
    if blueprint.positions is not None:
        positions = table_of(source, blueprint.positions, blueprint.context, blueprint.hidden)
    body = _chain(blueprint.body, source)
    head = _end(blueprint.head, embedding if blueprint.tied else None, source)
    return LanguageModel(config, blueprint, embedding, positions, body, head, recipe)


@_model.register
def _(blueprint: EncoderBlueprint, config: Mapping[str, Any], source: Source, recipe: Recipe | None) -> EncoderModel:
    inputs: Any = blueprint.inputs.made(source)
    body, head, pooler = _chain(blueprint.body, source), None, None
    if blueprint.head:
        *before, last = blueprint.head
        head = _chain(before, source)
        head.append(_end(last, inputs.words if blueprint.tied else None, source))
    if blueprint.pooler is not None and (source.new or source.has(f"{blueprint.pooler[0].names[0]}.weight")):
        pooler = _chain(blueprint.pooler, source)
    return EncoderModel(config, blueprint, inputs, body, head, pooler, recipe)


@_model.register
def _(blueprint: EncoderDecoderBlueprint, config: Mapping[str, Any], source: Source, recipe: Recipe | None) -> EncoderDecoderModel:
    tokens: Any = blueprint.tokens.made(source)
    inputs = tokens if blueprint.inputs == blueprint.tokens else blueprint.inputs.made(source)
    encoder, decoder = _chain(blueprint.encoder, source), _chain(blueprint.decoder, source)
    memory = nn.ModuleList(part.made(source) for part in blueprint.memory)
    tables = [None if table is None else table.made(source) for table in (blueprint.encoder_table, blueprint.decoder_table)]
    head = _end(blueprint.head, tokens.words if blueprint.tied else None, source)
    return EncoderDecoderModel(config, blueprint, Modules(inputs, encoder, tokens, decoder, memory, head, *tables), recipe)


def _chain(parts: Sequence[Part], source: Source) -> Sequential:
    return Sequential(*(part.made(source) for part in parts))


def _end(last: Part, table: nn.Embedding | None, source: Source) -> nn.Module:
    """The last part of a head: by ``table``, unless the source has a weight of its own for it."""
    if table is None or not isinstance(last, Product) or source.has(f"{last.names[0]}.weight"):
        return last.made(source)
    return tied_product(last, table, source)


@dataclass(frozen=True)
class Read:
    """The parameters of a checkpoint, whose shapes are checked. What is one tensor there, of the dtype asked for, stays where it lies in the file."""

    checkpoint: Stored
    dtype: torch.dtype
    device: torch.device
    recipe: Recipe | None
    trainable: bool
    _copied: list[str] = field(default_factory=list, repr=False)
    """What the layer that is being made has been copied from."""

    @property
    def new(self) -> bool:
        return False

    def has(self, name: str) -> bool:
        return name in self.checkpoint

    def values(self, name: str, shape: tuple[int, ...], initial: torch.Tensor | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._as_asked(self._plain(name, shape), dtype)

    def weights(self, names: Sequence[str], shapes: Sequence[tuple[int, int]], transposed: bool = False) -> list[torch.Tensor]:
        return self._joined(names, shapes, transposed)

    def _joined(self, names: Sequence[str], shapes: Sequence[tuple[int, int]], transposed: bool = False, by_rows: bool = False) -> list[torch.Tensor]:
        parts = [self._tensor(name, shape[::-1] if transposed else shape) for name, shape in zip(names, shapes, strict=True)]
        if transposed or self.trainable:
            parts = [self._values(part) for part in parts]
        parts = [part.T for part in parts] if transposed else parts
        joined = joined_rows(parts, by_rows=by_rows)
        asked = [self._as_asked(part) for part in (parts if joined is None else [joined])]
        if self.recipe is not None or len(asked) < len(parts) or asked[0] is not parts[0]:
            self._copied.extend(names)
        return asked

    def vector(self, names: Sequence[str], sizes: Sequence[int], initial: float = 0.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._as_asked(torch.cat([self._plain(name, (size,)) for name, size in zip(names, sizes, strict=True)]), dtype)

    def stack(self, names: Sequence[Sequence[str]], shape: tuple[int, int]) -> torch.Tensor:
        made = torch.empty(len(names), len(names[0]) * shape[0], shape[1], dtype=self.dtype, device=self.device)
        for expert, of_expert in zip(made, names, strict=True):
            for place, name in zip(expert.split(shape[0]), of_expert, strict=True):
                place.copy_(self._plain(name, shape))
                self.checkpoint.release(name)
        return made

    def quantized(self, names: Sequence[Sequence[str]], shape: tuple[int, int]) -> list[torch.Tensor] | None:
        found: list[torch.Tensor] = []
        for of_one in names:
            joined = self._joined(of_one, [shape] * len(of_one), by_rows=True)
            if len(joined) > 1 or not isinstance(joined[0], QuantizedTensor):
                return None
            found += joined
        return found

    def finish(self, module: nn.Module) -> nn.Module:
        if self.recipe is not None:
            quantize_parameters(module, recipe=self.recipe)
        for name in self._copied:  # else the process would hold the file's pages beside what was made of them
            self.checkpoint.release(name)
        self._copied.clear()
        return module

    def _as_asked(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        if isinstance(tensor, QuantizedTensor):
            return tensor.to(self.device)
        asked = tensor.to(self.device, dtype or self.dtype).contiguous()
        return asked.clone() if self.trainable and asked is tensor else asked  # what lies in the file is not written to

    def _values(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.dequantize(dtype=self.dtype) if isinstance(tensor, QuantizedTensor) else tensor

    def _plain(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._values(self._tensor(name, shape))

    def _tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A parameter as the checkpoint has it. Raises ``CheckpointError`` for one that is missing, and for another shape."""
        if not self.has(name):
            raise CheckpointError(expected(f"a parameter {name}", of="the checkpoint", got="none", do="save the model whole"))
        got = tuple(self.checkpoint.shape(name))
        if got != shape:
            do = "load the configuration that belongs to these weights"
            raise CheckpointError(expected(f"shape {list(shape)}, as config.json says", of=name, got=list(got), do=do))
        return self.checkpoint.tensor(name)


@dataclass(frozen=True)
class Seeded:
    """Parameters of a new model: normal matrices of the deviation ``deviation``, drawn one after another by one generator."""

    dtype: torch.dtype
    device: torch.device
    seed: int
    deviation: float
    trainable: bool = True
    new: bool = True
    _generator: torch.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_generator", torch.Generator().manual_seed(self.seed))

    def has(self, name: str) -> bool:
        return False

    def values(self, name: str, shape: tuple[int, ...], initial: torch.Tensor | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._drawn(shape, dtype) if initial is None else initial.to(self.device, dtype or self.dtype)

    def weights(self, names: Sequence[str], shapes: Sequence[tuple[int, int]], transposed: bool = False) -> list[torch.Tensor]:
        return [self._drawn((sum(rows for rows, _ in shapes), shapes[0][1]))]

    def vector(self, names: Sequence[str], sizes: Sequence[int], initial: float = 0.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.full((sum(sizes),), initial, dtype=dtype or self.dtype, device=self.device)

    def stack(self, names: Sequence[Sequence[str]], shape: tuple[int, int]) -> torch.Tensor:
        return self._drawn((len(names), len(names[0]) * shape[0], shape[1]))

    def quantized(self, names: Sequence[Sequence[str]], shape: tuple[int, int]) -> list[torch.Tensor] | None:
        return None

    def finish(self, module: nn.Module) -> nn.Module:
        return module

    def _drawn(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Drawn in fp32 on the CPU: the same numbers on every device, in every dtype rounded."""
        return (torch.randn(shape, generator=self._generator, dtype=torch.float32, device="cpu") * self.deviation).to(
            self.device, dtype or self.dtype
        )
