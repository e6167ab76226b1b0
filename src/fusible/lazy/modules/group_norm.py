"""Normalization over groups of channels."""

from __future__ import annotations

from typing import Any

from fusible.errors import ArgumentError, check_number, expected
from fusible.lazy import dtypes
from fusible.lazy.frontend.tensor import Tensor
from fusible.lazy.locate import shows_user
from fusible.lazy.modules.checks import check_channels, check_sizes, float_dtype
from fusible.lazy.modules.module import Module
from fusible.lazy.modules.normalization import per_channel, standardized
from fusible.lazy.modules.parameter import DefaultParameter
from fusible.lazy.ops.cast import cast
from fusible.lazy.ops.reductions import widened
from fusible.lazy.ops.reshape import reshape

__all__ = ["GroupNorm"]


class GroupNorm(Module):
    """``(x - mean) / sqrt(var + eps) * weight + bias``, the statistics taken per sample over each of ``num_groups`` groups of channels.

    ``weight`` and ``bias`` are ``[num_channels]`` of ``dtype``, a float; ``x`` is ``[N, num_channels, ...]`` of the same. 16-bit floats are computed
    in float32 and rounded once. Raises ``ArgumentError`` where ``num_groups`` does not divide ``num_channels``.
    """

    weight: Tensor
    bias: Tensor

    @shows_user
    def __init__(self, num_groups: int, num_channels: int, dtype: dtypes.dtype = dtypes.float32, eps: float = 1e-5) -> None:
        check_sizes("GroupNorm", num_groups=num_groups, num_channels=num_channels)
        if num_groups < 1 or num_channels % num_groups:
            raise ArgumentError(expected(f"a divisor of {num_channels}", of="num_groups of GroupNorm", got=num_groups, do="change one of them"))
        self.dtype = float_dtype("GroupNorm", dtype)
        self.num_groups = num_groups
        self.num_channels = num_channels
        check_number(eps, "eps of GroupNorm", least=0)
        self.eps = eps
        self.weight = DefaultParameter(num_channels, dtype)
        self.bias = DefaultParameter(num_channels, dtype)

    def forward(self, x: Any) -> Tensor:
        """``[N, num_channels, ...]`` to the same."""
        check_channels("GroupNorm", x, self.num_channels, self.dtype)
        samples, channels, *spatial = x.shape
        grouped = reshape(widened(x), (samples, self.num_groups, channels // self.num_groups, *spatial))
        normal = reshape(standardized(grouped, tuple(range(2, grouped.ndim)), self.eps), x.shape)
        return cast(normal * per_channel(self.weight, x.ndim) + per_channel(self.bias, x.ndim), self.dtype)
