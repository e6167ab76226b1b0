"""``GroupedTensor``: the members of one buffer as one ``torch.Tensor``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusible import tex
from fusible.errors import ArgumentError, ShapeError, ValuesError
from fusible.quantized import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    GroupedTensor,
    GroupedTensorStorage,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
)
from fusible.quantized.parts import PartOfValues
from fusible.tex import DType
from fusible.tex.operands import kind

E4M3, COUNT, MEMBER = DType.kFloat8E4M3, 3, (128, 64)
MAKERS: dict[str, Callable[[], Any]] = {
    "plain": lambda: None,
    "current": lambda: Float8CurrentScalingQuantizer(E4M3),
    "block": lambda: Float8BlockQuantizer(E4M3, block_scaling_dim=1),
    "mxfp8": lambda: MXFP8Quantizer(E4M3),
    "nvfp4": NVFP4Quantizer,
}
EVERY = pytest.mark.parametrize("name", MAKERS)


def values(seed: int = 1) -> torch.Tensor:
    return torch.randn(COUNT, *MEMBER, generator=torch.Generator().manual_seed(seed)).bfloat16()


def quantized(name: str, stacked: torch.Tensor) -> torch.Tensor:
    """What the members' values become, one by one."""
    quantizer = MAKERS[name]()
    return stacked if quantizer is None else torch.stack([quantizer(member).dequantize() for member in stacked])


def made(name: str, seed: int = 1, **options: Any) -> GroupedTensor:
    x, quantizer = values(seed).view(-1, MEMBER[1]), MAKERS[name]()
    if quantizer is None:
        storage = GroupedTensorStorage.make_grouped_tensor_from_rowwise_data(num_tensors=COUNT, tensor_shape=MEMBER, rowwise_data=x)
    else:
        storage = tex.group_quantize(x, quantizer, COUNT, None)
        storage.tensor_shapes = [MEMBER] * COUNT
    return GroupedTensor.from_storage(storage, **options)


@EVERY
def test_it_is_a_tensor_of_its_members_values(name: str) -> None:
    g = made(name)
    assert isinstance(g, GroupedTensorStorage) and isinstance(g, QuantizedTensor) and g.shape == (COUNT, *MEMBER) and g.dtype is torch.bfloat16
    assert torch.equal(g.dequantize(), quantized(name, values())) and torch.equal(g + 1, g.dequantize() + 1) and torch.equal(g[1], g.dequantize()[1])
    assert kind(g) == kind(g.storage_without_autograd()) and g.logical_shape == (COUNT * MEMBER[0], MEMBER[1])
    assert repr(g).startswith("GroupedTensor(3")
    for member, wanted in zip(g.split_into_quantized_tensors(), quantized(name, values()), strict=True):
        assert torch.equal(member.dequantize() if isinstance(member, QuantizedTensor) else member, wanted)


@EVERY
def test_writing_goes_to_the_members_buffers(name: str) -> None:
    g = made(name)
    held = [buffer for buffer in g.get_data_tensors() if buffer is not None]
    wanted = quantized(name, g.dequantize() + values(2))
    g.add_(values(2))
    assert torch.equal(g.dequantize(), wanted)
    assert all(a is b for a, b in zip(held, (buffer for buffer in g.get_data_tensors() if buffer is not None), strict=True))
    fresh = made(name, 3)
    g.copy_(fresh)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(g.get_data_tensors(), fresh.get_data_tensors(), strict=True))
    g.copy_(values(4))
    assert torch.equal(g.dequantize(), quantized(name, values(4)))
    with pytest.raises(ShapeError):
        g.quantize_(values().view(-1, MEMBER[1]))


@EVERY
def test_it_can_be_a_parameter(name: str) -> None:
    parameter = torch.nn.Parameter(made(name))
    assert type(parameter) is GroupedTensor and parameter.requires_grad and isinstance(parameter, torch.nn.Parameter)
    (parameter * values(2)).sum().backward()
    assert parameter.grad is not None and torch.equal(parameter.grad, values(2))
    plain = torch.nn.Parameter(parameter.dequantize().detach().clone())
    plain.grad = parameter.grad
    for each in (parameter, plain):
        torch.optim.SGD([each], lr=0.125).step()
    assert torch.equal(parameter.dequantize(), quantized(name, plain.detach()))
    twin = copy.deepcopy(parameter)
    assert type(twin) is GroupedTensor and isinstance(twin, torch.nn.Parameter) and torch.equal(twin.dequantize(), parameter.dequantize())
    detached = parameter.detach()
    twin.data.zero_()
    assert torch.equal(detached.dequantize(), parameter.dequantize()) and not twin.dequantize().any()
    twin.data = made(name, 5)
    assert torch.equal(twin.dequantize(), quantized(name, values(5)))
    moved = parameter.to("meta")
    assert type(moved) is GroupedTensor and moved.get_data_tensors()[0].device.type == "meta"


