"""The arithmetic that the normalizing modules share: in float32 for 16-bit floats, rounded once at the end."""

from __future__ import annotations

from fusible.lazy.frontend.tensor import Tensor
from fusible.lazy.ops.reductions import mean, widened
from fusible.lazy.ops.reshape import reshape
from fusible.lazy.ops.unary import rsqrt

__all__ = ["per_channel", "standardized"]


def standardized(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    """``(x - mean) / sqrt(var + eps)`` over ``dims`` of a widened tensor, where ``var = mean((x - mean)^2)``."""
    centered = x - mean(x, dims, keepdim=True)
    return centered * rsqrt(mean(centered * centered, dims, keepdim=True) + eps)


def per_channel(parameter: Tensor, ndim: int) -> Tensor:
    """``[C]`` as ``[C, 1, ...]``, widened, to meet a tensor ``[N, C, ...]`` of ``ndim`` dimensions."""
    return widened(reshape(parameter, (*parameter.shape, *(1,) * (ndim - 2))))
