"""``LayerNorm`` and ``RMSNorm`` over the last dimensions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fusible import ops
from fusible.errors import check_number
from fusible.nvte import make_nvte_tensor
from fusible.ops import Op
from fusible.pytorch.ops.basic.parameters import WithParameters

__all__ = ["LayerNorm", "RMSNorm"]


class _Normalization(WithParameters):
    """``sm_margin`` is taken for compatibility: it reserves multiprocessors of a GPU, and changes no number.

    ``sequence_parallel``: whether each process has other rows of x, so that the gradients of the parameters are partial sums. It becomes an attribute
    of the parameters, which Megatron and ``reduce_sequence_parallel_gradients`` look at. In one list with the layer that scatters or gathers the rows
    it need not be given.
    """

    _names: tuple[str, ...]
    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(
        self,
        normalized_shape: int | Iterable[int],
        *,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        sm_margin: int | dict[str, int] = 0,
        sequence_parallel: bool | None = None,
    ) -> None:
        super().__init__()
        check_number(eps, f"eps of {type(self).__name__}", least=0)
        self.eps, self.zero_centered_gamma, self.sm_margin = eps, zero_centered_gamma, sm_margin
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        for name in self._names:
            parameter: Any = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            if sequence_parallel is not None:
                parameter.sequence_parallel = sequence_parallel
            self.register_parameter(name, parameter)
        self._fill()

    def reset_parameters(self) -> None:
        """A scale of 1 and a shift of 0. What is on the meta device is made first, on the default device."""
        self._materialize()
        for name in self._names:
            nn.init.constant_(getattr(self, name), 1.0 if name == "weight" and not self.zero_centered_gamma else 0.0)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


class LayerNorm(_Normalization):
    """Layer normalization: ``weight`` and ``bias`` of ``normalized_shape`` (see ``ops.LayerNorm``)."""

    _names = ("weight", "bias")

    def make_op(self) -> Op:
        weight, bias = make_nvte_tensor(self.weight), make_nvte_tensor(self.bias)
        return ops.LayerNorm(weight, bias, eps=self.eps, zero_centered_gamma=self.zero_centered_gamma)


class RMSNorm(_Normalization):
    """Root-mean-square normalization: ``weight`` of ``normalized_shape`` (see ``ops.RMSNorm``)."""

    _names = ("weight",)

    def make_op(self) -> Op:
        return ops.RMSNorm(make_nvte_tensor(self.weight), eps=self.eps, zero_centered_gamma=self.zero_centered_gamma)
