"""``AllGather``, ``AllReduce``, ``ReduceScatter``: what passes between the processes of a group, along the first dimension."""

from __future__ import annotations

from typing import Any

from fusible import nvte
from fusible.ops.op import Context, Op
from fusible.ops.protocols import ShardsRows

__all__ = ["AllGather", "AllReduce", "Collective", "ReduceScatter"]

Gradients = tuple[nvte.Tensor | None, list[nvte.Tensor | None]]


class Collective(Op):
    """Base: an op between the processes of ``group`` (None: all of them). It communicates unquantized tensors."""

    def __init__(self, group: Any = None) -> None:
        self.group = group


class AllGather(ShardsRows, Collective):
    """``y`` = the ``x [rows, *]`` of all processes, one after the other; ``dx`` = the process's rows of the sum of all ``dy``."""

    reshards = "gathers"

    def forward(self, x: nvte.Tensor) -> tuple[nvte.Tensor, Context]:
        return nvte.all_gather(nvte.cast_checked(x, self.y_dtype), self.group), {}

    def backward(self, ctx: Context, dy: nvte.Tensor) -> Gradients:
        return nvte.reduce_scatter(nvte.cast_checked(dy, self.dx_dtype), self.group), []


class ReduceScatter(ShardsRows, Collective):
    """``y`` = the process's rows of the sum of all ``x [processes * rows, *]``; ``dx`` = the ``dy`` of all processes, one after the other."""

    reshards = "scatters"

    def forward(self, x: nvte.Tensor) -> tuple[nvte.Tensor, Context]:
        return nvte.reduce_scatter(nvte.cast_checked(x, self.y_dtype), self.group), {}

    def backward(self, ctx: Context, dy: nvte.Tensor) -> Gradients:
        return nvte.all_gather(nvte.cast_checked(dy, self.dx_dtype), self.group), []


class AllReduce(Collective):
    """``y`` = the sum of all ``x``; ``dx`` = ``dy``, or with ``reduce_in_backward`` the mean of all ``dy``.

    What follows is computed by every process, so that each has the same loss and the same ``dy``. The mean keeps it the same where it is not quite,
    and is the gradient of the mean of the losses where they differ.
    """

    def __init__(self, group: Any = None, reduce_in_backward: bool = True) -> None:
        super().__init__(group)
        self.reduce_in_backward = reduce_in_backward

    def forward(self, x: nvte.Tensor) -> tuple[nvte.Tensor, Context]:
        return nvte.all_reduce(nvte.cast_checked(x, self.y_dtype), self.group), {}

    def backward(self, ctx: Context, dy: nvte.Tensor) -> Gradients:
        dy = nvte.cast_checked(dy, self.dx_dtype)
        return nvte.all_reduce(dy, self.group, "mean") if self.reduce_in_backward else dy, []

    def extra_repr(self) -> str:
        return f"reduce_in_backward={self.reduce_in_backward}"
