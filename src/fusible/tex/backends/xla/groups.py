"""Which group each row of a matrix belongs to, computed in the program: one program serves any sizes of the groups.

Lazy tensors cannot be cut where a tensor says. So rows are put into *tiles*, of equally many rows each, all of one group, and the rest of a group's
last tile is zeros: at most one tile more per group than whole ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fusible import lazy
from fusible.lazy import Tensor
from fusible.tex.backends.xla.segments import thd_segments

__all__ = ["Groups", "Tiles", "groups", "pad_groups", "unpad_groups"]


@dataclass(frozen=True, eq=False)
class Groups:
    """``count`` groups of ``rows`` rows: ``sizes`` and ``starts`` (int32 ``[count]``), and of each row its group, its position there, and whether it
    is in a group."""

    rows: int
    count: int
    sizes: Tensor
    starts: Tensor
    group: Tensor
    position: Tensor
    inside: Tensor

    @property
    def bounds(self) -> Tensor:
        """Where groups that lie one after the other begin, and where the last one ends, int32 ``[count + 1]``."""
        return lazy.concatenate([self.starts, self.starts[-1:] + self.sizes[-1:]], 0)

    def spread(self, numbers: Tensor) -> Tensor:
        """``[count, ...] -> [rows, ...]``: the numbers of each row's group."""
        return lazy.gather(numbers, 0, self.group)

    def largest(self, numbers: Tensor) -> Tensor:
        """``[rows] -> [count]`` of uint32: the largest number of each group, 0 where it is empty."""
        if not self.rows:
            return lazy.zeros((self.count,), lazy.uint32)
        mine: Any = lazy.iota((self.count, 1), 0, lazy.int32) == self.group[None, :]
        return lazy.max(lazy.where(mine & self.inside[None, :], numbers[None, :], lazy.zeros((1, 1), lazy.uint32)), 1)

    def tiles(self, at_least: int | None = None) -> Tiles:
        """Tiles of ``at_least`` rows, a power of two; by default of an average group, so that there are at most two per group."""
        wanted = -(-self.rows // self.count) if at_least is None else at_least
        return Tiles(self, max(wanted - 1, 0).bit_length())


@dataclass(frozen=True, eq=False)
class Tiles:
    """The rows of ``of`` in tiles of ``2 ** shift`` rows; ``at_least`` so many."""

    of: Groups
    shift: int
    at_least: int = 0

    @property
    def size(self) -> int:
        return 1 << self.shift

    @property
    def count(self) -> int:
        return max((self.of.rows >> self.shift) + self.of.count, self.at_least)

    @property
    def rows(self) -> int:
        return self.count * self.size

    @cached_property
    def _first(self) -> Tensor:
        """Of each group the first tile."""
        counts = lazy.cast(lazy.shift_right_logical(lazy.cast(self.of.sizes + (self.size - 1), lazy.uint32), self.shift), lazy.int32)
        return lazy.cumsum(counts, 0) - counts

    @cached_property
    def group(self) -> Tensor:
        """Of each tile its group, int32 ``[count]``: the last one that has begun."""
        tile = lazy.iota((self.count, 1), 0, lazy.int32)
        return lazy.sum(lazy.cast(self._first[None, :] <= tile, lazy.int32), 1) - 1

    @cached_property
    def position(self) -> Tensor:
        """Of each row of each tile its position in the group, ``[count, size]``."""
        tile = lazy.iota((self.count,), 0, lazy.int32) - lazy.gather(self._first, 0, self.group)
        return tile[:, None] * self.size + lazy.iota((1, self.size), 1, lazy.int32)

    @cached_property
    def inside(self) -> Tensor:
        """Whether a row of a tile is one of the group, ``[count, size]``."""
        return self.position < lazy.gather(self.of.sizes, 0, self.group)[:, None]

    def put(self, x: Tensor) -> Tensor:
        """``[rows of the matrix, columns] -> [count, size, columns]``, zeros where no row is."""
        shape = (self.count, self.size, x.shape[1])
        if not self.of.rows:
            return lazy.zeros(shape, x.dtype)
        source = lazy.gather(self.of.starts, 0, self.group)[:, None] + self.position
        taken = lazy.gather(x, 0, lazy.reshape(source, (self.rows,)))
        return lazy.where(self.inside[:, :, None], lazy.reshape(taken, shape), lazy.zeros((1, 1, 1), x.dtype))

    def take(self, tiled: Tensor, into: Groups | None = None) -> Tensor:
        """The inverse of ``put``, from ``[count, size, columns]`` or its rows; rows that belong to no group are 0. ``into``: groups of the same sizes
        that lie elsewhere."""
        into = self.of if into is None else into
        place = lazy.gather(self._first, 0, into.group) * self.size + into.position
        taken = lazy.gather(lazy.reshape(tiled, (self.rows, tiled.shape[-1])), 0, place)
        return lazy.where(into.inside[:, None], taken, lazy.zeros((1, 1), tiled.dtype))

    def sums(self, numbers: Tensor) -> Tensor:
        """``[count, ...] -> [groups, ...]``: the sum over each group's tiles."""
        flat = lazy.reshape(numbers, (1, self.count, -1))
        mine: Any = lazy.iota((self.of.count, 1), 0, lazy.int32) == self.group[None, :]
        found = lazy.sum(lazy.where(mine[:, :, None], flat, 0.0), 1)
        return lazy.reshape(found, (self.of.count, *numbers.shape[1:]))


def groups(rows: int, count: int, sizes: Tensor | None, starts: Tensor | None = None) -> Groups:
    """``count`` groups of ``sizes`` rows (integers ``[count]``), or of equally many: one after the other, or from the rows ``starts`` on, in any
    order."""
    of = lazy.full((count,), rows // count, lazy.int32) if sizes is None else lazy.cast(sizes[:count], lazy.int32)
    if starts is not None:
        return _placed(rows, of, lazy.cast(starts[:count], lazy.int32))
    ends = lazy.cumsum(of, 0)
    bounds = lazy.concatenate([lazy.zeros((1,), lazy.int32), ends], 0)
    found = thd_segments(rows, bounds)
    return Groups(rows, count, of, bounds[:-1], found.sequence, found.position, found.inside)


def _placed(rows: int, sizes: Tensor, starts: Tensor) -> Groups:
    count = sizes.shape[0]
    row = lazy.iota((rows,), 0, lazy.int32)
    mine: Any = (starts[None, :] <= row[:, None]) & (row[:, None] < (starts + sizes)[None, :])
    owner = lazy.max(lazy.where(mine, lazy.iota((1, count), 1, lazy.int32), -1), 1)
    group = lazy.maximum(owner, 0)
    return Groups(rows, count, sizes, starts, group, row - lazy.gather(starts, 0, group), owner >= 0)


def _whole(sizes: Tensor, multiple: int) -> Tensor:
    """Sizes rounded up to a multiple."""
    return (sizes + (multiple - 1)) // multiple * multiple


def pad_groups(x: Tensor, sizes: Tensor, multiple: int) -> tuple[Tensor, Tensor]:
    """See ``tex.prim.pad_groups``; sizes are not checked, for their values are not known."""
    rows, count = x.shape[0], sizes.shape[0]
    total = -(-(rows + min(rows, count) * (multiple - 1)) // multiple) * multiple
    padded = _whole(sizes, multiple)
    if not rows:
        return lazy.zeros((total, *x.shape[1:]), x.dtype), padded
    of, into = groups(rows, count, sizes), groups(total, count, padded)
    taken = lazy.gather(x, 0, into.spread(of.starts) + into.position)
    owned: Any = into.inside & (into.position < into.spread(of.sizes))
    return lazy.where(owned[:, None], taken, lazy.zeros((1, 1), x.dtype)), padded


def unpad_groups(x: Tensor, sizes: Tensor, multiple: int, rows: int) -> Tensor:
    """See ``tex.prim.unpad_groups``."""
    count = sizes.shape[0]
    if not rows or not x.shape[0]:
        return lazy.zeros((rows, *x.shape[1:]), x.dtype)
    of, padded = groups(rows, count, sizes), groups(x.shape[0], count, _whole(sizes, multiple))
    taken = lazy.gather(x, 0, of.spread(padded.starts) + of.position)
    return lazy.where(of.inside[:, None], taken, lazy.zeros((1, 1), x.dtype))
