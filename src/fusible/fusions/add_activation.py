"""A bias and the activation after it: the activation's backward also sums the gradient of the bias."""

from __future__ import annotations

from fusible import nvte
from fusible.fusions.high_precision import fused_backward
from fusible.nvte.activation import ActivationBiasBackward
from fusible.ops import GELU, QGELU, Activation, Add, Context, ReLU, SiLU, SReLU

__all__ = ["add_gelu_bwd_fused", "add_qgelu_bwd_fused", "add_relu_bwd_fused", "add_silu_bwd_fused", "add_srelu_bwd_fused"]


def _backward(word: ActivationBiasBackward, add: Add, act: Activation, add_ctx: Context, act_ctx: Context, dy: nvte.Tensor):
    dy = nvte.cast_checked(dy, act.dy_dtype)
    if not (add.wants("bias") and add.wants("x")):
        d, _ = act.backward(act_ctx, dy)
        dx, add_grads = add.backward(add_ctx, d)
        return dx, (add_grads, [])
    dx, dbias = word(dy, act.saved(act_ctx), add.dx_dtype, add.dbias_dtype)
    return dx, ([dbias], [])


@fused_backward
def add_gelu_bwd_fused(add: Add, gelu: GELU, add_ctx: Context, gelu_ctx: Context, dy: nvte.Tensor):
    """GELU's backward also sums the gradient of the bias."""
    return _backward(nvte.dbias_dgelu, add, gelu, add_ctx, gelu_ctx, dy)


@fused_backward
def add_qgelu_bwd_fused(add: Add, qgelu: QGELU, add_ctx: Context, qgelu_ctx: Context, dy: nvte.Tensor):
    """QGELU's backward also sums the gradient of the bias."""
    return _backward(nvte.dbias_dqgelu, add, qgelu, add_ctx, qgelu_ctx, dy)


@fused_backward
def add_relu_bwd_fused(add: Add, relu: ReLU, add_ctx: Context, relu_ctx: Context, dy: nvte.Tensor):
    """ReLU's backward also sums the gradient of the bias."""
    return _backward(nvte.dbias_drelu, add, relu, add_ctx, relu_ctx, dy)


@fused_backward
def add_silu_bwd_fused(add: Add, silu: SiLU, add_ctx: Context, silu_ctx: Context, dy: nvte.Tensor):
    """SiLU's backward also sums the gradient of the bias."""
    return _backward(nvte.dbias_dsilu, add, silu, add_ctx, silu_ctx, dy)


@fused_backward
def add_srelu_bwd_fused(add: Add, srelu: SReLU, add_ctx: Context, srelu_ctx: Context, dy: nvte.Tensor):
    """SReLU's backward also sums the gradient of the bias."""
    return _backward(nvte.dbias_dsrelu, add, srelu, add_ctx, srelu_ctx, dy)
