"""Grouped tensors that are made empty, and grouped tensors in checkpoints."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import torch
from torch import nn

from fusible import tex
from fusible.errors import ArgumentError, CheckpointError, DTypeError, ShapeError
from fusible.quantized import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    GroupedTensor,
    GroupedTensorStorage,
    MXFP8Quantizer,
    NVFP4Quantizer,
    flatten_state_dict,
    from_plain,
    to_plain,
    unflatten_state_dict,
)
from fusible.quantized.grouped import GROUPED_BUFFERS
from fusible.tex import DType
from fusible.tex.calls import grouped

E4M3 = DType.kFloat8E4M3
QUANTIZERS = {
    "none": None,
    "current": Float8CurrentScalingQuantizer(E4M3),
    "mxfp8": MXFP8Quantizer(E4M3),
    "block": Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True),
    "nvfp4": NVFP4Quantizer(),
}
SHAPES = {
    "equal": [(64, 128), (64, 128)],
    "rows": [(32, 128), (96, 128), (0, 128)],
    "columns": [(64, 64), (64, 128)],
    "both": [(64, 64), (32, 128)],
}
GROUPED = [GroupedTensorStorage, GroupedTensor]


@pytest.mark.parametrize("cls", GROUPED)
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_members_of_a_new_one_are_written_and_read(name: str, shapes: str, cls: type[Any]) -> None:
    members = SHAPES[shapes]
    made = cls.make_grouped_tensor_with_shapes(len(members), members, QUANTIZERS[name], dtype=torch.float32)
    assert type(made) is cls and made.num_tensors == len(members) and made.quantizer is QUANTIZERS[name]
    assert made.all_same_first_dim() is (shapes in ("equal", "columns")) and made.all_same_last_dim() is (shapes in ("equal", "rows"))
    values = [torch.full(shape, float(i + 1)) for i, shape in enumerate(members)]
    made.quantize(values)
    for member, value in zip(made.split_into_quantized_tensors(), values, strict=True):
        assert torch.equal(member if name == "none" else member.dequantize(), value)


@pytest.mark.parametrize("cls", GROUPED)
@pytest.mark.parametrize("name", [name for name, quantizer in QUANTIZERS.items() if quantizer is not None])
def test_what_is_written_to_members_is_written_to_every_buffer_of_the_group(name: str, cls: type[Any]) -> None:
    """A group that was quantized member by member has the buffers of one that was quantized whole: the scales of both its copies, too."""
    made = cls.make_grouped_tensor_with_shapes(2, [(64, 128)] * 2, QUANTIZERS[name], dtype=torch.float32)
    for buffer in filter(lambda x: x is not None, made.get_data_tensors()):
        buffer.view(torch.uint8).fill_(255)
    x = torch.randn(128, 128, generator=torch.Generator().manual_seed(3))
    made.quantize(x.split(64))
    assert_buffers(made, tex.group_quantize(x, QUANTIZERS[name], 2, None))
    made.split_into_quantized_tensors()[1].copy_(-2 * x[:64])
    assert_buffers(made, tex.group_quantize(torch.cat([x[:64], -2 * x[:64]]), QUANTIZERS[name], 2, None))


def assert_buffers(made: Any, wanted: Any) -> None:
    for name in (name for name in GROUPED_BUFFERS if getattr(made, name) is not None):
        assert torch.equal(getattr(made, name).view(-1), getattr(wanted, name).view(-1)), name


def test_offsets_are_sums_of_elements() -> None:
    dims = torch.tensor([3, 0, 5])
    assert GroupedTensorStorage.make_tensor_offsets(dims, 4).tolist() == [0, 12, 12, 32]
    made = GroupedTensorStorage.make_grouped_tensor(3, dims, None, 8, 4, dtype=torch.bfloat16)
    assert made.tensor_offsets.tolist() == [0, 12, 12, 32] and [len(part) for part in made.split_into_quantized_tensors()] == [3, 0, 5]
    assert made.get_dtype() is torch.bfloat16 and made.rowwise_data.numel() == 32
    with pytest.raises(ArgumentError, match=r"^an unquantized grouped tensor: expected a dtype, got none; "):
        GroupedTensorStorage.make_grouped_tensor(3, dims, None, 8, 4)
    with pytest.raises(ShapeError, match="members within"):
        GroupedTensorStorage.make_grouped_tensor(3, dims, None, 7, 4, dtype=torch.float32)


def filled(name: str, cls: type[Any], shapes: str = "equal") -> Any:
    made = cls.make_grouped_tensor_with_shapes(2, SHAPES[shapes][:2], QUANTIZERS[name], dtype=torch.bfloat16)
    made.quantize([torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate(SHAPES[shapes][:2])])
    return made


def alike(one: Any, other: Any) -> bool:
    pairs = zip(one.get_data_tensors(), other.get_data_tensors(), strict=True)
    same = all((a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in pairs)
    return type(one) is type(other) and same and one.logical_shape == other.logical_shape and one.fake_dtype is other.fake_dtype


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("cls", GROUPED)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_checkpoint_has_a_grouped_tensor_as_plain_tensors_and_json(name: str, cls: type[Any], shapes: str) -> None:
    made = filled(name, cls, shapes)
    tensors, header = to_plain(made)
    again = from_plain(tensors, json.loads(json.dumps(header)))
    assert alike(again, made) and again.quantizer == made.quantizer
    flat, metadata = flatten_state_dict({"experts": made, "other": torch.ones(2)})
    assert all(type(tensor) is torch.Tensor for tensor in flat.values())
    assert alike(unflatten_state_dict(flat, metadata)["experts"], made)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_module_with_a_grouped_parameter_is_saved_and_loaded(name: str) -> None:
    class Experts(nn.Module):
        def __init__(self, weight: Any) -> None:
            super().__init__()
            self.weight = nn.Parameter(weight)

    saved, file = Experts(filled(name, GroupedTensor)), io.BytesIO()
    torch.save(saved.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    fresh = Experts(GroupedTensor.make_grouped_tensor_with_shapes(2, SHAPES["equal"], QUANTIZERS[name], dtype=torch.bfloat16))
    fresh.load_state_dict(state)
    assert alike(fresh.weight, saved.weight) and isinstance(fresh.weight, nn.Parameter)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda tensors, header: tensors.update(data=tensors["data"][:-1]), "uint8 .* as data"),
        (lambda tensors, header: tensors.update(scale_inv=tensors["scale_inv"].float()), "as scale_inv"),
        (lambda tensors, header: header["options"].update(num_tensors=3), "multiple of 3 rows|uint8"),
        (lambda tensors, header: header.update({"class": "MXFP8Quantizer"}), "the class of a quantized tensor"),
        (lambda tensors, header: tensors.clear(), "none of its names"),
    ],
)
def test_damage_is_one_sentence(damage: Any, message: str) -> None:
    tensors, header = to_plain(filled("mxfp8", GroupedTensor))
    header["options"]["shapes"] = None
    damage(tensors, header)
    with pytest.raises(CheckpointError, match=message):
        from_plain(tensors, header)


def test_a_group_of_no_quantizer_wants_the_room_that_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where ``fusible.tex`` alone was imported."""
    monkeypatch.setattr(grouped, "_FACTORIES", {})
    with pytest.raises(DTypeError, match=r"a grouped tensor of group_quantize: expected .*, got NoneType; import fusible\.quantized"):
        tex.group_quantize(torch.ones(4, 4), None, 2, None)
