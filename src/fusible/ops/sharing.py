"""How processes of a group share out the columns of an op: what tensor parallelism asks of each (Shoeybi et al. 2019, arXiv:1909.08053).

A process has its share of the columns of a tensor: of each of the ``Part``s that lie side by side in it, equally much. So heads of queries, of keys
and of values are shared out each by themselves, though one product gives them all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from fusible.errors import ShapeError, expected

__all__ = ["Part", "Parts", "Process", "RowShare", "SharesColumns"]


class Process(NamedTuple):
    """One of ``size`` processes, the ``rank``-th."""

    rank: int
    size: int


@dataclass(frozen=True)
class Part:
    """``units`` of ``unit`` columns each, side by side. A unit is never divided. ``name``: as parameters are called that hold this part alone.
    ``repeats``: where there are fewer units than processes, several processes may have the same one."""

    units: int
    unit: int = 1
    name: str = ""
    repeats: bool = False

    @property
    def width(self) -> int:
        return self.units * self.unit

    def shared(self, size: int) -> bool:
        """Whether each of ``size`` processes has columns of its own."""
        return self.units % size == 0

    def of(self, process: Process) -> range:
        """The columns that a process has, counted from the part's first. Raises ``ShapeError`` where ``size`` processes cannot have equally many."""
        if self.shared(process.size):
            width = self.width // process.size
            return range(process.rank * width, (process.rank + 1) * width)
        if self.repeats and process.size % self.units == 0:
            first = process.rank * self.units // process.size * self.unit
            return range(first, first + self.unit)
        what = f"the {self.name or 'columns'} that are shared out" if self.unit == 1 else f"the {self.name} heads that are shared out"
        wanted = f"a multiple of {process.size}, the processes that share them"
        wanted += ", or a divisor of it" if self.repeats else ""
        raise ShapeError(expected(wanted, of=what, got=self.units, do="choose another number of processes"))


class RowShare(NamedTuple):
    """Of an op where the processes of ``group`` share out rows: whether its x has those of ``process`` alone, and whether its y has."""

    group: Any
    process: Process
    x: bool
    y: bool


Parts = tuple[Part, ...]
"""What lies side by side in a tensor's columns, in order."""


class SharesColumns:
    """An op that one process can compute its share of the columns of, from its share of the columns of x.

    A class without a metaclass, to be named before ``Op`` among a class's bases. What it says here is for an op with ``y = x``'s columns one by one,
    without parameters; others override it.
    """

    by_columns: tuple[str, ...] = ()
    """The names of the parameters of which a process has the entries of its columns. Every process has the others whole, and the gradient of each is
    the sum over all of them."""

    def parts_of_x(self, y: Parts) -> Parts | None:
        """The parts of x, where y's are these; None where y cannot be divided so."""
        return y

    def share(self, process: Process) -> Self:
        """The op of one process. Its parameters are still the whole ones."""
        return self
