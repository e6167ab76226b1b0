"""Words for the norms. ``gamma + 1`` stands for ``gamma`` where ``zero_centered_gamma``. Statistics are fp32, one per row."""

from __future__ import annotations

from fusible import tex
from fusible.nvte.casting import cast_checked, emit, quantizer_for
from fusible.nvte.dtype import DType, Type, is_quantized_type
from fusible.nvte.tensor import Tensor

__all__ = ["dlayernorm", "drmsnorm", "layernorm", "rmsnorm"]


def layernorm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered_gamma: bool, type: Type
) -> tuple[Tensor, Tensor, Tensor]:
    """``y = (x - mu) * rsigma * weight + bias`` over the last dimension; ``(y [rows, width], mu [rows], rsigma [rows])``."""
    quantizer = quantizer_for(type)
    y, mu, rsigma = tex.layernorm_fwd(
        x.data, weight.data, bias.data, eps, None, quantizer, _unquantized(type), 0, zero_centered_gamma
    )
    return emit(y, type, quantizer), Tensor(mu, DType.Float32), Tensor(rsigma, DType.Float32)


def dlayernorm(
    dy: Tensor, x: Tensor, mu: Tensor, rsigma: Tensor, weight: Tensor, zero_centered_gamma: bool, type: Type
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dx, dweight, dbias)`` of ``layernorm``; the last two in the type of ``weight``."""
    dx, dweight, dbias = tex.layernorm_bwd(dy.data, x.data, mu.data, rsigma.data, weight.data, 0, zero_centered_gamma)
    return _as(dx, x, type), Tensor(dweight, weight.type), Tensor(dbias, weight.type)


def rmsnorm(x: Tensor, weight: Tensor, eps: float, zero_centered_gamma: bool, type: Type) -> tuple[Tensor, Tensor]:
    """``y = x * rsigma * weight`` over the last dimension (Zhang and Sennrich 2019); ``(y [rows, width], rsigma [rows])``."""
    quantizer = quantizer_for(type)
    y, _, rsigma = tex.rmsnorm_fwd(x.data, weight.data, eps, None, quantizer, _unquantized(type), 0, zero_centered_gamma)
    return emit(y, type, quantizer), Tensor(rsigma, DType.Float32)


def drmsnorm(dy: Tensor, x: Tensor, rsigma: Tensor, weight: Tensor, zero_centered_gamma: bool, type: Type) -> tuple[Tensor, Tensor]:
    """``(dx, dweight)`` of ``rmsnorm``; the latter in the type of ``weight``."""
    dx, dweight = tex.rmsnorm_bwd(dy.data, x.data, rsigma.data, weight.data, 0, zero_centered_gamma)
    return _as(dx, x, type), Tensor(dweight, weight.type)


def _unquantized(type: Type) -> DType:
    return DType.Float32 if is_quantized_type(type) else type  # type: ignore[return-value]


def _as(dx: object, x: Tensor, type: Type) -> Tensor:
    return cast_checked(Tensor(dx, x.type), type)
