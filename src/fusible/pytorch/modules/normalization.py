"""``LayerNorm`` and ``RMSNorm``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar

import torch
from torch import nn

from fusible import ops
from fusible.ops import Op
from fusible.pytorch.modules.initialization import Init, ones, zeros
from fusible.pytorch.modules.options import ModuleWithOptions

__all__ = ["LayerNorm", "RMSNorm", "gamma_init"]


def gamma_init(zero_centered_gamma: bool) -> Init:
    """How a norm's weight begins: such that it changes nothing."""
    return zeros if zero_centered_gamma else ones


class _Norm(ModuleWithOptions):
    fixed_options = frozenset({"features"})
    initial_options = frozenset({"param_dtype", "device"})
    op: ClassVar[Callable[..., Op]]
    names: ClassVar[tuple[str, ...]]
    """Those of the parameters, as the op takes them."""
    weight: nn.Parameter

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
        for name in self.names:
            self.register_parameter(name, nn.Parameter(torch.empty(features, dtype=param_dtype, device=device)))
        super().__init__(*self.make_ops())
        self.reset_parameters()

    def make_ops(self) -> Iterator[Op]:
        yield self.op(*map(self.tensor_of, self.names), eps=self.eps, zero_centered_gamma=self.zero_centered_gamma)

    @property
    def init_methods(self) -> Mapping[str, Init]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return {"weight": gamma_init(self.zero_centered_gamma), **dict.fromkeys(self.names[1:], zeros)}

    def extra_repr(self) -> str:
        return f"features={self.features}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


class LayerNorm(_Norm):
    """Layer normalization over the last dimension: ``weight [features]``, ``bias [features]`` (see ``ops.LayerNorm``)."""

    op, names = ops.LayerNorm, ("weight", "bias")
    bias: nn.Parameter


class RMSNorm(_Norm):
    """Root-mean-square normalization over the last dimension: ``weight [features]`` (see ``ops.RMSNorm``)."""

    op, names = ops.RMSNorm, ("weight",)
