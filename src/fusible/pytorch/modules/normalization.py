"""``LayerNorm`` and ``RMSNorm``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fusible import ops
from fusible.nvte import Tensor, make_nvte_tensor
from fusible.ops import Op
from fusible.pytorch.modules.base import BaseModule
from fusible.pytorch.modules.initialization import Init, ones, zeros

__all__ = ["LayerNorm", "RMSNorm", "gamma_init"]


def gamma_init(zero_centered_gamma: bool) -> Init:
    """How a norm's weight begins: such that it changes nothing."""
    return zeros if zero_centered_gamma else ones


class _Norm(BaseModule):
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
        self.init_methods = {"weight": gamma_init(zero_centered_gamma)}
        self.weight = nn.Parameter(torch.empty(features, dtype=param_dtype, device=device))
        super().__init__(self._op(make_nvte_tensor(self.weight), eps=eps, zero_centered_gamma=zero_centered_gamma))
        self.reset_parameters()

    def _op(self, weight: Tensor, **options: Any) -> Op:
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"features={self.features}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


class LayerNorm(_Norm):
    """Layer normalization over the last dimension: ``weight [features]``, ``bias [features]`` (see ``ops.LayerNorm``)."""

    def _op(self, weight: Tensor, **options: Any) -> Op:
        self.init_methods = {**self.init_methods, "bias": zeros}
        self.bias = nn.Parameter(torch.empty_like(weight.data))
        return ops.LayerNorm(weight, make_nvte_tensor(self.bias), **options)


class RMSNorm(_Norm):
    """Root-mean-square normalization over the last dimension: ``weight [features]`` (see ``ops.RMSNorm``)."""

    def _op(self, weight: Tensor, **options: Any) -> Op:
        return ops.RMSNorm(weight, **options)
