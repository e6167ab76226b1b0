"""``MMT``: the product with a transposed weight, the matrix part of a linear layer."""

from __future__ import annotations

from fusible import nvte
from fusible.nvte import DType
from fusible.ops.op import Context, Op, check_width

__all__ = ["MMT"]


class MMT(Op):
    """``y = x @ weight.T`` with ``x [tokens, K]``, ``weight [N, K]``; ``dx = dy @ weight``, ``dweight = dy.T @ x``."""

    quantizes_y = True
    quantizes_dx = True

    def __init__(
        self,
        weight: nvte.Tensor,
        *,
        x_dtype: nvte.Type | None = DType.Float8E4M3,
        weight_dtype: nvte.Type | None = DType.Float8E4M3,
        dy_dtype: nvte.Type | None = DType.Float8E5M2,
        y_dtype: nvte.Type = DType.BFloat16,
        dx_dtype: nvte.Type = DType.BFloat16,
        dweight_dtype: nvte.DType = DType.BFloat16,
    ) -> None:
        self.weight = weight
        self.x_dtype = x_dtype
        self.weight_dtype = weight_dtype
        self.dy_dtype = dy_dtype
        self.y_dtype = y_dtype
        self.dx_dtype = dx_dtype
        self.dweight_dtype = dweight_dtype

    @property
    def args(self) -> list[nvte.Tensor]:
        return [self.weight]

    def operands(self, x: nvte.Tensor) -> tuple[nvte.Tensor, nvte.Tensor]:
        """``x`` and the weight in the types of the product."""
        return nvte.cast_checked(x, self.x_dtype), nvte.cast_checked(self.weight, self.weight_dtype)

    def context(self, x: nvte.Tensor, weight: nvte.Tensor) -> Context:
        """What backward needs of the operands: x for dweight, the weight for dx."""
        ctx: Context = {}
        if self.wants("weight"):
            ctx["x"] = x
        if self.wants("x"):
            ctx["weight"] = weight
        return ctx

    def forward(self, x: nvte.Tensor) -> tuple[nvte.Tensor, Context]:
        x, weight = self.operands(x)
        return nvte.matmul_transpose(x, weight, self.y_dtype), self.context(x, weight)

    def inference(self, x: nvte.Tensor) -> nvte.Tensor:
        return nvte.matmul_transpose(*self.operands(x), self.y_dtype)

    def backward(self, ctx: Context, dy: nvte.Tensor) -> tuple[nvte.Tensor | None, list[nvte.Tensor | None]]:
        dy = nvte.cast_checked(dy, self.dy_dtype)
        dx = nvte.matmul(dy, ctx["weight"], self.dx_dtype) if self.wants("x") else None
        return dx, [self.dweight(ctx, dy) if self.wants("weight") else None]

    def dweight(self, ctx: Context, dy: nvte.Tensor) -> nvte.Tensor:
        """``dy.T @ x``, added to what the running pass has of it already, where it has something."""
        so_far = self.dweight_so_far
        if so_far is None:
            return nvte.transpose_matmul(dy, ctx["x"], self.dweight_dtype)
        return nvte.transpose_matmul_add(dy, ctx["x"], so_far)

    @property
    def dweight_so_far(self) -> nvte.Tensor | None:
        return nvte.current_pass().sums.get(f"{self.position}.weight")

    def width(self, width: int) -> int:
        columns, expects = self.weight.shape
        check_width(self, expects, width)
        return columns

    def extra_repr(self) -> str:
        return "{1} -> {0}".format(*self.weight.shape)
