"""What ``torch.distributed.checkpoint`` asks of ``LoadPlanner``, without files and processes: parts of quantized tensors, and its options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from fusible.pytorch.checkpoint import LoadPlanner
from fusible.quantized import Float8CurrentScalingQuantizer, Float8Quantizer, QuantizedTensor
from fusible.tex import DType


def part(name: str, first: int, rows: int) -> ReadItem:
    index, offset = MetadataIndex(name, torch.Size([0, 0])), torch.Size([first, 0])
    return ReadItem(LoadItemType.TENSOR, index, offset, index, torch.Size([0, 0]), torch.Size([rows, 16]))


def begun(state_dict: dict[str, Any]) -> LoadPlanner:
    planner = LoadPlanner(state_dict)
    planner.set_up_planner(state_dict)
    return planner


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_a_quantized_tensor_is_made_when_its_last_part_is_read(order: tuple[int, ...]) -> None:
    quantizer = Float8CurrentScalingQuantizer(DType.kFloat8E4M3)
    held, values = quantizer(torch.zeros(8, 16)), torch.randn(8, 16)
    planner = begun({"w": held})
    parts = [part("w", 0, 4), part("w", 4, 1), part("w", 5, 3)]
    for place in order:
        assert not held.dequantize().any()
        into = planner.resolve_tensor(parts[place])
        first, rows = parts[place].dest_offsets[0], parts[place].lengths[0]
        assert into.size() == (rows, 16)  # as a storage reader asks, which then copies
        into.detach().copy_(values[first : first + rows])
        planner.commit_tensor(parts[place], into)
    assert torch.equal(held.dequantize(), quantizer(values).dequantize())


def test_parts_in_8_bits_with_one_scale_are_put_together_by_their_bytes() -> None:
    """The scale is theirs, not that by which the tensor was held."""
    values = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    saved, held = (Float8Quantizer(torch.tensor([scale]), torch.zeros(1), DType.kFloat8E4M3)(values) for scale in (3.0, 1.0))
    assert isinstance(saved, QuantizedTensor) and not torch.equal(held.dequantize(), saved.dequantize())
    planner = begun({"w": held})
    for first, rows in ((3, 5), (0, 3)):
        into = planner.resolve_tensor(part("w", first, rows))
        into.copy_(saved[first : first + rows])
        planner.commit_tensor(part("w", first, rows), into)
    assert torch.equal(held.dequantize(), saved.dequantize())


def test_places_are_made_for_scaling_states_that_are_tensors() -> None:
    """Another's object may have the name of one."""
    given: dict[str, Any] = {}
    size, properties = torch.Size([3, 4]), TensorProperties(torch.float32)
    saved = {"scaling_state.0": TensorStorageMetadata(properties, size, []), "other.scaling_state.0": BytesStorageMetadata()}
    LoadPlanner(given, allow_partial_load=True).set_up_planner(given, Metadata(saved))
    assert list(given) == ["scaling_state.0"] and given["scaling_state.0"].shape == size


def test_what_is_read_as_one_and_plain_tensors_are_written_to_as_they_are() -> None:
    held, plain = Float8CurrentScalingQuantizer(DType.kFloat8E4M3)(torch.zeros(8, 16)), torch.zeros(8, 16)
    planner = begun({"w": held, "b": plain})
    assert planner.resolve_tensor(part("w", 0, 8)).shape == (8, 16) and not planner._parts
    into = planner.resolve_tensor(part("b", 2, 3))
    into.fill_(1.0)
    planner.commit_tensor(part("b", 2, 3), into)
    assert plain.sum() == 48 and plain[2:5].all() and not planner._parts


@pytest.mark.parametrize("option", ["flatten_state_dict", "flatten_sharded_tensors", "allow_partial_load"])
def test_options_are_those_of_the_default_planner(option: str) -> None:
    for value in (True, False):
        assert getattr(LoadPlanner({}, **{option: value}), option) is value
