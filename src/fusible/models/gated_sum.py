"""``GatedSum``: a branch that every token takes, by as much as a gate says or whole, beside another."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["GatedSum"]


class GatedSum(nn.Module):
    """``y = main(x) + sigmoid(gate(x)) * shared(x)``, with ``gate(x) [*, 1]``; without a gate ``main(x) + shared(x)``."""

    reads_whole_parts = True

    def __init__(self, main: nn.Module, gate: nn.Module | None, shared: nn.Module) -> None:
        super().__init__()
        self.main, self.gate, self.shared = main, gate, shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.main(x)
        return y + (self.shared(x) if self.gate is None else torch.sigmoid(self.gate(x)) * self.shared(x))
