"""``AllGather``, ``AllReduce``, ``ReduceScatter``: operations between the processes of a group (None: all of them)."""

from __future__ import annotations

from typing import Any

from fusible import ops
from fusible.ops import Op
from fusible.pytorch.ops.basic.parallel import group_size
from fusible.pytorch.ops.op import BasicOperation

__all__ = ["AllGather", "AllReduce", "ReduceScatter"]


class _Collective(BasicOperation):
    fixed_options = frozenset({"process_group", "process_group_size"})

    def __init__(self, process_group: Any = None) -> None:
        super().__init__()
        self.process_group = process_group
        self.process_group_size = group_size(process_group, type(self).__name__)

    def extra_repr(self) -> str:
        return f"process_group_size={self.process_group_size}"


class AllGather(_Collective):
    """``y [processes * rows, *]``: the ``x [rows, *]`` of all processes, in the order of their ranks; ``dx``: of the sum of their ``dy``, the rows of
    this one."""

    def make_op(self) -> Op:
        return ops.AllGather(self.process_group)


class ReduceScatter(_Collective):
    """``y [rows, *]``: of the sum of the ``x [processes * rows, *]`` of all processes, the rows of this one; ``dx`` = the ``dy`` of all processes.

    Raises ``ShapeError`` where the processes do not divide the first dimension.
    """

    def make_op(self) -> Op:
        return ops.ReduceScatter(self.process_group)


class AllReduce(_Collective):
    """``y`` = the sum of the ``x`` of all processes, where what follows is computed by each of them, and ``dy`` is the same in all.

    ``reduce_in_backward``: ``dx`` is the mean of their ``dy``, so that it is the same in all even where ``dy`` is not quite; else ``dx = dy``.
    """

    def __init__(self, process_group: Any = None, reduce_in_backward: bool = True) -> None:
        super().__init__(process_group)
        self.reduce_in_backward = reduce_in_backward

    def make_op(self) -> Op:
        return ops.AllReduce(self.process_group, self.reduce_in_backward)
