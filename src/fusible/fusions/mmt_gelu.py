"""A linear layer and its GELU in one product; the input of the GELU is kept for backward."""

from __future__ import annotations

from fusible import nvte
from fusible.fusions.add_activation import add_gelu_bwd_fused
from fusible.fusions.high_precision import Fused, Gradients, fused_backward, fused_forward, inference_of
from fusible.fusions.mmt_add import bias_of, extra_of
from fusible.fusions.products import OwnY
from fusible.nvte import DType, element
from fusible.ops import GELU, MMT, Add, AddExtra, Context, GeGLU, ResidualEnd

__all__ = [
    "mmt_add_gelu_add_fwd_fused",
    "mmt_add_gelu_add_inf_fused",
    "mmt_add_gelu_bwd_fused",
    "mmt_add_gelu_fwd_fused",
    "mmt_add_gelu_inf_fused",
    "mmt_add_gelu_residual_fwd_fused",
    "mmt_add_gelu_residual_inf_fused",
    "mmt_geglu_bwd_fused",
    "mmt_gelu_add_fwd_fused",
    "mmt_gelu_add_inf_fused",
    "mmt_gelu_fwd_fused",
    "mmt_gelu_inf_fused",
    "mmt_gelu_residual_fwd_fused",
    "mmt_gelu_residual_inf_fused",
]


def _pre_type(gelu: GELU, producer: MMT | Add) -> DType:
    """The type of the GELU's input: what the GELU asks for, else what its producer gives."""
    return element(gelu.x_dtype if gelu.x_dtype is not None else producer.y_dtype)


@fused_forward
def mmt_gelu_fwd_fused(mmt: OwnY, gelu: GELU, x: nvte.Tensor) -> Fused:
    """``gelu(x @ weight.T)``: the product applies the GELU; its input is kept."""
    x, weight = mmt.operands(x)
    y, pre = nvte.matmul_transpose_gelu(x, weight, gelu.y_dtype, _pre_type(gelu, mmt))
    return y, lambda: (mmt.context(x, weight), gelu.context(pre))


mmt_gelu_inf_fused = inference_of(mmt_gelu_fwd_fused)


@fused_forward
def mmt_add_gelu_fwd_fused(mmt: OwnY, add: Add, gelu: GELU, x: nvte.Tensor) -> Fused:
    """``gelu(x @ weight.T + bias)``: the product applies the GELU; its input is kept."""
    x, weight = mmt.operands(x)
    y, pre = nvte.matmul_transpose_add_gelu(x, weight, bias_of(add), gelu.y_dtype, _pre_type(gelu, add))
    return y, lambda: (mmt.context(x, weight), {}, gelu.context(pre))


mmt_add_gelu_inf_fused = inference_of(mmt_add_gelu_fwd_fused)


@fused_backward
def mmt_add_gelu_bwd_fused(mmt: OwnY, add: Add, gelu: GELU, mmt_ctx: Context, add_ctx: Context, gelu_ctx: Context, dy: nvte.Tensor) -> Gradients:
    """GELU's backward also sums the gradient of the bias, and writes what the product's backward reads."""
    d, (add_grads, gelu_grads) = add_gelu_bwd_fused(add, gelu, add_ctx, gelu_ctx, dy)
    assert d is not None
    dx, mmt_grads = mmt.backward(mmt_ctx, d)
    return dx, (mmt_grads, add_grads, gelu_grads)


@fused_forward
def mmt_gelu_add_fwd_fused(mmt: MMT, gelu: GELU, add: Add, x: nvte.Tensor) -> Fused:
    """``gelu(x @ weight.T) + bias``; its input is kept."""
    x, weight = mmt.operands(x)
    y, pre = nvte.matmul_transpose_gelu_add(x, weight, bias_of(add), add.y_dtype, _pre_type(gelu, mmt))
    return y, lambda: (mmt.context(x, weight), gelu.context(pre), {})


mmt_gelu_add_inf_fused = inference_of(mmt_gelu_add_fwd_fused)


@fused_forward
def mmt_gelu_residual_fwd_fused(mmt: MMT, gelu: GELU, end: AddExtra | ResidualEnd, x: nvte.Tensor, **sides: nvte.Tensor) -> Fused:
    """``gelu(x @ weight.T) + extra``; its input is kept."""
    x, weight = mmt.operands(x)
    y, pre = nvte.matmul_transpose_gelu_add(x, weight, extra_of(end, sides, mmt, x), end.y_dtype, _pre_type(gelu, mmt))
    return y, lambda: (mmt.context(x, weight), gelu.context(pre), {})


mmt_gelu_residual_inf_fused = inference_of(mmt_gelu_residual_fwd_fused)


@fused_forward
def mmt_add_gelu_add_fwd_fused(mmt: MMT, add1: Add, gelu: GELU, add2: Add, x: nvte.Tensor) -> Fused:
    """``gelu(x @ weight.T + bias1) + bias2``; its input is kept."""
    x, weight = mmt.operands(x)
    y, pre = nvte.matmul_transpose_add_gelu_add(x, weight, bias_of(add1), bias_of(add2), add2.y_dtype, _pre_type(gelu, add1))
    return y, lambda: (mmt.context(x, weight), {}, gelu.context(pre), {})


mmt_add_gelu_add_inf_fused = inference_of(mmt_add_gelu_add_fwd_fused)


@fused_forward
def mmt_add_gelu_residual_fwd_fused(mmt: MMT, add: Add, gelu: GELU, end: AddExtra | ResidualEnd, x: nvte.Tensor, **sides: nvte.Tensor) -> Fused:
    """``gelu(x @ weight.T + bias) + extra``; its input is kept."""
    x, weight = mmt.operands(x)
    y, pre = nvte.matmul_transpose_add_gelu_add(x, weight, bias_of(add), extra_of(end, sides, mmt, x), end.y_dtype, _pre_type(gelu, add))
    return y, lambda: (mmt.context(x, weight), {}, gelu.context(pre), {})


mmt_add_gelu_residual_inf_fused = inference_of(mmt_add_gelu_residual_fwd_fused)


@fused_backward
def mmt_geglu_bwd_fused(mmt: OwnY, geglu: GeGLU, mmt_ctx: Context, geglu_ctx: Context, dy: nvte.Tensor) -> Gradients:
    """GeGLU's backward writes what the product's backward reads."""
    d, _ = geglu.backward(geglu_ctx, dy)
    dx, mmt_grads = mmt.backward(mmt_ctx, d)
    return dx, (mmt_grads, [])
