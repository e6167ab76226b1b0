"""Calls of kernels as data, as functions of Python: what programs have in the place of torch, and views of buffers and operands."""

from __future__ import annotations

import gc
import linecache

import pytest
import torch

from fusible import cpp_extensions
from fusible.tex.backends.cpu.kernel_calls import call, specialized
from fusible.tex.interface.kernel_calls import Buffer, view_of
from fusible.tex.interface.specialize import SpecializedCall

pytestmark = pytest.mark.skipif(not cpp_extensions.available, reason="the native kernels are not built")


def test_what_programs_have_in_the_place_of_torch() -> None:
    x = torch.tensor([[1.0, 3.0], [7.0, -1.5]])
    halves, zeros, copy = Buffer(torch.float32, (2, 2)), Buffer(torch.float32, (3,)), Buffer(torch.float32, (4,))
    rounded = Buffer(torch.bfloat16, (2, 2))
    found = specialized(
        [halves, rounded, copy, [zeros, None]],
        call("quotient", src=x, by=3.0, dst=halves),
        call("round", src=halves, dst=rounded),
        call("copy", src=view_of(x, x.t()), dst=view_of(copy, torch.empty(2, 2))),
        call("zero", dst=zeros),
    )
    assert len(found.operands) == 1 and found.operands[0] is x
    for _ in range(2):
        first, second, third, (fourth, nothing) = found.compute(*found.operands)
        assert torch.equal(first, x / 3) and torch.equal(second, (x / 3).bfloat16()) and nothing is None
        assert torch.equal(third, x.t().flatten()) and torch.equal(fourth, torch.zeros(3))
        first.fill_(9.0), fourth.fill_(9.0)  # they are new tensors at each call


def test_zeros_are_written_where_other_numbers_lie() -> None:
    x = torch.ones(3, 4)
    ones = Buffer(torch.float32, (3, 4))
    found = specialized(ones, call("copy", src=x, dst=ones), call("zero", dst=view_of(ones, torch.empty(3, 4)[:, :2])))
    assert torch.equal(found.compute(x), torch.tensor([[0.0, 0.0, 1.0, 1.0]] * 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.uint8, torch.bfloat16], ids=str)
def test_a_view_of_an_operand_is_where_it_lies(dtype: torch.dtype) -> None:
    whole = torch.arange(40, dtype=torch.float32)
    x = whole[4:36]
    view = x[8:24].view(dtype).view(4, -1)[1:3, ::2]
    result = Buffer(dtype, tuple(view.shape))
    found = specialized(result, call("copy", src=view_of(x, view), dst=result))
    assert len(found.operands) == 1 and torch.equal(found.compute(x), view)
    other = torch.arange(100, 140, dtype=torch.float32)[4:36]
    assert torch.equal(found.compute(other), other[8:24].view(dtype).view(4, -1)[1:3, ::2])


def test_a_call_of_another_size_is_not_compiled_anew() -> None:
    def of(size: int) -> SpecializedCall:
        half = Buffer(torch.float32, (size,))
        return specialized(half, call("copy", src=view_of(x, x[:size]), dst=half))

    x = torch.arange(8.0)
    small, large = of(3), of(5)
    assert small.compute.__code__ is large.compute.__code__  # type: ignore[attr-defined]
    assert torch.equal(small.compute(x), x[:3]) and torch.equal(large.compute(x), x[:5])


def test_the_lines_of_a_call_go_with_it() -> None:
    before = set(linecache.cache)
    found = specialized(None, call("zero", dst=Buffer(torch.float32, (3,))))
    (lines,) = set(linecache.cache) - before
    del found
    gc.collect()
    assert lines not in linecache.cache
