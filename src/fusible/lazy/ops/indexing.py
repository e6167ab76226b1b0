"""``x[...]``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fusible.errors import ArgumentError, CompileError, DTypeError, ShapeError, expected
from fusible.lazy import dtypes
from fusible.lazy.assumptions import holds
from fusible.lazy.evaluation.executor import awaits_call
from fusible.lazy.frontend import TENSOR_METHOD_REGISTRY, DimensionSize, Tensor, located
from fusible.lazy.ops.binary import maximum, minimum
from fusible.lazy.ops.cast import cast
from fusible.lazy.ops.expand import broadcast_to
from fusible.lazy.ops.gather import INDICES, gather
from fusible.lazy.ops.permute import permute
from fusible.lazy.ops.reshape import reshape
from fusible.lazy.ops.slicing import sliced
from fusible.lazy.ops.where import where
from fusible.lazy.trace import broadcast_shapes

__all__ = ["getitem"]

_FULL = slice(None)


@TENSOR_METHOD_REGISTRY("__getitem__")
@located
def getitem(self: Tensor, index: Any) -> Tensor:
    """``self[index]`` by numpy's rules: with ints, slices (steps of either sign), ``...`` and ``None``; with tensors, arrays and lists of integers,
    which pick elements; and with masks.

    A tensor of integers reads the nearest element where it is out of bounds, as ``gather`` does. A mask, a tensor or list of bools, is evaluated,
    because the number of elements that it picks is a size of the result. A list that holds a slice, ``None`` or ``...`` is taken as a tuple.

    Raises ``ArgumentError`` for an int out of bounds or too many indices, ``DTypeError`` for another kind of index, ``ShapeError`` for a mask of
    another shape, and ``CompileError`` for one that depends on an argument of a function being compiled: use ``where`` there.
    """
    if isinstance(index, list) and any(item is None or item is Ellipsis or isinstance(item, slice) for item in index):
        index = tuple(index)
    items = index if isinstance(index, tuple) else (index,)
    if any(_picks(item) for item in items):
        return _picked(self, _marked(self, _expanded([_as_index(item) if _picks(item) else item for item in items], self)))
    return sliced(self, _expanded(items, self))


def _picks(item: Any) -> bool:
    return isinstance(item, list | np.ndarray) or (isinstance(item, Tensor) and not isinstance(item, DimensionSize))


def _as_index(index: Any) -> Tensor:
    """A tensor, an array or a list as a tensor of integers that ``gather`` takes, or as a mask."""
    if isinstance(index, list) and not np.size(index):
        index = np.zeros(np.shape(index), np.int32)
    tensor = index if isinstance(index, Tensor) else Tensor(index)
    if tensor.dtype in INDICES or _is_mask(tensor):
        return tensor
    if not tensor.dtype.is_integer:
        raise DTypeError(expected("a tensor of integers, or a mask of bools", of="an index", got=tensor.trace_tensor, do="cast it to int32"))
    return cast(tensor, dtypes.int64)


def _is_mask(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype is dtypes.bool and item.ndim > 0


def _expanded(items: Sequence[Any], x: Tensor) -> list[Any]:
    """One item for each dimension of ``x`` (a mask for as many as it has), and the ``None``s, with ``...`` replaced by full slices."""
    used = sum(item.ndim if _is_mask(item) else item is not None and item is not Ellipsis for item in items)
    dots = sum(item is Ellipsis for item in items)
    if used > x.ndim or dots > 1:
        got = f"{used} indices and {dots} ellipses"
        raise ArgumentError(expected(f"at most {x.ndim} indices and one ellipsis", of=f"the index of {x.trace_tensor}", got=got, do="drop some"))
    full = [_FULL] * (x.ndim - used)
    expanded: list[Any] = []
    for item in items if dots else (*items, Ellipsis):
        expanded += full if item is Ellipsis else [item]
    return expanded


def _marked(x: Tensor, items: list[Any]) -> list[Any]:
    """``items`` with each mask replaced by the positions that it marks. All masks are checked before the first one is evaluated."""
    at = 0
    for item in items:
        if _is_mask(item):
            _check_mask(item, x, at)
        at += item.ndim if _is_mask(item) else item is not None
    found: list[Any] = []
    for item in items:
        found += [Tensor(places.astype(np.int32)) for places in np.nonzero(item.numpy())] if _is_mask(item) else [item]
    return found


def _check_mask(mask: Tensor, x: Tensor, at: int) -> None:
    sizes = x.trace_tensor.shape[at : at + mask.ndim]
    if not all(holds(n, "==", m, "a mask") for n, m in zip(sizes, mask.trace_tensor.shape, strict=True)):
        raise ShapeError(expected(f"a mask of shape {sizes}", of=f"the index of {x.trace_tensor}", got=mask.trace_tensor, do="reshape it"))
    if awaits_call(mask.trace_tensor):
        wanted = "a mask whose values are known when the function is compiled"
        raise CompileError(expected(wanted, of="an index", got=mask.trace_tensor, do="use where(mask, x, 0), which keeps the shape"))


def _picked(x: Tensor, items: list[Any]) -> Tensor:
    """``x`` indexed by tensors among other items.

    As in numpy an int beside a tensor is an index too: it counts where the positions of indices determine the place of the result's dimensions.
    """
    ints = [i for i, item in enumerate(items) if not (item is None or isinstance(item, slice) or _picks(item))]
    tensors = [i for i, item in enumerate(items) if _picks(item)]
    place = [i for i, item in enumerate(items) if i in ints or i in tensors]
    block = sliced(x, [_FULL if i in tensors else slice(item, _next(item)) if i in ints else item for i, item in enumerate(items)])
    if ints:
        sliced(x, [items[i] if i in ints else _FULL for i in range(len(items)) if items[i] is not None])  # refuses an int out of bounds
    if len(place) == 1:
        return gather(block, place[0], items[place[0]])
    # Several indices: the indexed dimensions are moved to the front and merged into one, from which a single gather reads.
    picked = [items[i] for i in tensors]
    shape = broadcast_shapes("an index", *(t.trace_tensor for t in picked))
    rest = [i for i in range(len(items)) if i not in place]
    flat = reshape(permute(block, (*tensors, *ints, *rest)), (-1, *(block.shape[i] for i in rest)))
    found = gather(flat, 0, _linear([broadcast_to(t, shape) for t in picked], [block.shape[i] for i in tensors]))
    # By numpy's rule the dimensions of the indices replace the indexed ones where those are adjacent, and stand first otherwise.
    lead = sum(i < place[0] for i in rest) if place[-1] - place[0] == len(place) - 1 else 0
    count = len(shape)
    return permute(found, (*range(count, count + lead), *range(count), *range(count + lead, found.ndim)))


def _next(position: Any) -> Any:
    """The end of a slice that takes the element at ``position`` alone."""
    return None if type(position) is int and position == -1 else position + 1


def _linear(indices: list[Tensor], sizes: list[Any]) -> Tensor:
    """The positions in row-major order, each index within its dimension."""
    total = None
    for index, size in zip(indices, sizes, strict=True):
        wide = cast(index, dtypes.int64)
        within = maximum(minimum(where(wide < 0, wide + size, wide), size - 1), 0)
        total = within if total is None else total * size + within
    assert total is not None
    return total
