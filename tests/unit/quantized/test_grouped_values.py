"""What the methods of grouped tensors give, against float64 and against each member by itself."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch

from fusible.errors import DTypeError, ShapeError
from fusible.quantized import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
    GroupedTensor,
    GroupedTensorStorage,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from fusible.tex import DType

E4M3 = DType.kFloat8E4M3
FORMATS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "delayed": lambda: Float8Quantizer(torch.tensor([16.0]), torch.zeros(1), E4M3),
    "current": lambda: Float8CurrentScalingQuantizer(E4M3),
    "block": lambda: Float8BlockQuantizer(E4M3),
    "mxfp8": lambda: MXFP8Quantizer(E4M3),
    "nvfp4": NVFP4Quantizer,
}
SHAPES = {"equal": [(64, 64)] * 2, "rows": [(32, 64), (0, 64), (96, 64)], "columns": [(64, 32), (64, 96)], "both": [(32, 64), (64, 32)]}
CLASSES = [GroupedTensorStorage, GroupedTensor]


def values(shapes: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator) * 2**place for place, shape in enumerate(SHAPES[shapes])]


def filled(cls: type[Any], name: str, shapes: str) -> Any:
    made = cls.make_grouped_tensor_with_shapes(len(SHAPES[shapes]), SHAPES[shapes], FORMATS[name](), dtype=torch.float32)
    made.quantize(values(shapes))
    return made


def members(group: Any) -> list[torch.Tensor]:
    found = group.split_into_quantized_tensors()
    return [member if group.quantizer is None else member.dequantize() for member in found]


def bound(name: str, x: torch.Tensor) -> torch.Tensor:
    """How far a quantized value may be from x, in float64.

    E4M3 has 3 bits: half a step is 2^-4 of x, and of what is subnormal 2^-10 of the scale's unit, which is 1/16 here under delayed scaling and at
    most ``2 amax / 448`` else. E2M1 has steps of up to a third of 6, half of which is a sixth of the block's amax, and the block's scale, an E4M3,
    may be 2^-4 off, by which values are stretched or cut.
    """
    if name == "none" or not x.numel():
        return torch.zeros_like(x)
    if name == "nvfp4":
        amax = x.reshape(-1, 16).abs().amax(dim=1, keepdim=True)
        return ((1 / 6 * (1 + 2**-4) + 2**-4) * amax).expand(-1, 16).reshape(x.shape)
    return x.abs() * 2**-4 + 2**-10 * (1 / 16 if name == "delayed" else 2 * float(x.abs().amax()) / 448)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("name", FORMATS)
def test_members_are_what_each_is_by_itself_and_near_float64(name: str, shapes: str, cls: type[Any]) -> None:
    group = filled(cls, name, shapes)
    for member, x in zip(members(group), values(shapes), strict=True):
        alone = FORMATS[name]()
        assert torch.equal(member, x if alone is None else alone(x).dequantize())
        assert bool(((member.double() - x.double()).abs() <= bound(name, x.double())).all())
    if name == "delayed":
        assert float(group.quantizer.amax) == max(float(x.abs().amax()) for x in values(shapes) if x.numel())


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("name", FORMATS)
def test_a_group_is_dequantized_member_by_member(name: str, shapes: str, dtype: torch.dtype | None) -> None:
    storage = filled(GroupedTensorStorage, name, shapes)
    wanted = torch.cat([member.to(dtype or torch.float32).reshape(-1) for member in members(storage)])
    found = storage.dequantize(dtype=dtype)
    assert found.quantizer is None and found.get_dtype() is found.rowwise_data.dtype is wanted.dtype and torch.equal(found.rowwise_data, wanted)
    assert all(torch.equal(a, b.to(wanted.dtype)) for a, b in zip(members(found), members(storage), strict=True))
    assert name != "none" or found.rowwise_data.data_ptr() != storage.rowwise_data.data_ptr()
    tensor = filled(GroupedTensor, name, shapes)
    if shapes in ("equal", "rows"):
        assert torch.equal(tensor.dequantize(dtype=dtype).reshape(-1), wanted)
        assert torch.equal(tensor.dequantize(dtype=DType.kBFloat16), tensor.dequantize(dtype=torch.bfloat16))
    else:
        with pytest.raises(ShapeError, match="members of one width"):
            tensor.dequantize(dtype=dtype)


@pytest.mark.parametrize("shapes", ["equal", "rows"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_whole_tensor_is_quantized_into_the_members(name: str, shapes: str) -> None:
    group, wanted = (
        GroupedTensor.make_grouped_tensor_with_shapes(len(SHAPES[shapes]), SHAPES[shapes], FORMATS[name](), dtype=torch.float32),
        filled(GroupedTensor, name, shapes),
    )
    whole = torch.cat(values(shapes)).reshape(group.shape)
    assert group.quantize_(whole) is group  # type: ignore[attr-defined]
    assert torch.equal(group.dequantize(), wanted.dequantize())  # type: ignore[arg-type]
    group.quantize_(wanted)  # type: ignore[attr-defined]
    twice = [member if name == "none" else FORMATS[name]()(member).dequantize() for member in members(wanted)]
    assert all(map(torch.equal, members(group), twice))


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("name", FORMATS)
def test_nothing_is_written_where_the_flag_is_one(name: str, cls: type[Any]) -> None:
    group = filled(cls, name, "rows")
    before = [member.clone() for member in members(group)]
    other = [x * 3 for x in values("rows")]
    for flag in (torch.ones(1), torch.ones(())):
        assert len(group.quantize(other, noop_flag=flag)) == 3
        assert all(map(torch.equal, members(group), before))
    group.quantize(other, torch.zeros(1))
    assert all(torch.equal(a, b if name == "none" else FORMATS[name]()(b).dequantize()) for a, b in zip(members(group), other, strict=True))


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_made_of_a_group_shares_its_buffers_or_copies_them(name: str) -> None:
    group = filled(GroupedTensor, name, "rows")
    storage = group.storage_without_autograd()
    for other in (group.copy(), GroupedTensor.make_like(group), GroupedTensor.from_storage(storage, requires_grad=True), storage.copy(), storage):
        assert all(a is b for a, b in zip(other.get_data_tensors(), group.get_data_tensors(), strict=True))
        assert other.num_tensors == 3 and all(map(torch.equal, members(other), members(group)))
    assert GroupedTensor.make_like(group, requires_grad=True).requires_grad
    apart = deepcopy(group)
    group.quantize([x * 3 for x in values("rows")])
    assert not torch.equal(members(apart)[0], members(group)[0])
    apart.copy_from_storage(group)
    assert all(map(torch.equal, members(apart), members(group)))


@pytest.mark.parametrize("name", FORMATS)
def test_a_group_like_another_has_its_shape_and_the_dtype_of_its_data(name: str) -> None:
    group = filled(GroupedTensor, name, "rows")
    with pytest.raises(ShapeError, match=r"^shape of a tensor like a GroupedTensor: expected \[128, 64\], got \[64, 128\]; "):
        GroupedTensor.make_like(group, shape=(64, 128))
    if name == "none":
        with pytest.raises(DTypeError, match=r"^dtype of a tensor over the data of an unquantized GroupedTensor: expected torch.float32"):
            Float8Tensor.make_like(group, dtype=torch.bfloat16)
    else:
        like = GroupedTensor.make_like(group, dtype=torch.bfloat16)
        assert like.dtype is torch.bfloat16 and torch.equal(like.dequantize(), group.dequantize(dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_offsets_are_counted_in_int64(dtype: torch.dtype) -> None:
    """However few bits the rows come in: 100 rows of 100 columns are more elements than a byte counts, and experts of 2^16 rows than 32 bits do."""
    top = min(torch.iinfo(dtype).max, 2**20)
    dims, columns = [top, 0, top // 2, top], 2**13 - 1
    found = GroupedTensorStorage.make_tensor_offsets(torch.tensor(dims, dtype=dtype), columns)
    assert found.dtype is torch.int64 and found.tolist() == [0, *(sum(dims[: i + 1]) * columns for i in range(4))]


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("internal", [False, True])
def test_rowwise_data_is_wrapped_as_it_lies(internal: bool, cls: type[Any]) -> None:
    data = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    made = cls.make_grouped_tensor_from_rowwise_data(num_tensors=2, tensor_shape=(3, 4), rowwise_data=data, dtype=torch.float64, internal=internal)
    assert type(made) is (GroupedTensorStorage if internal else cls) and made.get_dtype() is torch.float64
    assert made.rowwise_data.data_ptr() == data.data_ptr() and all(map(torch.equal, made.split_into_quantized_tensors(), data))
    with pytest.raises(DTypeError, match="rowwise_data: expected torch.float32, which dtype says"):
        cls.make_grouped_tensor_from_rowwise_data(num_tensors=2, tensor_shape=(3, 4), rowwise_data=data, dtype=torch.float32)


@pytest.mark.parametrize("name", FORMATS)
def test_saved_tensors_come_back_to_their_places(name: str) -> None:
    group = filled(GroupedTensorStorage, name, "rows")
    wanted = [member.clone() for member in members(group)]
    tensors, same = group.prepare_for_saving()
    assert same is group and group.restore_from_saved([*tensors, "next"]) == ["next"] and all(map(torch.equal, members(group), wanted))
