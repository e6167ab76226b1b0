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
    GroupedTensor,
    GroupedTensorStorage,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
)
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


def test_fsdp_is_refused() -> None:
    with pytest.raises(ArgumentError, match="FSDP2: expected tensors of their own"):
        made("plain").fsdp_pre_all_gather(None, None, None, None, None)
