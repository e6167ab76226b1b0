"""Pictures as rows: a product of each patch's pixels, a first row of its own, and positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fusible.errors import ArgumentError, ShapeError, expected
from fusible.models.parts import Product, Weights
from fusible.models.pretrained_model import Example

__all__ = ["PatchEmbedding", "Patches"]


@dataclass(frozen=True)
class Patches:
    """``first [1, 1, hidden]``, and then ``projection`` of each patch of ``patch`` pixels of a picture of ``image``, row after row; with the rows of
    ``positions [1, 1 + patches, hidden]`` added. The projection's weight is stored as a convolution's, ``[hidden, channels, *patch]``."""

    projection: str
    first: str
    positions: str
    hidden: int
    channels: int
    image: tuple[int, int]
    patch: tuple[int, int]

    @property
    def table(self) -> str:
        return self.positions

    @property
    def count(self) -> int:
        return (self.image[0] // self.patch[0]) * (self.image[1] // self.patch[1])

    @property
    def weight_shape(self) -> tuple[int, int, int, int]:
        return (self.hidden, self.channels, *self.patch)

    def example(self, device: torch.device) -> Example:
        return Example(torch.zeros(2, self.channels, *self.image, device=device), {0: ("batch", None)})

    def made(self, weights: Weights) -> nn.Module:
        positions = weights.values(self.positions, (1, 1 + self.count, self.hidden))
        first = weights.values(self.first, (1, 1, self.hidden))
        weight = weights.values(f"{self.projection}.weight", self.weight_shape).flatten(1)
        product = Product((self.projection,), (self.hidden,), weight.shape[1], bias=True, high_precision=True)
        return PatchEmbedding(self, positions, first, product.of(weight, product.biases(weights), weights))

    def stored(self, module: Any) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((self.positions, module.positions), (self.first, module.first))
        yield f"{self.projection}.weight", module.projection.weight.unflatten(1, self.weight_shape[1:])
        yield f"{self.projection}.bias", module.projection.bias


class PatchEmbedding(nn.Module):
    """``[batch, 1 + patches, hidden]`` of pixels ``[batch, channels, height, width]`` (see ``Patches``)."""

    counts_places = True

    def __init__(self, plan: Patches, positions: torch.Tensor, first: torch.Tensor, projection: nn.Module) -> None:
        super().__init__()
        self.positions, self.first, self.projection = nn.Parameter(positions), nn.Parameter(first), projection
        self.plan = plan

    def forward(self, pixels: torch.Tensor, seq_lens: torch.Tensor | None = None, token_types: torch.Tensor | None = None) -> torch.Tensor:
        plan, of = self.plan, "pixels of a model that sees"
        if seq_lens is not None or token_types is not None:
            name = "token_types" if seq_lens is None else "seq_lens"
            raise ArgumentError(expected("pixels alone", of="a call of a model that sees", got=name, do="leave it out"))
        wanted = (plan.channels, *plan.image)
        if pixels.dim() != 4 or tuple(pixels.shape[1:]) != wanted:
            raise ShapeError(expected(f"[batch, {', '.join(map(str, wanted))}]", of=of, got=list(pixels.shape), do="resize the pictures"))
        height, width = plan.patch
        cut = pixels.to(self.first.dtype).unflatten(3, (-1, width)).unflatten(2, (-1, height))  # [batch, channels, rows, height, columns, width]
        patches = cut.permute(0, 2, 4, 1, 3, 5).reshape(pixels.shape[0], plan.count, -1)
        rows = torch.cat([self.first.expand(pixels.shape[0], -1, -1), self.projection(patches)], 1)
        return rows + self.positions
