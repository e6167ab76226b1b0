"""Speech as rows: two convolutions over the frames of a spectrogram, and positions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fusible.errors import ArgumentError, ShapeError, expected
from fusible.models.parts import Weights
from fusible.models.pretrained_model import Example

__all__ = ["Speech", "SpeechEmbedding", "sinusoids"]

_WIDTH, _LONGEST = 3, 10000.0


def sinusoids(length: int, width: int) -> torch.Tensor:
    """fp32 ``[length, width]``: the sines of ``place * w_i``, then the cosines, with ``w_i`` from 1 down to 1/10000 in equal ratios."""
    ratio = math.log(_LONGEST) / (width // 2 - 1)
    angles = torch.arange(length, device="cpu")[:, None] * torch.exp(-ratio * torch.arange(width // 2, device="cpu"))
    return torch.cat([angles.sin(), angles.cos()], 1)


@dataclass(frozen=True)
class Speech:
    """``gelu(second(gelu(first(x))))`` with convolutions of 3 frames, the second of every other one, and the rows of ``positions [length, hidden]``
    added, which are sinusoids and are not trained."""

    first: str
    second: str
    positions: str
    bands: int
    hidden: int
    length: int

    @property
    def table(self) -> str:
        return self.positions

    def example(self, device: torch.device) -> Example:
        return Example(torch.zeros(2, self.bands, 2 * self.length, device=device), {0: ("batch", None)})

    def made(self, weights: Weights) -> nn.Module:
        first = self._convolution(weights, self.first, self.bands, 1)
        second = self._convolution(weights, self.second, self.hidden, 2)
        positions = weights.values(self.positions, (self.length, self.hidden), sinusoids(self.length, self.hidden))
        return SpeechEmbedding(first, second, positions)

    def _convolution(self, weights: Weights, name: str, channels: int, stride: int) -> nn.Conv1d:
        made = nn.Conv1d(channels, self.hidden, _WIDTH, stride, 1, device="meta", dtype=weights.dtype)
        weight = weights.values(f"{name}.weight", (self.hidden, channels, _WIDTH))
        made.load_state_dict({"weight": weight, "bias": weights.vector([f"{name}.bias"], [self.hidden])}, assign=True)
        return made

    def stored(self, module: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, layer in ((self.first, module.first), (self.second, module.second)):
            yield from ((f"{name}.{own}", parameter) for own, parameter in layer.named_parameters())
        yield self.positions, module.positions


class SpeechEmbedding(nn.Module):
    """``[batch, length, hidden]`` of ``[batch, bands, 2 length]``: of each frame the logarithms of what is in so many bands of frequencies (see
    ``Speech``)."""

    counts_places = True

    positions: torch.Tensor

    def __init__(self, first: nn.Conv1d, second: nn.Conv1d, positions: torch.Tensor) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.register_buffer("positions", positions)

    def forward(self, features: torch.Tensor, seq_lens: torch.Tensor | None = None, token_types: torch.Tensor | None = None) -> torch.Tensor:
        if seq_lens is not None or token_types is not None:
            name = "token_types" if seq_lens is None else "seq_lens"
            raise ArgumentError(expected("features alone", of="a call of a model that hears", got=name, do="pad with silence"))
        wanted = (self.first.in_channels, 2 * len(self.positions))
        if features.dim() != 3 or tuple(features.shape[1:]) != wanted:
            of, do = "features of a model that hears", "cut speech into pieces of that many frames, the last one padded with silence"
            raise ShapeError(expected(f"[batch, {wanted[0]}, {wanted[1]}]", of=of, got=list(features.shape), do=do))
        x = F.gelu(self.second(F.gelu(self.first(features.to(self.positions.dtype)))))
        return x.transpose(1, 2) + self.positions
