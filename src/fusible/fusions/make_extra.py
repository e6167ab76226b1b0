"""The backward of a tensor that leaves the pipeline (a residual's begin) and of the op after it: one call adds the gradient that comes back."""

from __future__ import annotations

from fusible import nvte
from fusible.fusions.high_precision import fused_backward
from fusible.fusions.mmt_add import mmt_add_backward
from fusible.ops import MMT, Add, Context, LayerNorm, MakeExtra, ResidualBegin, RMSNorm

__all__ = ["make_extra_layernorm_bwd_fused", "make_extra_mmt_add_bwd_fused", "make_extra_mmt_bwd_fused", "make_extra_rmsnorm_bwd_fused"]


def _addend(begin: MakeExtra, sides: dict[str, nvte.Tensor | None]) -> nvte.Tensor | None:
    """The gradient of what left, where it is to be added to that of x."""
    return begin.dextra(sides) if begin.wants("x") else None


@fused_backward
def make_extra_mmt_bwd_fused(
    begin: MakeExtra | ResidualBegin, mmt: MMT, begin_ctx: Context, mmt_ctx: Context, dy: nvte.Tensor, **sides: nvte.Tensor | None
):
    """``dy @ weight + dextra``, summed in fp32 and rounded once."""
    addend = _addend(begin, sides)
    if addend is None:
        d, mmt_grads = mmt.backward(mmt_ctx, dy)
        return None if d is None else begin.backward(begin_ctx, d, **sides)[0], ([], mmt_grads)
    dx, mmt_grads = mmt.with_(dx_dtype=begin.dx_dtype).backward(mmt_ctx, dy, addend)
    return dx, ([], mmt_grads)


@fused_backward
def make_extra_mmt_add_bwd_fused(
    begin: MakeExtra | ResidualBegin,
    mmt: MMT,
    add: Add,
    begin_ctx: Context,
    mmt_ctx: Context,
    add_ctx: Context,
    dy: nvte.Tensor,
    **sides: nvte.Tensor | None,
):
    """``dy @ weight + dextra``, summed in fp32 and rounded once; the gradients of weight and bias as in ``mmt_add_bwd_fused``."""
    addend = _addend(begin, sides)
    if addend is None:
        d, grads = mmt_add_backward(mmt, add, mmt_ctx, add_ctx, dy)
        return None if d is None else begin.backward(begin_ctx, d, **sides)[0], ([], *grads)
    dx, grads = mmt_add_backward(mmt.with_(dx_dtype=begin.dx_dtype), add, mmt_ctx, add_ctx, dy, addend)
    return dx, ([], *grads)


@fused_backward
def make_extra_rmsnorm_bwd_fused(
    begin: MakeExtra | ResidualBegin, norm: RMSNorm, begin_ctx: Context, norm_ctx: Context, dy: nvte.Tensor, **sides: nvte.Tensor | None
):
    """The norm's backward adds ``dextra`` before it rounds."""
    addend = _addend(begin, sides)
    if addend is None:
        d, norm_grads = norm.backward(norm_ctx, dy)
        return begin.backward(begin_ctx, d, **sides)[0], ([], norm_grads)
    dx, norm_grads = norm.with_(dx_dtype=begin.dx_dtype).backward(norm_ctx, dy, addend)
    return dx, ([], norm_grads)


@fused_backward
def make_extra_layernorm_bwd_fused(
    begin: MakeExtra | ResidualBegin, norm: LayerNorm, begin_ctx: Context, norm_ctx: Context, dy: nvte.Tensor, **sides: nvte.Tensor | None
):
    """The norm's backward adds ``dextra`` before it rounds."""
    addend = _addend(begin, sides)
    if addend is None:
        d, norm_grads = norm.backward(norm_ctx, dy)
        return begin.backward(begin_ctx, d, **sides)[0], ([], norm_grads)
    dx, norm_grads = norm.with_(dx_dtype=begin.dx_dtype).backward(norm_ctx, dy, addend)
    return dx, ([], norm_grads)
