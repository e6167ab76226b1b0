"""Indexing by integers, slices, tensors, lists and masks together, against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusible import lazy
from fusible.errors import CompileError

_DATA = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)
_MASK = _DATA[:, :, 0] % 8 == 0


def _as_lazy(index: Any) -> Any:
    """The same index with tensors in the place of arrays."""
    if isinstance(index, tuple):
        return tuple(map(_as_lazy, index))
    return lazy.Tensor(index) if isinstance(index, np.ndarray) else index


_PICKED = st.sampled_from([np.array([1, 0, -1]), np.array([[0], [-2]]), np.array(1), np.array([], np.int64), np.array([1, 1, 0], np.uint8)])
_ITEMS = st.lists(st.one_of(_PICKED, st.sampled_from([0, -1, 1, slice(None), slice(1, None), slice(None, None, -1), None])), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(_ITEMS, st.integers(0, 3))
def test_any_index_gives_what_numpy_gives(items: list[Any], dots: int) -> None:
    if dots < len(items):
        items[dots] = Ellipsis
    index = tuple(items)
    try:
        want = _DATA[index]
    except IndexError:  # too many, or shapes that do not broadcast
        with pytest.raises((lazy.TripyException, ValueError)):
            lazy.Tensor(_DATA)[_as_lazy(index)]
        return
    got = lazy.Tensor(_DATA)[_as_lazy(index)]
    assert got.shape == want.shape and np.array_equal(got.numpy(), want)


@pytest.mark.parametrize(
    "index",
    [
        [1, 0],
        ([0, 1], [2, 0], [3, 3]),
        ([], slice(1)),
        [[0, 1], [1, 0]],
        _MASK,
        (_MASK, slice(1, 3)),
        (_MASK, 2),
        (slice(None), [True, False, True]),
        (0, [False, True, True], None),
        (Ellipsis, _DATA[0] > 5),
        _DATA > 9,
        _DATA > 99,
    ],
    ids=str,
)
def test_lists_and_masks_give_what_numpy_gives(index: Any) -> None:
    want = _DATA[index]
    for called in (index, _as_lazy(index)):
        got = lazy.Tensor(_DATA)[called]
        assert got.shape == want.shape and np.array_equal(got.numpy(), want)


def test_a_list_with_a_slice_is_a_tuple() -> None:
    x = lazy.Tensor(_DATA)
    assert np.array_equal(x[[slice(None), 1]].numpy(), _DATA[:, 1]) and x[[..., None]].shape == (2, 3, 4, 1)


def test_positions_out_of_bounds_read_the_nearest_element() -> None:
    x = lazy.Tensor(_DATA)
    assert np.array_equal(x[lazy.Tensor([7, -9])].numpy(), _DATA[[1, 0]])
    assert np.array_equal(x[lazy.Tensor([7]), lazy.Tensor([-9])].numpy(), _DATA[[1], [0]])


def test_tensors_index_in_a_compiled_function_of_dynamic_sizes() -> None:
    def program(x: Any, rows: Any, columns: Any) -> Any:
        return x[rows, columns], x[:, columns, None], x[rows]

    info = lazy.InputInfo(((1, 2, 8),), lazy.int32)
    executable = lazy.compile(program, args=[lazy.InputInfo(((1, 2, 4), 3, 4), lazy.float32), info, info])
    for count in (1, 2):
        rows, columns = np.array([count - 1, 0, -1], np.int32), np.array([2, -1, 0], np.int32)
        data = _DATA[:count]
        want = data[rows, columns], data[:, columns, None], data[rows]
        for got, expected in zip(executable(data, rows, columns), want, strict=True):
            assert np.array_equal(got.numpy(), expected)


def test_a_mask_that_a_call_gives_is_refused_and_a_constant_one_is_taken() -> None:
    info = lazy.InputInfo((2, 3, 4), lazy.float32)
    with pytest.raises(CompileError, match="an index: expected a mask whose values are known when the function is compiled"):
        lazy.compile(lambda x: x[x > 0], args=[info])
    assert np.array_equal(lazy.compile(lambda x: x[_MASK], args=[info])(_DATA).numpy(), _DATA[_MASK])
