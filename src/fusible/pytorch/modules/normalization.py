"""``LayerNorm`` and ``RMSNorm``."""

from __future__ import annotations

import torch
from torch import nn

from fusible import ops
from fusible.nvte import make_nvte_tensor
from fusible.pytorch.modules.base import BaseModule

__all__ = ["LayerNorm", "RMSNorm", "new_gamma"]


def new_gamma(features: int, zero_centered_gamma: bool, dtype: torch.dtype | None, device: torch.device | str | None) -> nn.Parameter:
    """A norm's weight as it begins: such that it changes nothing."""
    return nn.Parameter(torch.full((features,), 0.0 if zero_centered_gamma else 1.0, dtype=dtype, device=device))


class LayerNorm(BaseModule):
    """Layer normalization over the last dimension: ``weight [features]``, ``bias [features]`` (see ``ops.LayerNorm``)."""

    def __init__(
        self,
        features: int,
        eps: float = 1e-5,
        zero_centered_gamma: bool = False,
        param_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.features, self.eps, self.zero_centered_gamma = features, eps, zero_centered_gamma
        self.weight = new_gamma(features, zero_centered_gamma, param_dtype, device)
        self.bias = nn.Parameter(torch.zeros(features, dtype=param_dtype, device=device))
        super().__init__(ops.LayerNorm(make_nvte_tensor(self.weight), make_nvte_tensor(self.bias), eps=eps, zero_centered_gamma=zero_centered_gamma))

    def extra_repr(self) -> str:
        return f"features={self.features}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


class RMSNorm(BaseModule):
    """Root-mean-square normalization over the last dimension: ``weight [features]`` (see ``ops.RMSNorm``)."""

    def __init__(
        self,
        features: int,
        eps: float = 1e-5,
        zero_centered_gamma: bool = False,
        param_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.features, self.eps, self.zero_centered_gamma = features, eps, zero_centered_gamma
        self.weight = new_gamma(features, zero_centered_gamma, param_dtype, device)
        super().__init__(ops.RMSNorm(make_nvte_tensor(self.weight), eps=eps, zero_centered_gamma=zero_centered_gamma))

    def extra_repr(self) -> str:
        return f"features={self.features}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"
