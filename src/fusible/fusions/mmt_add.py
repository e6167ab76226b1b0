"""A linear layer with a bias: the bias is added, and its gradient summed, by the product."""

from __future__ import annotations

from collections.abc import Mapping

from fusible import nvte
from fusible.fusions.high_precision import Fused, Gradients, fused_backward, fused_forward, inference_of
from fusible.fusions.products import OwnY
from fusible.nvte import is_quantized_type
from fusible.ops import MMT, Add, AddExtra, Context, ResidualEnd

__all__ = [
    "mmt_add_add_fwd_fused",
    "mmt_add_add_inf_fused",
    "mmt_add_bwd_fused",
    "mmt_add_fwd_fused",
    "mmt_add_inf_fused",
    "mmt_add_residual_fwd_fused",
    "mmt_add_residual_inf_fused",
    "mmt_residual_fwd_fused",
    "mmt_residual_inf_fused",
]


def bias_of(add: Add) -> nvte.Tensor:
    """The bias in the type that the op asks for."""
    return nvte.cast_checked(add.bias, add.bias_dtype)


def extra_of(end: AddExtra, sides: Mapping[str, nvte.Tensor], mmt: MMT, x: nvte.Tensor) -> nvte.Tensor:
    """The extra tensor that is added to the product of ``x``. Raises ``ShapeError`` for another shape."""
    return end.extra(sides, (*x.shape[:-1], mmt.weight.shape[0]))


@fused_forward
def mmt_add_fwd_fused(mmt: OwnY, add: Add, x: nvte.Tensor) -> Fused:
    """``x @ weight.T + bias``, rounded once."""
    x, weight = mmt.operands(x)
    return nvte.matmul_transpose_add(x, weight, bias_of(add), add.y_dtype), lambda: (mmt.context(x, weight), {})


mmt_add_inf_fused = inference_of(mmt_add_fwd_fused)


@fused_backward
def mmt_add_bwd_fused(mmt: OwnY, add: Add, mmt_ctx: Context, add_ctx: Context, dy: nvte.Tensor) -> Gradients:
    """The weight's product sums the bias gradient too; an 8-bit gradient is summed while it is quantized, before it loses precision."""
    return mmt_add_backward(mmt, add, mmt_ctx, add_ctx, dy)


def mmt_add_backward(mmt: MMT, add: Add, mmt_ctx: Context, add_ctx: Context, dy: nvte.Tensor, addend: nvte.Tensor | None = None):
    """``mmt_add_bwd_fused``, with ``addend`` added to dx before it is rounded."""
    dy = nvte.cast_checked(dy, add.dy_dtype)
    quantized = any(is_quantized_type(type) for type in (dy.type, mmt.dy_dtype))
    if quantized or not mmt.sums_dbias or not (add.wants("bias") and mmt.wants("weight")) or mmt.dweight_so_far is not None:
        d, add_grads = add.backward(add_ctx, dy)
        assert d is not None
        dx, mmt_grads = mmt.backward(mmt_ctx, d, addend)
        return dx, (mmt_grads, add_grads)
    dy = nvte.cast_checked(nvte.cast_checked(dy, add.dx_dtype), mmt.dy_dtype)
    dx, (dweight, dbias) = mmt.products(mmt_ctx, dy, lambda x: nvte.transpose_matmul_dbias(dy, x, mmt.dweight_dtype, add.dbias_dtype), addend)
    return dx, ([dweight], [dbias])


@fused_forward
def mmt_add_residual_fwd_fused(mmt: MMT, add: Add, end: AddExtra | ResidualEnd, x: nvte.Tensor, **sides: nvte.Tensor) -> Fused:
    """``x @ weight.T + bias + extra``, summed in fp32 and rounded once."""
    x, weight = mmt.operands(x)
    y = nvte.matmul_transpose_add_add(x, weight, bias_of(add), extra_of(end, sides, mmt, x), end.y_dtype)
    return y, lambda: (mmt.context(x, weight), {}, {})


mmt_add_residual_inf_fused = inference_of(mmt_add_residual_fwd_fused)


@fused_forward
def mmt_residual_fwd_fused(mmt: MMT, end: AddExtra | ResidualEnd, x: nvte.Tensor, **sides: nvte.Tensor) -> Fused:
    """``x @ weight.T + extra``, summed in fp32 and rounded once."""
    x, weight = mmt.operands(x)
    return nvte.matmul_transpose_add_add(x, weight, None, extra_of(end, sides, mmt, x), end.y_dtype), lambda: (mmt.context(x, weight), {})


mmt_residual_inf_fused = inference_of(mmt_residual_fwd_fused)


@fused_forward
def mmt_add_add_fwd_fused(mmt: MMT, add1: Add, add2: Add, x: nvte.Tensor) -> Fused:
    """``x @ weight.T + (bias1 + bias2)``: the biases are added to each other first."""
    x, weight = mmt.operands(x)
    return nvte.matmul_transpose_add(x, weight, _sum(add1, add2), add2.y_dtype), lambda: (mmt.context(x, weight), {}, {})


mmt_add_add_inf_fused = inference_of(mmt_add_add_fwd_fused)


def _sum(add1: Add, add2: Add) -> nvte.Tensor:
    first, second = bias_of(add1), bias_of(add2)
    return nvte.add(first, second, nvte.accumulator(first.type))
