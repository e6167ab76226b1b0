"""The backward of a GELU and the linear layer after it: the product that gives the GELU's gradient multiplies it by the derivative too."""

from __future__ import annotations

from fusible import nvte
from fusible.fusions.add_activation import add_gelu_bwd_fused
from fusible.fusions.high_precision import Gradients, fused_backward
from fusible.fusions.mmt_add import mmt_add_backward
from fusible.fusions.products import OwnDx
from fusible.nvte import is_quantized_type
from fusible.ops import GELU, MMT, Add, Context

__all__ = ["add_gelu_mmt_add_bwd_fused", "gelu_mmt_bwd_fused"]


def _in_one(gelu: GELU, mmt: MMT) -> bool:
    """Whether the product is of 8-bit operands, for which every backend has this epilogue, and the GELU's input was not kept in 8 bits."""
    return is_quantized_type(mmt.dy_dtype) and is_quantized_type(mmt.weight_dtype) and not is_quantized_type(gelu.x_dtype)


def _taken(gelu: GELU, ctx: Context) -> nvte.Tensor:
    """The input of the GELU, taken out of the context: it is the widest tensor of all, and not needed again."""
    x = gelu.saved(ctx)
    del ctx["x"]
    return x


@fused_backward
def gelu_mmt_bwd_fused(gelu: GELU, mmt: OwnDx, gelu_ctx: Context, mmt_ctx: Context, dy: nvte.Tensor) -> Gradients:
    """``(dy @ weight) * gelu'(x)``, rounded once: the gradient between the two is never written."""
    if not (mmt.wants("x") and _in_one(gelu, mmt)):
        d, mmt_grads = mmt.backward(mmt_ctx, dy)
        assert d is not None
        dx, gelu_grads = gelu.backward(gelu_ctx, d)
        return dx, (gelu_grads, mmt_grads)
    dy = mmt.taken(dy)
    dx = nvte.matmul_dgelu(dy, mmt.operand(mmt_ctx["weight"]), _taken(gelu, gelu_ctx), gelu.dx_dtype)
    return dx, ([], [mmt.dweight(dy, mmt.taken_x(mmt_ctx)) if mmt.wants("weight") else None])


@fused_backward
def add_gelu_mmt_add_bwd_fused(
    add1: Add,
    gelu: GELU,
    mmt: OwnDx,
    add2: Add,
    add1_ctx: Context,
    gelu_ctx: Context,
    mmt_ctx: Context,
    add2_ctx: Context,
    dy: nvte.Tensor,
) -> Gradients:
    """The product multiplies by the derivative of the GELU and sums the first bias gradient; the gradient between the two is never written."""
    if not (add1.wants("bias") and add1.wants("x") and _in_one(gelu, mmt)):
        d, (mmt_grads, add2_grads) = mmt_add_backward(mmt, add2, mmt_ctx, add2_ctx, dy)
        assert d is not None
        dx, (add1_grads, gelu_grads) = add_gelu_bwd_fused(add1, gelu, add1_ctx, gelu_ctx, d)
        return dx, (add1_grads, gelu_grads, mmt_grads, add2_grads)
    d, add2_grads = add2.backward(add2_ctx, nvte.cast_checked(dy, add2.dy_dtype))
    assert d is not None
    d = mmt.taken(d)
    dx, dbias = nvte.matmul_dbias_dgelu(d, mmt.operand(mmt_ctx["weight"]), _taken(gelu, gelu_ctx), add1.dx_dtype, add1.dbias_dtype)
    return dx, ([dbias], [], [mmt.dweight(d, mmt.taken_x(mmt_ctx)) if mmt.wants("weight") else None], add2_grads)
