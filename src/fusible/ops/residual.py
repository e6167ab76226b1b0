"""The two ends of a residual connection. What passes around is a side value: nothing is stored on the ops."""

from __future__ import annotations

from fusible import nvte
from fusible.nvte import DType
from fusible.ops.op import Context, Op

__all__ = ["ResidualBegin", "ResidualEnd"]


class ResidualBegin(Op):
    """``y = x``, and ``x`` goes around as ``residual``; ``dx = dy + dresidual``."""

    side_outputs = ("residual",)

    def __init__(
        self,
        *,
        x_dtype: nvte.Type | None = DType.BFloat16,
        dy_dtype: nvte.Type | None = None,
        y_dtype: nvte.Type = DType.BFloat16,
        dx_dtype: nvte.Type = DType.BFloat16,
    ) -> None:
        self.x_dtype = x_dtype
        self.dy_dtype = dy_dtype
        self.y_dtype = y_dtype
        self.dx_dtype = dx_dtype

    def forward(self, x: nvte.Tensor) -> tuple[nvte.Tensor, Context, dict[str, nvte.Tensor]]:
        x = nvte.cast_checked(x, self.x_dtype)
        return nvte.cast_checked(x, self.y_dtype), {}, {"residual": x}

    def backward(self, ctx: Context, dy: nvte.Tensor, *, residual: nvte.Tensor) -> tuple[nvte.Tensor | None, list[nvte.Tensor]]:
        return nvte.add(dy, residual, self.dx_dtype) if self.wants("x") else None, []


class ResidualEnd(Op):
    """``y = x + residual``; ``dx = dresidual = dy``."""

    side_inputs = ("residual",)

    def __init__(
        self,
        *,
        x_dtype: nvte.Type | None = None,
        dy_dtype: nvte.Type | None = DType.BFloat16,
        y_dtype: nvte.Type = DType.BFloat16,
        dx_dtype: nvte.Type = DType.BFloat16,
    ) -> None:
        self.x_dtype = x_dtype
        self.dy_dtype = dy_dtype
        self.y_dtype = y_dtype
        self.dx_dtype = dx_dtype

    def forward(self, x: nvte.Tensor, *, residual: nvte.Tensor) -> tuple[nvte.Tensor, Context]:
        x = nvte.cast_checked(x, self.x_dtype)
        return nvte.add(x, residual, self.y_dtype), {}

    def backward(self, ctx: Context, dy: nvte.Tensor) -> tuple[nvte.Tensor, list[nvte.Tensor], dict[str, nvte.Tensor]]:
        dy = nvte.cast_checked(dy, self.dy_dtype)
        return nvte.cast_checked(dy, self.dx_dtype), [], {"residual": dy}
