"""``from_pretrained``: a model in its fastest form from a directory that Hugging Face's libraries write."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from fusible.errors import ArgumentError, CheckpointError, expected
from fusible.models.checkpoints import Checkpoint, open_checkpoint
from fusible.models.families import Config, blueprint_of
from fusible.models.joining import joined_rows
from fusible.models.language_model import LanguageModel
from fusible.models.parts import Blueprint
from fusible.pytorch import Recipe, Sequential, quantize_parameters
from fusible.quantized import QuantizedTensor

__all__ = ["from_pretrained"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def from_pretrained(
    directory: str | Path,
    recipe: Recipe | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    trainable: bool = False,
) -> LanguageModel:
    """The causal language model of ``directory``, which has a ``config.json`` and weights in safetensors.

    ``dtype``: of activations, and of parameters that are not quantized; None for the checkpoint's. ``recipe``: the weights of the blocks' products
    are held as its number format alone, and activations stay in ``dtype``; the head, norms, routers and experts stay as they are. Weights that the
    checkpoint has quantized stay what they are, but for those of experts, which become ``dtype``. ``trainable``: parameters are of ``dtype``, get
    gradients, and the model computes under ``recipe``.

    Raises ``CheckpointError`` for a family that is not known, for entries of the configuration that it is not made with, and for parameters that are
    missing or of other shapes; ``FileError`` for what cannot be read.
    """
    checkpoint = open_checkpoint(directory)
    blueprint = blueprint_of(Config(checkpoint.config))
    source = _Source(checkpoint, dtype or _dtype_of(checkpoint), torch.device(device), None if trainable else recipe, trainable)
    return source.model(blueprint, recipe if trainable else None)


def _dtype_of(checkpoint: Checkpoint) -> torch.dtype:
    name = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or "bfloat16"
    if name not in _DTYPES:
        raise CheckpointError(expected(f"one of {', '.join(_DTYPES)}", of="dtype of config.json", got=repr(name), do="pass dtype"))
    return _DTYPES[name]


class _Source:
    """The ``Weights`` of a checkpoint. Checks shapes; what is one tensor there, of the dtype asked for, stays where it lies in the file."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, recipe: Recipe | None, trainable: bool) -> None:
        if not dtype.is_floating_point:
            raise ArgumentError(expected("float32, bfloat16 or float16", of="dtype of from_pretrained", got=dtype, do="pass one of these"))
        self._checkpoint, self.dtype, self._device = checkpoint, dtype, device
        self._recipe, self._trainable = recipe, trainable
        self._names = frozenset(checkpoint.names)

    def model(self, blueprint: Blueprint, computing: Recipe | None) -> LanguageModel:
        """The model of a blueprint."""
        table = self.matrix(blueprint.embedding, (blueprint.vocabulary, blueprint.hidden))
        embedding = nn.Embedding.from_pretrained(table, freeze=not self._trainable)
        positions = None
        if blueprint.positions is not None:
            places = self.matrix(blueprint.positions, (blueprint.context, blueprint.hidden))
            positions = nn.Embedding.from_pretrained(places, freeze=not self._trainable)
        body = Sequential(*(part.made(self) for part in blueprint.body))
        head = blueprint.head
        own = not blueprint.tied or f"{head.names[0]}.weight" in self._names
        made = head.made(self) if own else head.of(table, self.vector([f"{head.names[0]}.bias"], head.rows) if head.bias else None, self)
        if not own:
            made.weight = embedding.weight  # one parameter, for optimizers and for what counts bytes
        model = LanguageModel(blueprint, embedding, positions, body, made, computing)
        model.requires_grad_(self._trainable)
        return model.train(self._trainable)

    def matrix(self, name: str, shape: tuple[int, int]) -> torch.Tensor:
        return self._as_asked(self._plain(name, shape))

    def weights(self, names: Sequence[str], shapes: Sequence[tuple[int, int]], transposed: bool = False) -> list[torch.Tensor]:
        parts = [self._tensor(name, shape[::-1] if transposed else shape) for name, shape in zip(names, shapes, strict=True)]
        if transposed or self._trainable:
            parts = [self._values(part) for part in parts]
        parts = [part.T for part in parts] if transposed else parts
        joined = joined_rows(parts)
        return [self._as_asked(part) for part in (parts if joined is None else [joined])]

    def vector(self, names: Sequence[str], sizes: Sequence[int]) -> torch.Tensor:
        return self._as_asked(torch.cat([self._plain(name, (size,)) for name, size in zip(names, sizes, strict=True)]))

    def stack(self, names: Sequence[Sequence[str]], shape: tuple[int, int]) -> torch.Tensor:
        made = torch.empty(len(names), len(names[0]) * shape[0], shape[1], dtype=self.dtype, device=self._device)
        for expert, of_expert in zip(made, names, strict=True):
            for place, name in zip(expert.split(shape[0]), of_expert, strict=True):
                place.copy_(self._plain(name, shape))
        return made

    def held(self, module: nn.Module) -> nn.Module:
        quantized = any(isinstance(parameter, QuantizedTensor) for parameter in module.parameters())
        return module if self._recipe is None or quantized else quantize_parameters(module, recipe=self._recipe)

    def _as_asked(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, QuantizedTensor):
            return tensor.to(self._device)
        asked = tensor.to(self._device, self.dtype).contiguous()
        return asked.clone() if self._trainable and asked is tensor else asked  # what lies in the file is not written to

    def _values(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.dequantize(dtype=self.dtype) if isinstance(tensor, QuantizedTensor) else tensor

    def _plain(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._values(self._tensor(name, shape))

    def _tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A parameter as the checkpoint has it. Raises ``CheckpointError`` for one that is missing, and for another shape."""
        if name not in self._names:
            raise CheckpointError(expected(f"a parameter {name}", of="the checkpoint", got="none", do="save the model whole"))
        got = tuple(self._checkpoint.shape(name))
        if got != shape:
            do = "load the configuration that belongs to these weights"
            raise CheckpointError(expected(f"shape {list(shape)}, as config.json says", of=name, got=list(got), do=do))
        return self._checkpoint.tensor(name)
