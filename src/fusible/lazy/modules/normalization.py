"""The base of the normalizing modules: their parameters, and their arithmetic, in float32 for 16-bit floats and rounded once at the end."""

from __future__ import annotations

from fusible.errors import check_number
from fusible.lazy.dtypes import dtype
from fusible.lazy.frontend import Tensor
from fusible.lazy.modules.checks import float_dtype
from fusible.lazy.modules.module import Module
from fusible.lazy.modules.parameter import DefaultParameter
from fusible.lazy.ops.cast import cast
from fusible.lazy.ops.reductions import mean, widened
from fusible.lazy.ops.reshape import reshape
from fusible.lazy.ops.unary import rsqrt
from fusible.lazy.printing import Shape

__all__ = ["Normalization", "per_channel", "standardized"]


class Normalization(Module):
    """The base of a module that normalizes: ``weight`` and ``bias`` of one shape and of ``dtype``, and ``eps``."""

    weight: Tensor
    bias: Tensor

    def _declare(self, name: str, shape: Shape | int, dtype: dtype, eps: float) -> None:
        """Check ``dtype`` and ``eps`` on behalf of the class ``name``, and declare the parameters."""
        self.dtype = float_dtype(name, dtype)
        check_number(eps, f"eps of {name}", least=0)
        self.eps = eps
        self.weight = DefaultParameter(shape, dtype)
        self.bias = DefaultParameter(shape, dtype)

    def _affine(self, normal: Tensor) -> Tensor:
        """``normal * weight + bias`` per channel of ``[N, C, ...]``, rounded to ``dtype``."""
        return cast(normal * per_channel(self.weight, normal.ndim) + per_channel(self.bias, normal.ndim), self.dtype)


def standardized(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    """``(x - mean) / sqrt(var + eps)`` over ``dims`` of a widened tensor, where ``var = mean((x - mean)^2)``."""
    centered = x - mean(x, dims, keepdim=True)
    return centered * rsqrt(mean(centered * centered, dims, keepdim=True) + eps)


def per_channel(parameter: Tensor, ndim: int) -> Tensor:
    """``[C]`` as ``[C, 1, ...]``, widened, to meet a tensor ``[N, C, ...]`` of ``ndim`` dimensions."""
    return widened(reshape(parameter, (*parameter.shape, *(1,) * (ndim - 2))))
