"""``Dropout``."""

from __future__ import annotations

from typing import Self, Unpack

from fusible import nvte
from fusible.errors import ArgumentError, expected
from fusible.nvte import DType
from fusible.ops.op import Context, Op, OpTypes
from fusible.ops.sharing import Process, SharesColumns

__all__ = ["Dropout"]


class Dropout(SharesColumns, Op):
    """While training, each element is zero with probability ``p``, else divided by ``1 - p`` (Srivastava et al. 2014); otherwise ``y = x``.

    The draw follows from the call's ``seed`` and the op's position alone, so every executor draws the same.
    """

    rows_alone = True
    x_dtype = DType.BFloat16
    dy_dtype = DType.BFloat16

    def __init__(self, p: float, **types: Unpack[OpTypes]) -> None:
        super().__init__(**types)
        if not 0 <= p < 1:
            raise ArgumentError(expected("a probability in [0, 1)", of="p of Dropout", got=p, do="give the share of elements to drop"))
        self.p = p

    @property
    def drops(self) -> bool:
        return self.training and self.p > 0

    @property
    def transparent(self) -> bool:
        return not self.drops

    @property
    def call_inputs(self) -> tuple[str, ...]:
        return ("seed",) if self.drops else ()

    def forward(self, x: nvte.Tensor, *, seed: nvte.Tensor | None = None) -> tuple[nvte.Tensor, Context]:
        x = nvte.cast_checked(x, self.x_dtype)
        if seed is None:
            return nvte.cast_checked(x, self.y_dtype), {}
        y, mask = nvte.dropout(x, self.p, seed, self.draws_at, self.y_dtype)
        return y, self.context(mask)

    def context(self, mask: nvte.Tensor) -> Context:
        return {"mask": mask}

    def backward(self, ctx: Context, dy: nvte.Tensor, *, seed: nvte.Tensor | None = None) -> tuple[nvte.Tensor, list[nvte.Tensor]]:
        dy = nvte.cast_checked(dy, self.dy_dtype)
        if "mask" not in ctx:
            return nvte.cast_checked(dy, self.dx_dtype), []
        return nvte.ddropout(dy, ctx["mask"], self.p, self.dx_dtype), []

    def share(self, process: Process) -> Self:
        return self.with_(stream=process.rank)

    def extra_repr(self) -> str:
        return f"p={self.p}"
