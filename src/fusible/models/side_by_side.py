"""``SideBySide``: layers of one input, whose outputs lie one behind the other."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["SideBySide"]


class SideBySide(nn.Module):
    """``y = [layer(x) for each layer]``, ``[*, sum of their outputs]``.

    It takes the place of one product where the weights have scales of their own, so that no quantized tensor has the values of all.
    """

    reads_whole_parts = True

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([layer(x) for layer in self.layers], -1)
