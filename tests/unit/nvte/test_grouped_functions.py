"""Grouped tensors as values of a pass: taken apart and put together, by columns alone, and quantized by a scale for each member."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusible import nvte, tex
from fusible.errors import ArgumentError, ShapeError
from fusible.nvte import DType, Pass, QuantizedType, make_nvte_tensor, running
from fusible.quantized import Float8BlockQuantizer, Float8CurrentScalingQuantizer, Float8Quantizer, MXFP8Quantizer, NVFP4Quantizer
from fusible.quantized.grouped import GroupedTensorStorage

SIZES = torch.tensor([32, 0, 64, 32])
QUANTIZERS = [
    Float8CurrentScalingQuantizer(7),
    Float8BlockQuantizer(7, block_scaling_dim=1),
    MXFP8Quantizer(7),
    NVFP4Quantizer(with_rht=True, with_post_rht_amax=True),
]


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def grouped(quantizer: Any, columnwise: bool = True) -> nvte.Tensor:
    type = QuantizedType.of(quantizer).read(rowwise=True, columnwise=columnwise)
    return nvte.grouped_cast(make_nvte_tensor(random(0, 128, 64)), make_nvte_tensor(SIZES), [type] * 4)


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=lambda q: type(q).__name__)
def test_what_is_taken_apart_and_put_together_is_the_same(quantizer: Any) -> None:
    x = grouped(quantizer)
    leaves, spec = nvte.flatten([x])
    assert all(isinstance(leaf, Tensor) for leaf in leaves)
    (y,) = nvte.unflatten([leaf.clone() for leaf in leaves], spec)
    assert y.type == x.type and y.shape == x.shape == (128, 64) and isinstance(y.data, GroupedTensorStorage)
    for mine, other in zip(x.data.get_data_tensors(), y.data.get_data_tensors(), strict=True):
        assert (mine is None) == (other is None) and (mine is None or torch.equal(mine, other))
    for mine, other in zip(x.data.split_into_quantized_tensors(), y.data.split_into_quantized_tensors(), strict=True):
        assert torch.equal(mine.dequantize(), other.dequantize())


def test_what_the_host_has_read_of_the_sizes_is_no_part_of_the_description() -> None:
    x = grouped(QUANTIZERS[0])
    before = x.data.get_metadata()
    x.data.split_into_quantized_tensors()
    assert x.data.tensor_shapes is not None and x.data.get_metadata()["shapes"] is None is before["shapes"]


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=lambda q: type(q).__name__)
def test_by_columns_only_the_column_wise_copy_is_left(quantizer: Any) -> None:
    x = grouped(quantizer)
    y = nvte.by_columns(x)
    if x.type.scaling == "current":  # type: ignore[union-attr]
        assert y is x
        return
    assert (y.data.rowwise_data, y.data.scale_inv, y.data.amax) == (None, None, None)
    assert y.data.columnwise_data is x.data.columnwise_data and y.data.columnwise_scale_inv is x.data.columnwise_scale_inv
    dy = nvte.grouped_cast(make_nvte_tensor(random(1, 128, 32)), make_nvte_tensor(SIZES), [DType.Float32] * 4)
    products = [nvte.grouped_transpose_matmul(dy, operand, DType.Float32).data for operand in (x, y)]
    assert torch.equal(*products)


def test_under_delayed_scaling_each_group_has_its_scale_and_its_amax() -> None:
    x, scales = random(0, 128, 64), torch.tensor([1.0, 2.0, 4.0, 8.0])
    types = [QuantizedType(DType.Float8E4M3, "delayed", f"0.x{i}") for i in range(4)]
    with running(Pass("forward", {type.slot: scales[i : i + 1] for i, type in enumerate(types)})) as state:
        y = nvte.grouped_cast(make_nvte_tensor(x), make_nvte_tensor(SIZES), types)
    members = y.data.split_into_quantized_tensors()
    for i, (piece, member) in enumerate(zip(x.split(SIZES.tolist()), members, strict=True)):
        alone = tex.quantize(piece, Float8Quantizer(scales[i : i + 1], None, DType.Float8E4M3), None, None)
        assert torch.equal(member._data, alone._data) and member._scale_inv.item() == 1 / scales[i].item()
        assert state.amaxes[f"0.x{i}"].shape == (1,)
        assert state.amaxes[f"0.x{i}"].item() == (piece.abs().max().item() if len(piece) else 0.0)


def test_a_quantizer_with_scales_for_members_raises_the_amax_of_each() -> None:
    x = torch.tensor([[1.0, -2.0], [3.0, 4.0], [-5.0, 6.0]])
    quantizer = Float8Quantizer(torch.ones(2), torch.tensor([9.0, 3.0]), DType.Float8E4M3)
    tex.group_quantize(x, quantizer, 2, torch.tensor([2, 1]))
    assert quantizer.amax.tolist() == [9.0, 6.0]
    tex.bgrad_group_quantize(x * 10, quantizer, 2, torch.tensor([2, 1]))
    assert quantizer.amax.tolist() == [40.0, 60.0]
    tex.group_quantize(x * 100, quantizer, 2, torch.tensor([2, 1]), noop_flag=torch.ones(1))
    assert quantizer.amax.tolist() == [40.0, 60.0]
    with pytest.raises(ShapeError, match="1 or 3 scales"):
        tex.group_quantize(x, quantizer, 3, torch.tensor([1, 1, 1]))


def test_groups_of_different_quantizers_are_refused() -> None:
    x, sizes = make_nvte_tensor(random(0, 128, 64)), make_nvte_tensor(SIZES)
    types = [QuantizedType.of(quantizer) for quantizer in QUANTIZERS]
    with pytest.raises(ArgumentError, match="one quantizer"):
        nvte.grouped_cast(x, sizes, types)
    with pytest.raises(ArgumentError, match="one quantizer"):
        nvte.grouped_cast(x, sizes, [types[0], types[0], DType.Float32, types[0]])


def test_stacking() -> None:
    parts = [make_nvte_tensor(random(i, 3, 2)) for i in range(4)]
    whole = nvte.stack(parts)
    assert whole.shape == (4, 3, 2)
    views = nvte.unstack(whole)
    assert all(torch.equal(view.data, part.data) for view, part in zip(views, parts, strict=True))
    assert {view.data.untyped_storage().data_ptr() for view in views} == {whole.data.untyped_storage().data_ptr()}
