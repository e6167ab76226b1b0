"""The backward of a tensor that leaves the pipeline (a residual's begin) and of the op after it: one call adds the gradient that comes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fusible import nvte
from fusible.fusions.high_precision import Gradients, fused_backward
from fusible.fusions.mmt_add import mmt_add_backward
from fusible.ops import MMT, Add, Context, LayerNorm, MakeExtra, Op, ResidualBegin, RMSNorm

__all__ = ["make_extra_layernorm_bwd_fused", "make_extra_mmt_add_bwd_fused", "make_extra_mmt_bwd_fused", "make_extra_rmsnorm_bwd_fused"]

OpT = TypeVar("OpT", bound=Op)
Grads = TypeVar("Grads")


def _with_extra(
    begin: MakeExtra,
    begin_ctx: Context,
    sides: dict[str, nvte.Tensor | None],
    op: OpT,
    backward: Callable[[OpT, nvte.Tensor | None], tuple[nvte.Tensor | None, Grads]],
) -> tuple[nvte.Tensor | None, Grads]:
    """dx of both, and the gradients that ``backward`` of the op after ``begin`` gives: it adds the gradient of what left, where that goes to x."""
    addend = begin.dextra(sides) if begin.wants("x") else None
    if addend is not None:
        return backward(op.with_(dx_dtype=begin.dx_dtype), addend)
    d, grads = backward(op, None)
    return None if d is None else begin.backward(begin_ctx, d, **sides)[0], grads


@fused_backward
def make_extra_mmt_bwd_fused(
    begin: MakeExtra | ResidualBegin, mmt: MMT, begin_ctx: Context, mmt_ctx: Context, dy: nvte.Tensor, **sides: nvte.Tensor | None
) -> Gradients:
    """``dy @ weight + dextra``, summed in fp32 and rounded once."""
    dx, mmt_grads = _with_extra(begin, begin_ctx, sides, mmt, lambda mmt, addend: mmt.backward(mmt_ctx, dy, addend))
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
) -> Gradients:
    """``dy @ weight + dextra``, summed in fp32 and rounded once; the gradients of weight and bias as in ``mmt_add_bwd_fused``."""
    dx, grads = _with_extra(begin, begin_ctx, sides, mmt, lambda mmt, addend: mmt_add_backward(mmt, add, mmt_ctx, add_ctx, dy, addend))
    return dx, ([], *grads)


@fused_backward
def make_extra_rmsnorm_bwd_fused(
    begin: MakeExtra | ResidualBegin, norm: RMSNorm, begin_ctx: Context, norm_ctx: Context, dy: nvte.Tensor, **sides: nvte.Tensor | None
) -> Gradients:
    """The norm's backward adds ``dextra`` before it rounds."""
    dx, norm_grads = _with_extra(begin, begin_ctx, sides, norm, lambda norm, addend: norm.backward(norm_ctx, dy, addend))
    return dx, ([], norm_grads)


@fused_backward
def make_extra_layernorm_bwd_fused(
    begin: MakeExtra | ResidualBegin, norm: LayerNorm, begin_ctx: Context, norm_ctx: Context, dy: nvte.Tensor, **sides: nvte.Tensor | None
) -> Gradients:
    """The norm's backward adds ``dextra`` before it rounds."""
    dx, norm_grads = _with_extra(begin, begin_ctx, sides, norm, lambda norm, addend: norm.backward(norm_ctx, dy, addend))
    return dx, ([], norm_grads)