def test_members_of_other_heights_are_stacked_and_of_other_widths_refused() -> None:
    data = torch.arange(24.0)
    rows = GroupedTensor((6, 4), torch.float32, num_tensors=2, data=data, first_dims=torch.tensor([2, 4]))
    assert rows.shape == (6, 4) and torch.equal(rows * 2, data.view(6, 4) * 2)
    rows.mul_(2)
    assert torch.equal(data, torch.arange(24.0) * 2)
    columns = GroupedTensor((6, 4), torch.float32, num_tensors=2, data=data, last_dims=torch.tensor([1, 3]))
    with pytest.raises(ValuesError, match="members of one width"):
        columns + 1
    with pytest.raises(ValuesError, match="members of one width"):
        columns.fill_(1)
    assert [tuple(member.shape) for member in columns.split_into_quantized_tensors()] == [(6, 1), (6, 3)]


def test_it_is_made_of_rows_and_copied_without_its_buffers() -> None:
    data = torch.arange(24.0)
    g = GroupedTensor.make_grouped_tensor_from_rowwise_data(num_tensors=3, tensor_shape=(2, 4), rowwise_data=data)
    assert type(g) is GroupedTensor and torch.equal(g + 0, data.view(3, 2, 4))
    other = g.copy()
    assert type(other) is GroupedTensor and other.rowwise_data is g.rowwise_data
    other.columnwise_data = data
    assert g.columnwise_data is None


def test_members_apart_in_the_buffer_are_found() -> None:
    data = torch.arange(24.0)
    g = GroupedTensor((2, 6), torch.float32, num_tensors=2, shapes=[(1, 6)] * 2, data=data, tensor_offsets=torch.tensor([0, 6]))
    assert torch.equal(g.dequantize(), data[:12].view(2, 1, 6))


@pytest.mark.parametrize(("name", "copy"), [("current", "_transpose"), ("mxfp8", "_columnwise_data")])
def test_a_write_reaches_every_copy_that_is_there(name: str, copy: str) -> None:
    g = made(name)
    g.quantizer.set_usage(columnwise=False)
    g.copy_(values(2))
    wanted = MAKERS[name]()(values(2)[0])
    assert torch.equal(getattr(g.split_into_quantized_tensors()[0], copy), getattr(wanted, copy))


STACKS = {
    "current": lambda: Float8CurrentScalingQuantizer(E4M3),
    "rows": lambda: Float8CurrentScalingQuantizer(E4M3, columnwise=False),
    "block": lambda: Float8BlockQuantizer(E4M3, block_scaling_dim=1),
    "tiles": lambda: Float8BlockQuantizer(E4M3, block_scaling_dim=2),
    "mxfp8": lambda: MXFP8Quantizer(E4M3),
    "nvfp4": NVFP4Quantizer,
    "nvfp4-2d": lambda: NVFP4Quantizer(with_2d_quantization=True),
}
DERIVED = ("current", "tiles", "nvfp4-2d")
"""Of which the column-wise copy is made of the row-wise one, and is not gathered."""


def buffers(g: GroupedTensor) -> dict[str, torch.Tensor]:
    return {name: tensor for name in g._TENSORS.values() if (tensor := getattr(g, name)) is not None}


def same_bytes(one: GroupedTensor, other: GroupedTensor) -> bool:
    mine, theirs = buffers(one), buffers(other)
    return mine.keys() == theirs.keys() and all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


