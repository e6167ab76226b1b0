"""``Add``: a bias for every row."""

from __future__ import annotations

from typing import Unpack

from fusible import nvte
from fusible.nvte import DType
from fusible.ops.op import Context, Op, OpTypes, check_width
from fusible.ops.sharing import SharesColumns

__all__ = ["Add"]


class Add(SharesColumns, Op):
    """``y = x + bias`` with ``x [tokens, N]``, ``bias [N]``; ``dx = dy``, ``dbias`` = the sum of ``dy`` over rows."""

    rows_alone = True
    by_columns = ("bias",)
    quantizes_dx = True
    bias_dtype: nvte.Type | None = None
    dbias_dtype: nvte.DType = DType.BFloat16

    def __init__(self, bias: nvte.Tensor, **types: Unpack[OpTypes]) -> None:
        super().__init__(**types)
        self.bias = bias

    @property
    def args(self) -> list[nvte.Tensor]:
        return [self.bias]

    def forward(self, x: nvte.Tensor) -> tuple[nvte.Tensor, Context]:
        x = nvte.cast_checked(x, self.x_dtype)
        bias = nvte.cast_checked(self.bias, self.bias_dtype)
        return nvte.add(x, bias, self.y_dtype), {}

    def backward(self, ctx: Context, dy: nvte.Tensor) -> tuple[nvte.Tensor | None, list[nvte.Tensor | None]]:
        dy = nvte.cast_checked(dy, self.dy_dtype)
        if self.wants("x") and self.wants("bias"):
            dx, dbias = nvte.bgrad_cast(dy, self.dx_dtype, self.dbias_dtype)
            return dx, [dbias]
        if self.wants("x"):
            return nvte.cast_checked(dy, self.dx_dtype), [None]
        return None, [nvte.dbias(dy, self.dbias_dtype) if self.wants("bias") else None]

    def width(self, width: int | None) -> int | None:
        check_width(self, self.bias.shape[0], width)
        return width
