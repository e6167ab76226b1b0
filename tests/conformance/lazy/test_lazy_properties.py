"""Properties: indexing and broadcasting are numpy's, whatever the shapes and the indices."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.extra.numpy as arrays
import numpy as np
from hypothesis import strategies as st

from fusible import lazy
from fusible.errors import ShapeError
from fusible.lazy.flat_ir.checker import check_flat_ir

_QUICK = hypothesis.settings(max_examples=40, deadline=None, derandomize=True)


@st.composite
def _indexed(draw: Any) -> tuple[tuple[int, ...], Any]:
    shape = draw(arrays.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=6))
    return shape, draw(arrays.basic_indices(shape, allow_newaxis=True, allow_ellipsis=True, max_dims=6))


@_QUICK
@hypothesis.given(_indexed())
def test_indexing_is_numpys(case: tuple[tuple[int, ...], Any]) -> None:
    shape, index = case
    x = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    want = x[index]
    got = lazy.Tensor(x)[index]
    assert got.shape == want.shape
    check_flat_ir(lazy.Trace([got]).to_flat_ir())
    np.testing.assert_array_equal(got.numpy(), want)


_SHAPES = arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3)


@hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
@hypothesis.given(_SHAPES, _SHAPES)
def test_broadcasting_is_numpys(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    x, y = lazy.zeros(a), lazy.zeros(b)
    try:
        want = np.broadcast_shapes(a, b)
    except ValueError:
        want = None
    try:
        out = x + y
    except ShapeError:
        assert want is None
        return
    assert out.shape == want
    check_flat_ir(lazy.Trace([out]).to_flat_ir())


@_QUICK
@hypothesis.given(st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_values_round_trip(values: list[float]) -> None:
    np.testing.assert_array_equal(lazy.Tensor(values).numpy(), np.array(values, np.float32))
    bits = lazy.Tensor(values).bitcast(lazy.uint32).bitcast(lazy.float32).numpy()
    np.testing.assert_array_equal(bits.view(np.uint32), np.array(values, np.float32).view(np.uint32))
