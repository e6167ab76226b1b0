"""A linear layer and a constant factor: the product takes the factor, and adds what joins after it."""

from __future__ import annotations

from fusible import nvte
from fusible.fusions.high_precision import Fused, Gradients, fused_backward, fused_forward, inference_of
from fusible.fusions.mmt_add import bias_of, extra_of
from fusible.nvte import is_quantized_type
from fusible.ops import MMT, Add, AddExtra, ConstantScale, Context, ResidualEnd

__all__ = [
    "mmt_add_scale_extra_fwd_fused",
    "mmt_add_scale_extra_inf_fused",
    "mmt_scale_bwd_fused",
    "mmt_scale_extra_fwd_fused",
    "mmt_scale_extra_inf_fused",
]


@fused_forward
def mmt_scale_extra_fwd_fused(mmt: MMT, scale: ConstantScale, end: AddExtra | ResidualEnd, x: nvte.Tensor, **sides: nvte.Tensor) -> Fused:
    """``scale * x @ weight.T + extra``, summed in fp32 and rounded once."""
    x, weight = mmt.operands(x)
    y = nvte.matmul_transpose_add_add(x, weight, None, extra_of(end, sides, mmt, x), end.y_dtype, scale.scale)
    return y, lambda: (mmt.context(x, weight), {}, {})


mmt_scale_extra_inf_fused = inference_of(mmt_scale_extra_fwd_fused)


@fused_forward
def mmt_add_scale_extra_fwd_fused(
    mmt: MMT, add: Add, scale: ConstantScale, end: AddExtra | ResidualEnd, x: nvte.Tensor, **sides: nvte.Tensor
) -> Fused:
    """``scale * x @ weight.T + scale * bias + extra``, summed in fp32 and rounded once."""
    x, weight = mmt.operands(x)
    y = nvte.matmul_transpose_add_add(x, weight, _scaled_bias(add, scale), extra_of(end, sides, mmt, x), end.y_dtype, scale.scale)
    return y, lambda: (mmt.context(x, weight), {}, {}, {})


mmt_add_scale_extra_inf_fused = inference_of(mmt_add_scale_extra_fwd_fused)


def _scaled_bias(add: Add, scale: ConstantScale) -> nvte.Tensor:
    """The bias times the factor: the product applies its factor to ``x @ weight.T`` alone."""
    bias = bias_of(add)
    return nvte.scale(bias, scale.scale, nvte.accumulator(bias.type))


@fused_backward
def mmt_scale_bwd_fused(mmt: MMT, scale: ConstantScale, mmt_ctx: Context, scale_ctx: Context, dy: nvte.Tensor) -> Gradients:
    """Both products take the factor, and the scaled gradient is never written.

    A gradient that is to be 8-bit is scaled first: the amax that its scaling observes is that of the scaled one.
    """
    if is_quantized_type(mmt.dy_dtype):
        d, _ = scale.backward(scale_ctx, dy)
        dx, mmt_grads = mmt.backward(mmt_ctx, d)
        return dx, (mmt_grads, [])
    dy = nvte.cast_checked(nvte.cast_checked(dy, scale.dy_dtype), mmt.dy_dtype)
    dx = nvte.matmul(dy, mmt.operand(mmt_ctx["weight"]), mmt.dx_dtype, scale.scale) if mmt.wants("x") else None
    return dx, ([mmt.dweight(dy, mmt.taken_x(mmt_ctx), scale.scale) if mmt.wants("weight") else None], [])
