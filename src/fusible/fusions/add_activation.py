"""A bias and the activation after it: the activation's backward also sums the gradient of the bias."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fusible import nvte, ops
from fusible.fusions.high_precision import fused_backward
from fusible.ops import Activation, Add, Context
from fusible.tex.activations import ELEMENTWISE
from fusible.tex.activations import Activation as Row


def _fused(row: Row) -> Callable[..., Any]:
    function = getattr(nvte, f"dbias_{row.gradient}")

    def fused(add: Add, act: Activation, add_ctx: Context, act_ctx: Context, dy: nvte.Tensor) -> Any:
        dy = nvte.cast_checked(dy, act.dy_dtype)
        if not (add.wants("bias") and add.wants("x")):
            d, _ = act.backward(act_ctx, dy)
            dx, add_grads = add.backward(add_ctx, d)
            return dx, (add_grads, [])
        dx, dbias = function(dy, act.saved(act_ctx), add.dx_dtype, add.dbias_dtype)
        return dx, ([dbias], [])

    fused.__name__ = fused.__qualname__ = f"add_{row.name}_bwd_fused"
    fused.__doc__ = f"{row.title}'s backward also sums the gradient of the bias."
    fused.__annotations__["act"] = getattr(ops, row.title)
    return fused_backward(fused)


_fusions = {fused.__name__: fused for fused in map(_fused, ELEMENTWISE)}
globals().update(_fusions)

__all__ = sorted(_fusions)  # pyright: ignore[reportUnsupportedDunderAll]
