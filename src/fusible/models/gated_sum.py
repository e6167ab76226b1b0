"""``GatedSum``: a branch that every token takes by as much as a gate says, beside another."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["GatedSum"]


class GatedSum(nn.Module):
    """``y = main(x) + sigmoid(gate(x)) * shared(x)``, with ``gate(x) [*, 1]``."""

    def __init__(self, main: nn.Module, gate: nn.Module, shared: nn.Module) -> None:
        super().__init__()
        self.main, self.gate, self.shared = main, gate, shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.main(x) + torch.sigmoid(self.gate(x)) * self.shared(x)
