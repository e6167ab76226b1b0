"""``program``: calls of native functions as one, refused where they do not fit before anything is called, and not made where memory is shared."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusible import cpp_extensions as native
from fusible.errors import ArgumentError, DTypeError, FusibleError, ShapeError
from fusible.tex import DType

pytestmark = pytest.mark.skipif(not native.available, reason="the native kernels are not built")

FP32 = int(DType.kFloat32)
ROWS = (0, 0, FP32, [2, 4], [4, 1])
RESULT = (1, 0, FP32, [2, 4], [4, 1])
RELU = ("activation", {"name": "relu", "dtype": torch.float32}, {"src": 0, "dst": 1})


def test_calls_are_made_in_order_on_what_is_given() -> None:
    scratch = (2, 64, FP32, [2, 4], [4, 1])
    run = native.program(
        3,
        [ROWS, RESULT, scratch],
        [(*RELU[:2], {"src": 0, "dst": 2}), ("activation", {"name": "gelu", "dtype": torch.float32}, {"src": 2, "dst": 1})],
    )
    for seed in range(3):
        x, y = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed)), torch.empty(2, 4)
        wanted, between = torch.empty(2, 4), torch.empty(2, 4)
        native.activation("relu", x, between, torch.float32)
        native.activation("gelu", between, wanted, torch.float32)
        assert run([x, y, torch.empty(256, dtype=torch.uint8)]) is True
        assert torch.equal(y, wanted)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
def test_a_copy_has_the_elements_in_order(dtype: torch.dtype) -> None:
    base = torch.arange(24).view(2, 3, 4).to(dtype)
    code = {torch.uint8: 0, torch.int64: 3, torch.float32: FP32, torch.bfloat16: int(DType.kBFloat16)}[dtype]
    for view in (base, base.permute(2, 0, 1), base[:, 1], base[:, :, ::2], base[:, :1].expand(2, 5, 4), base[1, 2, 3]):
        begin = view.storage_offset() * view.element_size()
        values = [(0, begin, code, list(view.shape), list(view.stride())), (1, 0, code, list(view.shape), list(view.contiguous().stride()))]
        out = torch.empty(view.shape, dtype=dtype)
        assert native.program(2, values, [("copy", {}, {"src": 0, "dst": 1})])([base, out])
        assert torch.equal(out, view)


def test_zero_and_quotient() -> None:
    amax, out = torch.tensor([3.7]), torch.full((1,), torch.nan)
    values = [(0, 0, FP32, [1], [1]), (1, 0, FP32, [1], [1])]
    assert native.program(2, values, [("quotient", {"by": 2688.0}, {"src": 0, "dst": 1})])([amax, out])
    assert torch.equal(out, amax / torch.full_like(amax, 2688.0))
    assert native.program(2, values, [("zero", {}, {"dst": 1})])([amax, out]) and not out.any()


def test_nothing_is_called_where_what_is_written_is_anothers_memory() -> None:
    run = native.program(2, [ROWS, RESULT], [RELU])
    memory = torch.randn(20)
    for place in (0, 4, 7):
        before = memory.clone()
        assert run([memory[:8].view(2, 4), memory[place : place + 8].view(2, 4)]) is False
        assert torch.equal(memory, before)
    assert run([memory[:8].view(2, 4), memory[8:16].view(2, 4)]) is True
    reads_both = native.program(
        3,
        [ROWS, RESULT, (2, 0, FP32, [2, 4], [4, 1])],
        [("activation_backward", {"name": "relu", "dtype": torch.float32}, {"grad": 0, "src": 2, "dst": 1})],
    )
    assert reads_both([memory[:8].view(2, 4), torch.empty(2, 4), memory[:8].view(2, 4)]) is True, "what is only read may be one"


def test_nothing_is_called_on_what_is_negated_in_word_only() -> None:
    out = torch.full((2, 4), 7.0)
    assert native.program(2, [ROWS, RESULT], [RELU])([torch.complex(torch.zeros(2, 4), -torch.ones(2, 4)).conj().imag, out]) is False
    assert (out == 7).all()


@pytest.mark.parametrize(
    ("tensors", "values", "calls", "error", "match"),
    [
        (-1, [], [], ArgumentError, "tensors: expected a number >= 0, got -1"),
        (2, [(2, 0, FP32, [1], [1])], [], ArgumentError, "values"),
        (2, [(0, -4, FP32, [1], [1])], [], ArgumentError, "values"),
        (2, [(0, 0, 99, [1], [1])], [], DTypeError, "values: expected a dtype, got 99"),
        (2, [(0, 0, FP32, [1], [1, 1])], [], ArgumentError, "values"),
        (2, [(0, 0, FP32, [2], [-1])], [], ArgumentError, "values"),
        (2, [(0, 0, FP32, [2**62, 4], [4, 1])], [], ShapeError, "2\\^63"),
        (2, [ROWS, RESULT], [("nothing", {}, {})], ArgumentError, "calls: expected a native function of tensors, got 'nothing'"),
        (2, [ROWS, RESULT], [(*RELU[:2], {"src": 0, "dst": 2})], ArgumentError, "calls: expected the numbers of values, got 2"),
        (2, [ROWS, RESULT], [(*RELU[:2], {"src": -1, "dst": 1})], ArgumentError, "calls: expected the numbers of values, got -1"),
        (2, [ROWS, RESULT], [("activation", {"dtype": torch.float32}, {"src": 0, "dst": 1})], ArgumentError, "name: expected a value, got none"),
        (2, [ROWS, RESULT], [("activation", {"name": "relu", "dtype": "three"}, {"src": 0, "dst": 1})], DTypeError, "dtype"),
        (2, [ROWS, RESULT], [("activation", {"dtype": torch.float32}, {"name": 0, "src": 0, "dst": 1})], ArgumentError, "name: expected no tensor"),
        (2, [(0, 0, FP32, [2, 4], [5, 1]), RESULT], [RELU], ArgumentError, "src: expected a contiguous tensor"),
    ],
)
def test_what_does_not_fit_is_refused_when_the_program_is_made(tensors: int, values: Any, calls: Any, error: type[FusibleError], match: str) -> None:
    with pytest.raises(error, match=match):
        native.program(tensors, values, calls)


def test_what_is_given_is_checked_before_anything_is_called() -> None:
    run = native.program(2, [ROWS, RESULT], [RELU])
    for tensors, error, match in (
        ([torch.ones(2, 4)], ArgumentError, "tensors: expected 2 tensors, got 1"),
        ([torch.ones(7), torch.ones(8)], ShapeError, "tensor 0 of a program: expected at least 32 bytes, got 28"),
        ([torch.ones(2, 4, device="meta"), torch.ones(8)], ArgumentError, "tensors"),
        ([torch.ones(2, 4), 3], DTypeError, "tensors"),
    ):
        with pytest.raises(error, match=match):
            run(tensors)
    freed, out = torch.ones(2, 4), torch.full((2, 4), 7.0)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ArgumentError, match="memory of its own"):
        run([freed, out])
    assert (out == 7).all()


def test_a_kernels_own_refusal_names_its_argument() -> None:
    odd = (0, 0, int(DType.kInt32), [2, 4], [4, 1])
    with pytest.raises(DTypeError, match="src"):
        native.program(2, [odd, RESULT], [RELU])([torch.ones(2, 4, dtype=torch.int32), torch.empty(2, 4)])


def test_round_is_torchs() -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (4096,), dtype=torch.int64, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    edges = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1 + 2**-8, 1 + 3 * 2**-8, 3.3895e38, 1e-40, torch.nan])
    x = torch.cat((bits.view(torch.float32), edges))
    out = torch.empty(x.shape, dtype=torch.bfloat16)
    values = [(0, 0, FP32, [x.numel()], [1]), (1, 0, int(DType.kBFloat16), [x.numel()], [1])]
    assert native.program(2, values, [("round", {}, {"src": 0, "dst": 1})])([x, out])
    wanted = x.to(torch.bfloat16)
    numbers = ~wanted.isnan()
    assert torch.equal(out.isnan(), ~numbers) and torch.equal(out[numbers].view(torch.int16), wanted[numbers].view(torch.int16))
