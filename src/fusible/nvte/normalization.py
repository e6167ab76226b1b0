"""Functions for the norms. ``gamma + 1`` stands for ``gamma`` where ``zero_centered_gamma``. Statistics are fp32, one per row; fp64 of fp64."""

from __future__ import annotations

from fusible import tex
from fusible.nvte.casting import cast_checked, emit, emitter
from fusible.nvte.dtype import DType, Type, accumulator, is_quantized_type
from fusible.nvte.tensor import Tensor

__all__ = ["dl2norm", "dlayernorm", "dlayernorm_add", "drmsnorm", "drmsnorm_add", "l2norm", "layernorm", "rmsnorm"]


def layernorm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered_gamma: bool, type: Type) -> tuple[Tensor, Tensor, Tensor]:
    """``y = (x - mu) * rsigma * weight + bias`` over the last dimension; ``(y [rows, width], mu [rows], rsigma [rows])``."""
    quantizer = emitter(type, x.shape)
    y, mu, rsigma = tex.layernorm_fwd(x.data, weight.data, bias.data, eps, None, quantizer, _unquantized(type), 0, zero_centered_gamma)
    return emit(y, type, quantizer), Tensor(mu, accumulator(x.type)), Tensor(rsigma, accumulator(x.type))


def dlayernorm(
    dy: Tensor, x: Tensor, mu: Tensor, rsigma: Tensor, weight: Tensor, zero_centered_gamma: bool, type: Type
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dx, dweight, dbias)`` of ``layernorm``; the last two in the type of ``weight``."""
    dx, dweight, dbias = tex.layernorm_bwd(dy.data, x.data, mu.data, rsigma.data, weight.data, 0, zero_centered_gamma)
    return _as(dx, x, type), Tensor(dweight, weight.type), Tensor(dbias, weight.type)


def rmsnorm(x: Tensor, weight: Tensor, eps: float, zero_centered_gamma: bool, type: Type) -> tuple[Tensor, Tensor]:
    """``y = x * rsigma * weight`` over the last dimension (Zhang and Sennrich 2019); ``(y [rows, width], rsigma [rows])``."""
    quantizer = emitter(type, x.shape)
    y, _, rsigma = tex.rmsnorm_fwd(x.data, weight.data, eps, None, quantizer, _unquantized(type), 0, zero_centered_gamma)
    return emit(y, type, quantizer), Tensor(rsigma, accumulator(x.type))


def drmsnorm(dy: Tensor, x: Tensor, rsigma: Tensor, weight: Tensor, zero_centered_gamma: bool, type: Type) -> tuple[Tensor, Tensor]:
    """``(dx, dweight)`` of ``rmsnorm``; the latter in the type of ``weight``."""
    dx, dweight = tex.rmsnorm_bwd(dy.data, x.data, rsigma.data, weight.data, 0, zero_centered_gamma)
    return _as(dx, x, type), Tensor(dweight, weight.type)


def dlayernorm_add(
    dy: Tensor, x: Tensor, mu: Tensor, rsigma: Tensor, weight: Tensor, zero_centered_gamma: bool, addend: Tensor, type: Type
) -> tuple[Tensor, Tensor, Tensor]:
    """``dlayernorm`` with ``addend`` (of ``x``'s shape) added to ``dx`` in fp32, before it is rounded."""
    dx, dweight, dbias = tex.prim.layernorm_bwd_add(dy.data, x.data, addend.data, mu.data, rsigma.data, weight.data, 0, zero_centered_gamma)
    return _as(dx, x, type), Tensor(dweight, weight.type), Tensor(dbias, weight.type)


def drmsnorm_add(
    dy: Tensor, x: Tensor, rsigma: Tensor, weight: Tensor, zero_centered_gamma: bool, addend: Tensor, type: Type
) -> tuple[Tensor, Tensor]:
    """``drmsnorm`` with ``addend`` (of ``x``'s shape) added to ``dx`` in fp32, before it is rounded."""
    dx, dweight = tex.rmsnorm_bwd_add(dy.data, x.data, addend.data, rsigma.data, weight.data, 0, zero_centered_gamma)
    return _as(dx, x, type), Tensor(dweight, weight.type)


def l2norm(x: Tensor, eps: float, type: Type) -> tuple[Tensor, Tensor]:
    """``y = x / sqrt(sum(x^2) + eps)`` over the last dimension; ``(y, rsigma [rows])``, the latter for ``dl2norm``.

    With ``n`` columns it is the RMS norm of ``weight = 1 / sqrt(n)`` and ``eps / n``, by whose kernels it is computed.
    """
    return rmsnorm(x, _l2_weight(x), eps / max(1, x.shape[-1]), False, type)


def dl2norm(dy: Tensor, x: Tensor, rsigma: Tensor, type: Type) -> Tensor:
    """``dx`` of ``l2norm``."""
    return drmsnorm(dy, x, rsigma, _l2_weight(x), False, type)[0]


def _l2_weight(x: Tensor) -> Tensor:
    width, type = x.shape[-1], accumulator(x.type)
    return Tensor(tex.prim.full((width,), max(1, width) ** -0.5, type, x.data), type)


def _unquantized(type: Type) -> DType:
    return DType.Float32 if is_quantized_type(type) else type  # type: ignore[return-value]


def _as(dx: object, x: Tensor, type: Type) -> Tensor:
    return cast_checked(Tensor(dx, x.type), type)
