"""Normalization over the last dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusible.lazy import dtypes
from fusible.lazy.frontend import Tensor, as_shape
from fusible.lazy.locate import shows_user
from fusible.lazy.modules.checks import check_trailing
from fusible.lazy.modules.normalization import Normalization, standardized
from fusible.lazy.ops.cast import cast
from fusible.lazy.ops.reductions import widened

__all__ = ["LayerNorm"]


class LayerNorm(Normalization):
    """``(x - mean) / sqrt(var + eps) * weight + bias``, the statistics taken over the last dimensions ``normalized_shape``.

    ``weight`` and ``bias`` are ``[*normalized_shape]`` of ``dtype``, a float; ``x`` is ``[..., *normalized_shape]`` of the same. 16-bit floats are
    computed in float32 and rounded once.
    """

    @shows_user
    def __init__(self, normalized_shape: int | Sequence[int], dtype: dtypes.dtype = dtypes.float32, eps: float = 1e-5) -> None:
        self.normalized_shape = as_shape(normalized_shape, "normalized_shape of LayerNorm")
        self._declare("LayerNorm", self.normalized_shape, dtype, eps)

    def forward(self, x: Any) -> Tensor:
        """``[..., *normalized_shape]`` to the same."""
        check_trailing("LayerNorm", x, self.normalized_shape, self.dtype)
        dims = tuple(range(x.ndim - len(self.normalized_shape), x.ndim))
        return cast(standardized(widened(x), dims, self.eps) * widened(self.weight) + widened(self.bias), self.dtype)
