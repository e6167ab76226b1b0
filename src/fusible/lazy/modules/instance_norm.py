"""Normalization of each channel of each sample."""

from __future__ import annotations

from typing import Any

from fusible.lazy import dtypes
from fusible.lazy.frontend import Tensor
from fusible.lazy.locate import shows_user
from fusible.lazy.modules.checks import check_channels, check_sizes, check_spatial
from fusible.lazy.modules.normalization import Normalization, standardized
from fusible.lazy.ops.reductions import widened

__all__ = ["InstanceNorm"]


class InstanceNorm(Normalization):
    """``(x - mean) / sqrt(var + eps) * weight + bias``, the statistics taken per sample and channel over the spatial dimensions.

    ``weight`` and ``bias`` are ``[num_channels]`` of ``dtype``, a float; ``x`` is ``[N, num_channels, *spatial]`` of the same, with at least one
    spatial dimension. 16-bit floats are computed in float32 and rounded once.
    """

    @shows_user
    def __init__(self, num_channels: int, dtype: dtypes.dtype = dtypes.float32, eps: float = 1e-5) -> None:
        check_sizes("InstanceNorm", num_channels=num_channels)
        self.num_channels = num_channels
        self._declare("InstanceNorm", num_channels, dtype, eps)

    def forward(self, x: Any) -> Tensor:
        """``[N, num_channels, *spatial]`` to the same."""
        check_channels("InstanceNorm", x, self.num_channels, self.dtype)
        check_spatial("InstanceNorm", x)
        normal = standardized(widened(x), tuple(range(2, x.ndim)), self.eps)
        return self._affine(normal)
