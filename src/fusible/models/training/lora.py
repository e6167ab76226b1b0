"""Adapters of low rank (LoRA: Hu et al. 2021, arXiv:2106.09685) on the products of a model's blocks."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fusible.errors import ArgumentError, expected
from fusible.files import NewFolder, put
from fusible.models.language_model import LanguageModel
from fusible.models.parts import LatentAttention, Parallel, Part, Product, Residual, SharedExpert
from fusible.models.training.saved_run import file_pieces
from fusible.quantized import QuantizedTensor

__all__ = ["Adapted", "adapters_of", "add_adapters", "merge_adapters", "save_adapters"]


class Adapted(nn.Module):
    """``y = base(x) + alpha / rank * [up_i @ down_i @ x]``: a layer that stays as it is, and an adapter of each of its parts.

    The layers that a model reads as one (q, k and v; gate and up) have an adapter each, as PEFT has them. ``down [parts * rank, inputs]``: what comes
    first, ``A`` of every part on top of that of the next, so it is one product; ``up``: of every part ``B [rows, rank]``. Both are fp32, and are
    rounded to the dtype of ``x`` where they are multiplied by. At first ``B`` is 0, and ``A`` uniform within ``+-1/sqrt(inputs)``.
    """

    def __init__(self, base: nn.Module, product: Product, rank: int, alpha: float, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.base, self.product, self.rank, self.alpha = base, product, rank, alpha
        device = next(base.parameters()).device
        bound = 1 / math.sqrt(product.columns)
        drawn = torch.empty(len(product.names) * rank, product.columns, dtype=torch.float32, device="cpu").uniform_(
            -bound, bound, generator=generator
        )
        self.down = nn.Parameter(drawn.to(device))
        self.up = nn.ParameterList(torch.zeros(rows, rank, dtype=torch.float32, device=device) for rows in product.rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = F.linear(x, self.down.to(x.dtype)).split(self.rank, -1)
        deltas = [F.linear(part, up.to(x.dtype)) for part, up in zip(low, self.up, strict=True)]
        return self.base(x).add(deltas[0] if len(deltas) == 1 else torch.cat(deltas, -1), alpha=self.alpha / self.rank)

    def deltas(self) -> torch.Tensor:
        """fp32 ``[rows of all parts, inputs]``: what is added to the weight."""
        parts = zip(self.up, self.down.split(self.rank), strict=True)
        return torch.cat([up @ down for up, down in parts]) * (self.alpha / self.rank)

    def merged_weight(self) -> torch.Tensor:
        """fp32 ``[rows of all parts, inputs]``: by what layer and adapters together multiply."""
        weight: Any = self.base.weight
        return (weight.dequantize() if isinstance(weight, QuantizedTensor) else weight).float() + self.deltas()

    def extra_repr(self) -> str:
        return f"rank={self.rank}, alpha={self.alpha:g}"


@dataclass(frozen=True)
class _Place:
    """Where a product of a block stands: as the child ``name`` of ``parent``."""

    product: Product
    parent: nn.Module
    name: str

    @property
    def module(self) -> Any:
        return self.parent._modules[self.name]

    @property
    def key(self) -> tuple[str, ...]:
        return self.product.names


def add_adapters(model: LanguageModel, rank: int, alpha: float, targets: Collection[str] = (), *, seed: int = 0) -> None:
    """Put adapters onto the products of ``model``'s blocks, in place, and let nothing else get gradients.

    ``targets``: the last parts of the names of the layers that get one (``q_proj``, ``v_proj``); none for all. Layers that are read as one get one
    each, or none of them does. Routers, experts and the head get none. Raises ``ArgumentError`` for a rank that is none, for targets that no layer
    has, and for a part of what is read as one.
    """
    if rank < 1:
        raise ArgumentError(expected("at least 1", of="rank of add_adapters", got=rank, do="give a larger number"))
    places = [place for place in _places(model) if not place.product.high_precision]
    known = sorted({_last(name) for place in places for name in place.key})
    unknown = [target for target in targets if target not in known]
    if unknown or not places:
        raise ArgumentError(expected(f"some of {', '.join(known)}", of="targets of adapters", got=repr(unknown[0]), do="name layers of the model"))
    chosen = [place for place in places if not targets or any(_last(name) in targets for name in place.key)]
    for place in chosen:
        missing = [_last(name) for name in place.key if targets and _last(name) not in targets]
        if missing:
            wanted = f"all of {', '.join(map(_last, place.key))}, which are read as one"
            raise ArgumentError(expected(wanted, of="targets of adapters", got=f"no {missing[0]}", do="name it too"))
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for place in chosen:
        place.parent.add_module(place.name, Adapted(place.module, place.product, rank, alpha, generator))


def adapters_of(model: LanguageModel) -> list[Adapted]:
    """The layers of a model that have adapters, in order."""
    return [module for module in model.modules() if isinstance(module, Adapted)]


@torch.no_grad()
def merge_adapters(model: LanguageModel, into: LanguageModel) -> None:
    """Add what the adapters of ``model`` add to their layers to the weights of ``into``, a plain model of the same blueprint. Summed in fp32."""
    found = {place.key: place.module for place in _places(into)}
    for adapted in adapters_of(model):
        weight = found[adapted.product.names].weight
        weight.copy_(weight.float() + adapted.deltas().to(weight.device))


def save_adapters(model: LanguageModel, directory: str | PathLike[str], *, base: str) -> None:
    """Write the adapters as PEFT reads them: ``adapter_model.safetensors`` and ``adapter_config.json``. ``base``: the model that they belong to.

    The directory appears when all of it is on the disk. Raises ``FileError`` where there is one already, ``ArgumentError`` for a model without any.
    """
    adapted = adapters_of(model)
    if not adapted:
        raise ArgumentError(expected("a model with adapters", of="save_adapters", got="one without", do="call add_adapters first"))
    tensors: dict[str, torch.Tensor] = {}
    for layer in adapted:
        for name, down, up in zip(layer.product.names, layer.down.split(layer.rank), layer.up, strict=True):
            tensors[f"base_model.model.{name}.lora_A.weight"], tensors[f"base_model.model.{name}.lora_B.weight"] = down, up
    first = adapted[0]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": first.rank,
        "lora_alpha": int(first.alpha) if float(first.alpha).is_integer() else first.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": first.product.transposed,
        "target_modules": sorted({_last(name) for layer in adapted for name in layer.product.names}),
        "inference_mode": True,
    }
    with NewFolder(Path(directory)) as folder:
        with folder.file("adapter_model.safetensors") as stream:
            for piece in file_pieces(tensors, {"format": "pt"}):
                put(stream, piece)
        folder.write("adapter_config.json", json.dumps(config, indent=2).encode() + b"\n")


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _places(model: LanguageModel) -> Iterator[_Place]:
    return _places_in(model.blueprint.body, model.body)


def _places_in(parts: Sequence[Part], container: nn.Module) -> Iterator[_Place]:
    """The products of ``parts``, whose modules are the children of ``container``, in order."""
    for part, (name, module) in zip(parts, list(container.named_children()), strict=True):
        made: Any = module
        if isinstance(part, Product):
            yield _Place(part, container, name)
        elif isinstance(part, Residual):
            yield from _places_in(part.parts, made)
        elif isinstance(part, Parallel):
            for branch, of_branch in zip(part.branches, made.branches, strict=True):
                yield from _places_in(branch, of_branch)
        elif isinstance(part, SharedExpert):
            yield from _places_in(part.shared, made.shared)
        elif isinstance(part, LatentAttention):
            yield _Place(part.compress, made, "compress")
            yield from _places_in(part.query, made.query) if part.query else ()
            yield from _places_in(part.expand, made.expand)
