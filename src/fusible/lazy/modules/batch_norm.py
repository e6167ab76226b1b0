"""Normalization by statistics that were learnt."""

from __future__ import annotations

from typing import Any

from fusible.lazy import dtypes
from fusible.lazy.frontend import Tensor
from fusible.lazy.locate import shows_user
from fusible.lazy.modules.checks import check_channels, check_sizes
from fusible.lazy.modules.normalization import Normalization, per_channel
from fusible.lazy.modules.parameter import DefaultParameter
from fusible.lazy.ops.cast import cast
from fusible.lazy.ops.reductions import widened
from fusible.lazy.ops.unary import rsqrt

__all__ = ["BatchNorm"]


class BatchNorm(Normalization):
    """``(x - running_mean) / sqrt(running_var + eps) * weight + bias`` per channel: inference, which changes no statistics.

    ``running_mean``, ``running_var``, ``weight`` and ``bias`` are ``[num_features]`` of ``dtype``, a float; ``x`` is ``[N, num_features, ...]`` of
    the same. 16-bit floats are computed in float32 and rounded once.
    """

    running_mean: Tensor
    running_var: Tensor

    @shows_user
    def __init__(self, num_features: int, dtype: dtypes.dtype = dtypes.float32, eps: float = 1e-5) -> None:
        check_sizes("BatchNorm", num_features=num_features)
        self.num_features = num_features
        self._declare("BatchNorm", num_features, dtype, eps)
        self.running_mean = DefaultParameter(num_features, dtype)
        self.running_var = DefaultParameter(num_features, dtype)

    def forward(self, x: Any) -> Tensor:
        """``[N, num_features, ...]`` to the same."""
        check_channels("BatchNorm", x, self.num_features, self.dtype)
        mean, var, weight, bias = (per_channel(p, x.ndim) for p in (self.running_mean, self.running_var, self.weight, self.bias))
        return cast((widened(x) - mean) * (rsqrt(var + self.eps) * weight) + bias, self.dtype)
