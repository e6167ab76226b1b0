"""``GroupedTensorStorage``: its description of members, saving, copying, and members of any format by a table of names alone."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusible.errors import ArgumentError, DTypeError, ShapeError
from fusible.quantized import Float8CurrentScalingQuantizer, Float8Tensor, Float8TensorStorage, GroupedTensorStorage
from fusible.tex import DType, group_quantize
from fusible.tex.calls.grouped import build_grouped, layout_of, members
from fusible.tex.formats import FLOAT8, FLOAT8_BLOCKS, MXFP8, NVFP4, NVFP4_SCHEME

FP8 = DType.kFloat8E4M3


def grouped(**changes: Any) -> GroupedTensorStorage:
    quantizer = Float8CurrentScalingQuantizer(FP8, "cpu")
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    return group_quantize(x, quantizer, **{"num_tensors": 2, "first_dims": torch.tensor([2, 4]), **changes})


def test_it_says_how_its_members_vary() -> None:
    equal, rows = grouped(first_dims=None), grouped()
    columns = grouped(first_dims=None, last_dims=torch.tensor([1, 3]))
    both = grouped(last_dims=torch.tensor([2, 4]), first_dims=torch.tensor([2, 4]))
    described = [(g.all_same_shape(), g.all_same_first_dim(), g.all_same_last_dim(), g.varying_both_dims()) for g in (equal, rows, columns, both)]
    assert described == [(True, True, True, False), (False, False, True, False), (False, True, False, False), (False, False, False, True)]
    assert (equal.get_common_first_dim(), equal.get_common_last_dim()) == (3, 4)
    assert rows.get_common_last_dim() == 4 and columns.get_common_first_dim() == 6
    with pytest.raises(ArgumentError):
        rows.get_common_first_dim()
    with pytest.raises(ArgumentError):
        columns.get_common_last_dim()
    assert rows.size() == (6, 4) and rows.size(0) == 6 and rows.get_dtype() is rows.dtype is torch.float32 and rows.device.type == "cpu"
    assert rows.has_data() and rows.has_columnwise_data()
    assert repr(rows) == "GroupedTensorStorage(2 in [6, 4], torch.float32, Float8CurrentScalingQuantizer(kFloat8E4M3, rowwise=True, columnwise=True))"


def test_the_members_are_of_the_class_that_the_quantizer_makes() -> None:
    x = grouped()
    assert [type(member) for member in x.split_into_quantized_tensors()] == [Float8Tensor, Float8Tensor]
    assert x.tensor_shapes == [(2, 4), (4, 4)] and x.offsets == [0, 8, 24]
    x.quantizer.internal = True
    assert [type(member) for member in x.split_into_quantized_tensors()] == [Float8TensorStorage, Float8TensorStorage]


def test_quantizing_into_the_members() -> None:
    x = grouped()
    values = [torch.full((2, 4), 3.0), torch.full((4, 4), -5.0)]
    x.quantize(values)
    assert torch.equal(x.dequantize(dtype=torch.float32).rowwise_data, torch.cat([value.view(-1) for value in values]))
    x.quantize([torch.ones(2, 4), torch.ones(4, 4)], noop_flag=torch.ones(1))
    assert torch.equal(x.dequantize().rowwise_data, torch.cat([value.view(-1) for value in values]))
    with pytest.raises(ArgumentError):
        x.quantize(values[:1])
    plain = GroupedTensorStorage((6, 4), torch.float32, num_tensors=2, data=torch.zeros(24), first_dims=torch.tensor([2, 4]))
    plain.quantize(values)
    assert torch.equal(plain.rowwise_data, torch.cat([value.view(-1) for value in values]))


def test_saving_takes_the_tensors_out_and_restoring_puts_them_back() -> None:
    x = grouped(tensor_offsets=torch.tensor([0, 8, 24]))
    held = x.get_data_tensors()
    tensors, same = x.prepare_for_saving()
    assert same is x and len(tensors) == 10 and all(tensor is None for tensor in x.get_data_tensors())
    rest = x.restore_from_saved([*tensors, "next"])
    assert rest == ["next"] and all(a is b for a, b in zip(x.get_data_tensors(), held, strict=True))


def test_a_copy_shares_the_buffers_and_not_the_description() -> None:
    x = grouped()
    other = x.copy()
    assert other.rowwise_data is x.rowwise_data and type(other) is GroupedTensorStorage
    other.columnwise_data = None
    assert x.columnwise_data is not None
    x.clear()
    assert x.num_tensors == 0 and x.rowwise_data is None and other.rowwise_data is not None
    with pytest.raises(ArgumentError):
        layout_of((0, 0), 0)


@pytest.mark.parametrize("shape", [(2, 4), (5,)])
def test_rowwise_data_becomes_members(shape: tuple[int, ...]) -> None:
    elements = 3 * torch.Size(shape).numel()
    data = torch.arange(float(elements))
    x = GroupedTensorStorage.make_grouped_tensor_from_rowwise_data(num_tensors=3, tensor_shape=shape, rowwise_data=data)
    assert x.logical_shape == ((6, 4) if len(shape) == 2 else (15, 1))
    found = x.split_into_quantized_tensors()
    assert [tuple(member.shape) for member in found] == [shape] * 3 and torch.equal(torch.cat([m.view(-1) for m in found]), data)
    with pytest.raises(ShapeError):
        GroupedTensorStorage.make_grouped_tensor_from_rowwise_data(num_tensors=2, tensor_shape=shape, rowwise_data=data)


def test_a_quantizer_of_an_unknown_room_is_refused() -> None:
    with pytest.raises(DTypeError, match="registered class"):
        build_grouped(object())


@pytest.mark.parametrize("swizzled", [False, True])
def test_members_of_packed_formats_find_their_bytes_and_their_padded_scales(monkeypatch: pytest.MonkeyPatch, swizzled: bool) -> None:
    """Two elements to the byte, one scale for 16 elements of a row, rows of scales padded to 4, and one amax each: all told by an empty member."""
    monkeypatch.setattr("fusible.tex.calls.grouped.scheme_of", lambda quantizer: NVFP4_SCHEME)
    shapes = [(2, 32), (0, 32), (3, 32)]

    def empty(quantizer: Any, shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
        assert quantizer.rowwise_usage and not quantizer.columnwise_usage
        made: dict[str, Any] = dict.fromkeys(NVFP4.member_fields.values())
        made["_rowwise_data"] = torch.empty(shape[0], 16, dtype=torch.uint8)
        made["_rowwise_scale_inv"] = torch.empty(-(-shape[0] // 4) * 4, 2, dtype=torch.uint8)
        made["_amax_rowwise"] = torch.empty(1)
        return SimpleNamespace(**made, _with_gemm_swizzled_scales=False)

    quantizer = SimpleNamespace(rowwise_usage=True, columnwise_usage=True, internal=False)
    data, scales, amax = torch.arange(80, dtype=torch.uint8), torch.arange(100, 116, dtype=torch.uint8), torch.arange(3.0)
    buffers = {"data": data, "scale_inv": scales, "amax": amax, "first_dims": torch.tensor([2, 0, 3])}
    x = GroupedTensorStorage((5, 32), torch.bfloat16, num_tensors=3, quantizer=quantizer, with_gemm_swizzled_scales=swizzled, **buffers)
    found = members(x, empty)
    assert [tuple(member._rowwise_data.shape) for member in found] == [(m, 16) for m, _ in shapes]
    assert torch.equal(found[0]._rowwise_data.view(-1), data[:32]) and torch.equal(found[2]._rowwise_data.view(-1), data[32:])
    assert torch.equal(found[0]._rowwise_scale_inv.view(-1), scales[:8]) and torch.equal(found[2]._rowwise_scale_inv.view(-1), scales[8:])
    assert [member._amax_rowwise.item() for member in found] == [0.0, 1.0, 2.0]
    assert all(member._columnwise_data is None and member._with_gemm_swizzled_scales is swizzled for member in found)
    assert quantizer.columnwise_usage and all(member._quantizer is quantizer for member in found)


@pytest.mark.parametrize("fields", [form.member_fields for form in (FLOAT8, FLOAT8_BLOCKS, MXFP8, NVFP4)], ids=str)
def test_every_format_names_buffers_that_a_grouped_tensor_has(fields: dict[str, str]) -> None:
    held: Callable[[str], bool] = lambda name: hasattr(grouped(), name)  # noqa: E731
    assert all(map(held, fields)) and {"rowwise_data", "columnwise_data", "scale_inv", "columnwise_scale_inv"} <= fields.keys()