@pytest.mark.parametrize("name", STACKS)
def test_a_stack_is_cut_between_its_members_and_gathered_without_loss(name: str) -> None:
    stack = torch.randn(4, *MEMBER, generator=torch.Generator().manual_seed(2)).bfloat16()
    g = GroupedTensor.of_stack(stack, STACKS[name]())
    assert g.shape == stack.shape and g.dtype is torch.bfloat16
    assert torch.equal(g.dequantize(), torch.stack([STACKS[name]()(member).dequantize() for member in stack]))
    parts = g.split(2)
    for part, of in zip(parts, stack.split(2), strict=True):
        assert type(part) is GroupedTensor and same_bytes(part, GroupedTensor.of_stack(of, STACKS[name]()))
    assert type(g[1:4]) is GroupedTensor and torch.equal(g[1:4].dequantize(), g.dequantize()[1:4]) and type(g[:, :8]) is PartOfValues
    given = [part.fsdp_pre_all_gather(None, g.shape, g.stride(), None, None) for part in parts]
    assert given[0][0][0].dtype is torch.uint8 and any("columnwise" in field for field in g.fsdp_buffer_fields()) is (name not in (*DERIVED, "rows"))
    joined = tuple(torch.cat(pieces) for pieces in zip(*(pieces for pieces, _ in given), strict=True))
    whole, freed = parts[0].fsdp_post_all_gather(joined, given[0][1], torch.bfloat16)
    gathered = {tensor.data_ptr() for tensor in joined}
    held = {field: tensor.data_ptr() for field, tensor in buffers(whole).items()}
    derived = {field: pointer for field, pointer in held.items() if pointer not in gathered}
    assert same_bytes(whole, g) and freed[: len(joined)] == joined and len(freed) == len(joined) + len(derived)
    assert len(derived) == {"current": 1, "tiles": 2, "nvfp4-2d": 3}.get(name, 0)
    again = tuple(piece.clone() for piece in joined)
    for tensor in freed:  # as FSDP2 frees what it was given, and gives it memory again
        tensor.fill_(1)
    parts[0].fsdp_post_all_gather(again, given[0][1], torch.bfloat16, out=whole)
    assert same_bytes(whole, g)
    assert {field: buffers(whole)[field].data_ptr() for field in derived} == derived
    viewed = g.view_as(g)  # as a DTensor gives what is local
    assert type(viewed) is GroupedTensor and {t.data_ptr() for t in buffers(viewed).values()} == {t.data_ptr() for t in buffers(g).values()}
    with pytest.raises(ValuesError, match="^copy_ of a part of a GroupedTensor: expected a tensor that holds its values itself"):
        parts[1].copy_(torch.ones(2, *MEMBER))
    parts[1].clone().copy_(torch.ones(2, *MEMBER))
    assert same_bytes(whole, g) and torch.equal(parts[0].dequantize(), g.dequantize()[:2]), "others keep what they have"


@pytest.mark.parametrize("name", DERIVED)
def test_usages_of_a_stack(name: str) -> None:
    g = GroupedTensor.of_stack(values(), STACKS[name]())
    wanted = {field: tensor.clone() for field, tensor in buffers(g).items()}
    g.update_usage(columnwise_usage=False)
    assert g.get_usages() == {"rowwise": True, "columnwise": False}
    with pytest.raises(ArgumentError, match="at least one usage"):
        g.update_usage(rowwise_usage=False)
    g.update_usage(columnwise_usage=True)
    assert buffers(g).keys() == wanted.keys() and all(torch.equal(tensor, wanted[field]) for field, tensor in buffers(g).items())
    empty = g.new_empty((2, *MEMBER))
    assert type(empty) is GroupedTensor and empty.shape == (2, *MEMBER) and type(g.new_empty((2, 8, 8))) is torch.Tensor


def test_what_is_no_stack_is_no_shard() -> None:
    delayed = tex.group_quantize(values().view(-1, MEMBER[1]).float(), Float8Quantizer(torch.ones(COUNT), torch.zeros(COUNT), E4M3), COUNT, None)
    unequal = GroupedTensor.make_grouped_tensor_with_shapes(2, [(32, 64), (64, 64)], MAKERS["current"](), dtype=torch.float32)
    for group in (made("plain"), unequal, GroupedTensor.from_storage(delayed)):
        with pytest.raises(ArgumentError, match="FSDP2: expected a stack of matrices scaled by their own magnitudes, got GroupedTensor"):
            group.fsdp_pre_all_gather(None, None, None, None, None)
    for wrong in (torch.zeros(4, 4), torch.zeros(0, 4, 4)):
        with pytest.raises(ShapeError, match=r"values of GroupedTensor.of_stack: expected at least one matrix, \[count, rows, columns\], got "):
            GroupedTensor.of_stack(wrong, MAKERS["current"]())
