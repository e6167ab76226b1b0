"""``AllGather``, ``AllReduce``, ``ReduceScatter``, ``ScatterRows``, ``GatherRows``: along the first dimension, between the processes of a group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from fusible import nvte
from fusible.ops.messages import Communicates, Message
from fusible.ops.op import Context, Op
from fusible.ops.protocols import ShardsRows
from fusible.ops.sharing import Process

__all__ = ["AllGather", "AllReduce", "Collective", "GatherRows", "ReduceScatter", "ScatterRows"]

Collective_ = Literal["all_gather", "all_reduce", "reduce_scatter"]
Gradients = tuple[nvte.Tensor | None, list[nvte.Tensor | None]]


class Collective(Communicates, Op):
    """Base: an op between the processes of ``group`` (None: all of them). It communicates unquantized tensors."""

    sends: tuple[Collective_ | None, Collective_ | None]
    """The collectives by which y is made, and dx."""

    def __init__(self, group: Any = None, process: Process | None = None) -> None:
        self.group, self.process = group, process

    def messages(self, kind: nvte.PassKind, rows: int) -> Iterator[Message]:
        collective, what, type = (self.sends[1], "dy", self.dx_dtype) if kind == "backward" else (self.sends[0], "x", self.y_dtype)
        if collective is not None and self.process is not None and self.x_width is not None:
            whole = max(rows, self.rows_of_y(rows)) * self.x_width
            yield Message(collective, what, whole * nvte.bit_width(nvte.element(type)) // 8)


class AllGather(ShardsRows, Collective):
    """``y`` = the ``x [rows, *]`` of all processes, one after the other; ``dx`` = the process's rows of the sum of all ``dy``."""

    reshards = "gathers"
    sends = "all_gather", "reduce_scatter"

    def forward(self, x: nvte.Tensor) -> tuple[nvte.Tensor, Context]:
        return nvte.all_gather(nvte.cast_checked(x, self.y_dtype), self.group), {}

    def backward(self, ctx: Context, dy: nvte.Tensor) -> Gradients:
        return nvte.reduce_scatter(nvte.cast_checked(dy, self.dx_dtype), self.group), []


class ReduceScatter(ShardsRows, Collective):
    """``y`` = the process's rows of the sum of all ``x [processes * rows, *]``; ``dx`` = the ``dy`` of all processes, one after the other."""

    reshards = "scatters"
    sends = "reduce_scatter", "all_gather"

    def forward(self, x: nvte.Tensor) -> tuple[nvte.Tensor, Context]:
        return nvte.reduce_scatter(nvte.cast_checked(x, self.y_dtype), self.group), {}

    def backward(self, ctx: Context, dy: nvte.Tensor) -> Gradients:
        return nvte.all_gather(nvte.cast_checked(dy, self.dx_dtype), self.group), []


class AllReduce(Collective):
    """``y`` = the sum of all ``x``; ``dx`` = ``dy``, or with ``reduce_in_backward`` the mean of all ``dy``.

    What follows is computed by every process, so that each has the same loss and the same ``dy``. The mean keeps it the same where it is not quite,
    and is the gradient of the mean of the losses where they differ.
    """

    def __init__(self, group: Any = None, reduce_in_backward: bool = True, process: Process | None = None) -> None:
        super().__init__(group, process)
        self.reduce_in_backward = reduce_in_backward
        self.sends = "all_reduce", "all_reduce" if reduce_in_backward else None

    def forward(self, x: nvte.Tensor) -> tuple[nvte.Tensor, Context]:
        return nvte.all_reduce(nvte.cast_checked(x, self.y_dtype), self.group), {}

    def backward(self, ctx: Context, dy: nvte.Tensor) -> Gradients:
        dy = nvte.cast_checked(dy, self.dx_dtype)
        return nvte.all_reduce(dy, self.group, "mean") if self.reduce_in_backward else dy, []

    def extra_repr(self) -> str:
        return f"reduce_in_backward={self.reduce_in_backward}"


class RowsOfAll(ShardsRows, Collective):
    """Base: one side has the rows of ``process`` alone, and the other side, which every process computes alike, those of all."""

    process: Process

    def __init__(self, group: Any, process: Process) -> None:
        super().__init__(group, process)

    def extra_repr(self) -> str:
        return f"{self.process.size} processes"


class ScatterRows(RowsOfAll):
    """``y`` = of ``x [rows, *]``, the same in every process, the rows of this one; ``dx`` = the ``dy`` of all processes, one after the other."""

    reshards = "scatters"
    sends = None, "all_gather"

    def forward(self, x: nvte.Tensor) -> tuple[nvte.Tensor, Context]:
        return nvte.own_rows(nvte.cast_checked(x, self.y_dtype), *self.process), {}

    def backward(self, ctx: Context, dy: nvte.Tensor) -> Gradients:
        return nvte.all_gather(nvte.cast_checked(dy, self.dx_dtype), self.group), []


class GatherRows(RowsOfAll):
    """``y`` = the ``x [rows, *]`` of all processes, one after the other; ``dx`` = of ``dy``, the same in every process, the rows of this one."""

    reshards = "gathers"
    sends = "all_gather", None

    def forward(self, x: nvte.Tensor) -> tuple[nvte.Tensor, Context]:
        return nvte.all_gather(nvte.cast_checked(x, self.y_dtype), self.group), {}

    def backward(self, ctx: Context, dy: nvte.Tensor) -> Gradients:
        return nvte.own_rows(nvte.cast_checked(dy, self.dx_dtype), *self.process), []
