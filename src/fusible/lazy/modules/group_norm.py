"""Normalization over groups of channels."""

from __future__ import annotations

from typing import Any

from fusible.errors import ArgumentError, expected
from fusible.lazy import dtypes
from fusible.lazy.frontend import Tensor
from fusible.lazy.locate import shows_user
from fusible.lazy.modules.checks import check_channels, check_sizes
from fusible.lazy.modules.normalization import Normalization, standardized
from fusible.lazy.ops.reductions import widened
from fusible.lazy.ops.reshape import reshape

__all__ = ["GroupNorm"]


class GroupNorm(Normalization):
    """``(x - mean) / sqrt(var + eps) * weight + bias``, the statistics taken per sample over each of ``num_groups`` groups of channels.

    ``weight`` and ``bias`` are ``[num_channels]`` of ``dtype``, a float; ``x`` is ``[N, num_channels, ...]`` of the same. 16-bit floats are computed
    in float32 and rounded once. Raises ``ArgumentError`` where ``num_groups`` does not divide ``num_channels``.
    """

    @shows_user
    def __init__(self, num_groups: int, num_channels: int, dtype: dtypes.dtype = dtypes.float32, eps: float = 1e-5) -> None:
        check_sizes("GroupNorm", num_groups=num_groups, num_channels=num_channels)
        if num_groups < 1 or num_channels % num_groups:
            raise ArgumentError(expected(f"a divisor of {num_channels}", of="num_groups of GroupNorm", got=num_groups, do="change one of them"))
        self.num_groups = num_groups
        self.num_channels = num_channels
        self._declare("GroupNorm", num_channels, dtype, eps)

    def forward(self, x: Any) -> Tensor:
        """``[N, num_channels, ...]`` to the same."""
        check_channels("GroupNorm", x, self.num_channels, self.dtype)
        samples, channels, *spatial = x.shape
        grouped = reshape(widened(x), (samples, self.num_groups, channels // self.num_groups, *spatial))
        normal = reshape(standardized(grouped, tuple(range(2, grouped.ndim)), self.eps), x.shape)
        return self._affine(normal)
