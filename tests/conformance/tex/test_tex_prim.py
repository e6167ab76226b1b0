"""The primitives that move data."""

from __future__ import annotations

import pytest
import torch
from tex_backends import Runner, on_backends

from fusible.errors import DTypeError, ShapeError
from fusible.tex import DType
from fusible.tex.protocol import INT64

pytestmark = on_backends("prim_cast", "prim_copy", "prim_empty", "prim_reshape")


@pytest.mark.parametrize(
    ("dtype", "expected"), [(DType.kBFloat16, torch.bfloat16), (4, torch.float32), (INT64, torch.int64), (torch.uint8, torch.uint8), (2, torch.int32)]
)
def test_a_dtype_is_an_enum_an_integer_or_torchs_own(runner: Runner, dtype: object, expected: torch.dtype) -> None:
    like = torch.zeros(1)
    empty = runner("prim_empty", shape=[2, 3], dtype=dtype, like=like)
    full = runner("prim_full", shape=[2, 3], value=7, dtype=dtype, like=like)
    assert empty.dtype is full.dtype is expected and empty.shape == (2, 3) and (full == 7).all()
    assert runner("prim_cast", x=torch.full((2,), 3.0), dtype=dtype).dtype is expected


@pytest.mark.parametrize("dtype", [99, "float32", None, 9])
def test_another_dtype_is_refused(runner: Runner, dtype: object) -> None:
    with pytest.raises(DTypeError, match="a torch.dtype, a tex.DType or its value"):
        runner("prim_empty", shape=[1], dtype=dtype, like=torch.zeros(1))


def test_cast_of_the_same_dtype_is_the_same_tensor(runner: Runner) -> None:
    x = torch.zeros(3)
    assert runner("prim_cast", x=x, dtype=torch.float32) is x


def test_a_copy_shares_nothing_and_is_contiguous(runner: Runner) -> None:
    x = torch.arange(6).view(2, 3).t()
    copy = runner("prim_copy", x=x)
    assert torch.equal(copy, x) and copy.is_contiguous() and copy.data_ptr() != x.data_ptr()


def test_split_undoes_concatenate(runner: Runner) -> None:
    parts = [torch.randn(2, n, 3) for n in (1, 4, 0)]
    whole = runner("prim_concatenate", tensors=parts, dim=1)
    assert all(torch.equal(a, b) for a, b in zip(runner("prim_split", x=whole, sizes=[1, 4, 0], dim=1), parts, strict=True))


def test_reshape_shares_memory_where_it_can(runner: Runner) -> None:
    x = torch.arange(6)
    assert runner("prim_reshape", x=x, shape=(2, -1)).data_ptr() == x.data_ptr()


@pytest.mark.parametrize("sizes", [[5, 4], [-1, 5]])
def test_groups_of_more_rows_than_there_are_cannot_be_padded(runner: Runner, sizes: list[int]) -> None:
    if runner.backend == "xla":
        pytest.skip("sizes have no values while a program is recorded")
    with pytest.raises(ShapeError, match="sizes of pad_groups: expected members within 8 rows"):
        runner("prim_pad_groups", x=torch.zeros(8, 2), sizes=torch.tensor(sizes), multiple=4)


def test_only_matrices_are_transposed(runner: Runner) -> None:
    with pytest.raises(ShapeError, match=r"x of transpose: expected shape \[r, c\]"):
        runner("prim_transpose", x=torch.zeros(2, 2, 2))


def test_an_odd_rotary_width_is_refused(runner: Runner) -> None:
    with pytest.raises(ShapeError, match="an even width"):
        runner("prim_rope_angles", positions=2, width=3, base=10000.0, like=torch.zeros(1))
