"""Grouped tensors: every member is to the bit what quantizing it alone gives, wherever it lies."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tex_backends import REFERENCE, Runner, on_backends
from torch import Tensor

from fusible import tex
from fusible.errors import ArgumentError, DTypeError, NotServedError, ShapeError
from fusible.quantized import Float8CurrentScalingQuantizer, Float8Quantizer, GroupedTensorStorage
from fusible.tex import DType

QUANTIZERS = on_backends("group_quantize", "group_dequantize", "bgrad_group_quantize", "group_requantize_inplace")
ACTIVATIONS = on_backends("group_scaled_swiglu", "group_scaled_clamped_swiglu")
ROWS, COLUMNS = [3, 0, 4, 1], 6
FP8 = DType.kFloat8E4M3


def delayed(**usages: bool) -> Float8Quantizer:
    return Float8Quantizer(torch.tensor([16.0]), torch.zeros(1), FP8, **usages)


def current(**usages: bool) -> Float8CurrentScalingQuantizer:
    return Float8CurrentScalingQuantizer(FP8, "cpu", **usages)


def values(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def dims(*numbers: int) -> Tensor:
    return torch.tensor(numbers)


LAYOUTS: dict[str, tuple[dict[str, Any], list[tuple[int, int]], list[int]]] = {
    "equal": ({"first_dims": None}, [(2, 6)] * 4, [0, 12, 24, 36]),
    "rows": ({"first_dims": dims(*ROWS)}, [(m, 6) for m in ROWS], [0, 18, 18, 42]),
    "int32 rows": ({"first_dims": dims(*ROWS).int()}, [(m, 6) for m in ROWS], [0, 18, 18, 42]),
    "columns": ({"first_dims": None, "last_dims": dims(1, 0, 2, 3)}, [(8, 1), (8, 0), (8, 2), (8, 3)], [0, 8, 8, 24]),
    "both": ({"first_dims": dims(1, 2, 3, 4), "last_dims": dims(4, 3, 2, 1)}, [(1, 4), (2, 3), (3, 2), (4, 1)], [0, 4, 10, 16]),
    "rows left over": ({"first_dims": dims(2, 1, 0, 2)}, [(2, 6), (1, 6), (0, 6), (2, 6)], [0, 12, 18, 18]),
    "gaps": ({"first_dims": dims(2, 1, 1, 2), "tensor_offsets": dims(0, 18, 24, 36, 48)}, [(2, 6), (1, 6), (1, 6), (2, 6)], [0, 18, 24, 36]),
    "out of order": ({"first_dims": dims(2, 2, 2, 2), "tensor_offsets": dims(36, 0, 12, 24)}, [(2, 6)] * 4, [36, 0, 12, 24]),
}
EACH = pytest.mark.parametrize("layout", LAYOUTS)
BOTH = pytest.mark.parametrize("make", [delayed, current], ids=["delayed", "current"])


def pieces(x: Tensor, layout: str) -> list[Tensor]:
    _, shapes, offsets = LAYOUTS[layout]
    flat = x.reshape(-1)
    return [flat[start : start + math.prod(shape)].view(shape) for shape, start in zip(shapes, offsets, strict=True)]


def quantize(runner: Runner, x: Tensor, quantizer: Any, layout: str = "rows", **changes: Any) -> Any:
    return runner("group_quantize", tensor=x, quantizer=quantizer, num_tensors=4, **LAYOUTS[layout][0], **changes)


def alone(x: Tensor, quantizer: Any) -> Any:
    return REFERENCE("quantize", tensor=x, quantizer=quantizer)


def same(member: Any, expected: Any) -> None:
    for name in ("_data", "_transpose", "_scale_inv"):
        got, wanted = getattr(member, name), getattr(expected, name)
        assert (got is None) == (wanted is None), name
        assert got is None or (got.shape == wanted.shape and torch.equal(got, wanted)), name
    assert member.dtype is expected.dtype and member._fp8_dtype == expected._fp8_dtype


@QUANTIZERS
@BOTH
@EACH
@pytest.mark.parametrize("usages", [{}, {"columnwise": False}, {"rowwise": False}], ids=["both", "rowwise", "columnwise"])
def test_each_member_is_quantized_by_itself(runner: Runner, layout: str, make: Any, usages: dict[str, bool]) -> None:
    x, quantizer, other = values(8, COLUMNS), make(**usages), make(**usages)
    grouped = quantize(runner, x, quantizer, layout)
    assert tuple(grouped.logical_shape) == (8, COLUMNS) and grouped.num_tensors == 4 and grouped.quantizer is quantizer
    found = grouped.split_into_quantized_tensors()
    expected = [alone(piece, other) for piece in pieces(x, layout)]
    for member, wanted in zip(found, expected, strict=True):
        same(member, wanted)
        assert member._quantizer is quantizer
    if make is delayed:
        assert torch.equal(quantizer.amax, other.amax) and quantizer.amax > 0
    for buffer in (grouped.rowwise_data, grouped.columnwise_data):
        assert buffer is None or list(buffer.shape) == [8 * COLUMNS]


@QUANTIZERS
@EACH
def test_unquantized_groups_are_views(runner: Runner, layout: str) -> None:
    x = values(8, COLUMNS)
    grouped = quantize(runner, x, None, layout)
    for member, piece in zip(grouped.split_into_quantized_tensors(), pieces(x, layout), strict=True):
        assert torch.equal(member, piece) and (not piece.numel() or member.data_ptr() == piece.data_ptr())


@QUANTIZERS
def test_members_share_the_buffers(runner: Runner) -> None:
    grouped = quantize(runner, values(8, COLUMNS), current())
    member = grouped.split_into_quantized_tensors()[2]
    member._data.fill_(9)
    member._transpose.fill_(8)
    assert (grouped.rowwise_data[18:42] == 9).all() and (grouped.columnwise_data[18:42] == 8).all() and not (grouped.rowwise_data[:18] == 9).all()


@QUANTIZERS
@BOTH
def test_an_output_is_written_unless_told_otherwise(runner: Runner, make: Any) -> None:
    first, second = values(8, COLUMNS), values(8, COLUMNS, seed=2) * 4
    quantizer = make()
    grouped = quantize(runner, first, quantizer)
    buffers = [grouped.rowwise_data, grouped.columnwise_data, grouped.scale_inv, grouped.columnwise_scale_inv]
    before = [buffer.clone() for buffer in buffers]
    amax = quantizer.amax.clone() if make is delayed else None
    assert quantize(runner, second, quantizer, output=grouped, noop_flag=torch.ones(1)) is grouped
    assert all(torch.equal(a, b) for a, b in zip(buffers, before, strict=True))
    assert amax is None or torch.equal(quantizer.amax, amax)
    for flag in (torch.zeros(1), None):
        assert quantize(runner, second, quantizer, output=grouped, noop_flag=flag) is grouped
        expected = quantize(runner, second, make())
        assert torch.equal(buffers[0], expected.rowwise_data) and torch.equal(buffers[1], expected.columnwise_data)
        assert torch.equal(buffers[2], expected.scale_inv) and torch.equal(buffers[3], expected.columnwise_scale_inv)
        quantize(runner, first, make(), output=grouped)


@QUANTIZERS
@EACH
@pytest.mark.parametrize("otype", [torch.float32, DType.kBFloat16])
def test_dequantizing_a_group_dequantizes_its_members(runner: Runner, layout: str, otype: Any) -> None:
    x = values(8, COLUMNS)
    grouped = quantize(runner, x, current(), layout)
    plain = runner("group_dequantize", input=grouped, otype=otype)
    dtype = torch.float32 if otype is torch.float32 else torch.bfloat16
    assert plain.quantizer is None and plain.fake_dtype is dtype and plain.rowwise_data.numel() == 8 * COLUMNS
    for got, piece in zip(plain.split_into_quantized_tensors(), pieces(x, layout), strict=True):
        assert torch.equal(got, REFERENCE("dequantize", input=alone(piece, current()), otype=otype))
    assert grouped.dequantize().fake_dtype is torch.bfloat16


@QUANTIZERS
@BOTH
def test_bias_gradients_are_each_members_row_sums(runner: Runner, make: Any) -> None:
    x = values(8, COLUMNS)
    grouped, sums = runner("bgrad_group_quantize", tensor=x, quantizer=make(), num_tensors=4, first_dims=dims(*ROWS))
    expected = torch.stack([piece.float().sum(0) for piece in pieces(x, "rows")]).bfloat16()
    assert torch.equal(sums, expected) and not sums[1].any()
    assert torch.equal(grouped.rowwise_data, quantize(runner, x, make()).rowwise_data)


@QUANTIZERS
@BOTH
def test_requantizing_adds_the_column_wise_copy(runner: Runner, make: Any) -> None:
    x = values(8, COLUMNS)
    arrived = quantize(runner, x, make(columnwise=False))
    whole, rows = quantize(runner, x, make()), arrived.rowwise_data
    quantizer = make()
    call = {"grouped_x": arrived, "quantizer": quantizer, "num_tensors": 4, "first_dims": dims(*ROWS), "otype": DType.kFloat32}
    dequantized = runner("group_requantize_inplace", **call, return_dequantized=True)
    assert arrived.rowwise_data is rows and arrived.quantizer is quantizer
    assert torch.equal(arrived.columnwise_data, whole.columnwise_data) and torch.equal(arrived.columnwise_scale_inv, whole.scale_inv)
    assert torch.equal(dequantized.view(-1), runner("group_dequantize", input=whole, otype=torch.float32).rowwise_data)
    copies = arrived.columnwise_data
    assert runner("group_requantize_inplace", **call) is None
    assert arrived.columnwise_data is copies
    bare = quantize(runner, x, make(columnwise=False))
    runner("group_requantize_inplace", **{**call, "grouped_x": bare, "quantizer": make(columnwise=False)})
    assert bare.columnwise_data is None


@ACTIVATIONS
@pytest.mark.parametrize("name", ["swiglu", "clamped_swiglu"])
def test_a_grouped_activation_is_the_scaled_one_quantized_column_wise(runner: Runner, name: str) -> None:
    x, prob = values(8, 2 * COLUMNS), torch.rand(8, generator=torch.Generator().manual_seed(3))
    options = {"limit": 1.5, "alpha": 1.3, "glu_linear_offset": 0.5} if name == "clamped_swiglu" else {}
    quantizer = current()
    call = {"input_2h": x, "prob": prob, "quantizer": quantizer, "num_tensors": 4, "first_dims": dims(*ROWS)}
    grouped = runner(f"group_scaled_{name}", **call, **options)
    y = REFERENCE(f"scaled_{name}", input=x, act_scales=prob, quantizer=None, **options)
    expected = quantize(REFERENCE, y, current(rowwise=False))
    assert grouped.rowwise_data is None and torch.equal(grouped.columnwise_data, expected.columnwise_data)
    assert torch.equal(grouped.columnwise_scale_inv, expected.columnwise_scale_inv) and tuple(grouped.logical_shape) == (8, COLUMNS)
    assert grouped.quantizer is quantizer and quantizer.rowwise_usage
    observing = Float8Quantizer(torch.ones(1), None, FP8)
    runner(f"group_scaled_{name}", **{**call, "quantizer": observing}, **options)
    assert torch.equal(observing.amax, y.abs().amax().float().view(1))


@ACTIVATIONS
def test_the_clamped_activation_wants_finite_numbers(runner: Runner) -> None:
    call = {"input_2h": values(8, 12), "prob": torch.ones(8), "quantizer": current(), "num_tensors": 4}
    unfit = [{"limit": 0.0}, {"limit": -1.0}, {"limit": math.inf}]
    for options in [*unfit, {"limit": 1.0, "alpha": math.nan}, {"limit": 1.0, "glu_linear_offset": math.inf}]:
        with pytest.raises(ArgumentError, match="finite"):
            runner("group_scaled_clamped_swiglu", **call, **options)


@QUANTIZERS
def test_what_does_not_fit_is_refused_before_anything_is_written(runner: Runner) -> None:
    x, quantizer = values(8, COLUMNS), delayed()
    good = quantize(runner, x, delayed())
    for kind, changes in (
        (ShapeError, {"num_tensors": 3}),
        (ArgumentError, {"num_tensors": 0}),
        (ShapeError, {"first_dims": dims(3, 0, 4, 2)}),
        (ShapeError, {"first_dims": dims(3, 0, 4)}),
        (ShapeError, {"first_dims": dims(-1, 0, 4, 1)}),
        (ShapeError, {"first_dims": dims(*ROWS), "tensor_offsets": dims(0, 18, 18, 43)}),
        (DTypeError, {"output": x}),
        (ShapeError, {"first_dims": dims(2, 2), "num_tensors": 2, "output": good}),
    ):
        with pytest.raises(kind, match=": expected .*; "):
            runner("group_quantize", **{"tensor": x, "quantizer": quantizer, "num_tensors": 4, "first_dims": None, **changes})
    with pytest.raises(ArgumentError):
        runner("bgrad_group_quantize", tensor=x, quantizer=quantizer, num_tensors=1, first_dims=None, last_dims=dims(6))
    for function, arguments in (
        ("group_dequantize", {"input": quantize(runner, x, None), "otype": torch.float32}),
        ("group_dequantize", {"input": x, "otype": torch.float32}),
        ("group_requantize_inplace", {"grouped_x": x, "quantizer": quantizer, "num_tensors": 4, "first_dims": None, "otype": 4}),
    ):
        with pytest.raises(DTypeError, match=": expected .*; "):
            runner(function, **arguments)
    assert not quantizer.amax.any()
    with pytest.raises(ArgumentError):
        bare = quantize(runner, x, delayed(columnwise=False))
        runner("group_requantize_inplace", grouped_x=bare, quantizer=quantizer, num_tensors=2, first_dims=None, otype=4)


def test_a_grouped_tensor_is_told_from_a_plain_one_when_a_backend_is_chosen() -> None:
    grouped = quantize(REFERENCE, values(8, COLUMNS), current())
    decision = tex.explain("group_dequantize", grouped, torch.float32)
    assert decision.backend is not None and str(decision.request) == "group_dequantize(input=grouped:current:cpu:bfloat16)"
    assert isinstance(grouped, GroupedTensorStorage)


def test_nvfp4_by_given_amaxes_quantizes_member_by_member(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever quantizes one member by two amaxes is called with the member and its own two."""
    calls: list[tuple[Tensor, float, float]] = []

    def one(self: Any, tensor: Tensor, quantizer: Any, rowwise_amax: Tensor, columnwise_amax: Tensor) -> Any:
        calls.append((tensor, rowwise_amax.item(), columnwise_amax.item()))
        return alone(tensor, quantizer)

    x, quantizer = values(8, COLUMNS), current()
    call = {"tensor": x, "quantizer": quantizer, "num_tensors": 4, "first_dims": dims(*ROWS)}
    amaxes = {"rowwise_amax": torch.arange(4.0), "columnwise_amax": torch.arange(4.0, 8.0)}
    backend = tex.backends.torch_backend.TorchBackend
    if not hasattr(backend, "nvfp4_quantize_with_amax"):
        with pytest.raises(NotServedError):
            REFERENCE("nvfp4_group_quantize_with_amax", **call, **amaxes)
    monkeypatch.setattr(backend, "nvfp4_quantize_with_amax", one, raising=False)
    grouped = REFERENCE("nvfp4_group_quantize_with_amax", **call, **amaxes)
    assert [numbers for _, *numbers in calls] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert all(torch.equal(tensor, piece) for (tensor, *_), piece in zip(calls, pieces(x, "rows"), strict=True))
    assert torch.equal(grouped.rowwise_data, quantize(REFERENCE, x, current()).rowwise_data)
    with pytest.raises(ShapeError):
        REFERENCE("nvfp4_group_quantize_with_amax", **call, **{**amaxes, "rowwise_amax": torch.ones(3)})
