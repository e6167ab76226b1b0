"""``Float8Tensor`` stands wherever a tensor stands."""

from __future__ import annotations

import copy
import io

import pytest
import torch

from fusible.errors import ArgumentError
from fusible.quantized import Float8CurrentScalingQuantizer, Float8Quantizer, Float8Tensor, Float8TensorStorage
from fusible.tex import DType

E4M3 = DType.kFloat8E4M3


def _quantized(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 8.0, columnwise: bool = False) -> tuple[Float8Tensor, torch.Tensor]:
    """A tensor of small integers, which E4M3 holds exactly, and their values."""
    values = (torch.arange(int(torch.tensor(shape).prod())) % 9 - 4).reshape(shape).to(dtype)
    quantizer = Float8Quantizer(torch.tensor([scale]), torch.zeros(1), E4M3, columnwise=columnwise)
    return quantizer(values), values


def test_it_is_a_tensor_of_its_nominal_dtype() -> None:
    q, values = _quantized(3, 5, dtype=torch.bfloat16)
    assert isinstance(q, torch.Tensor) and q.dtype is torch.bfloat16 and q.shape == (3, 5) and q.device.type == "cpu"
    assert torch.equal(q.dequantize(), values) and q.dequantize().dtype is torch.bfloat16
    assert q.dequantize(dtype=torch.float32).dtype is torch.float32 and type(q.dequantize()) is torch.Tensor


def test_operations_see_the_values() -> None:
    q, values = _quantized(3, 5)
    other = torch.randn(3, 5)
    assert torch.equal(q + other, values + other) and torch.equal(other - q, other - values) and torch.equal(q * q, values * values)
    assert torch.equal(q @ other.t(), values @ other.t()) and torch.equal(q.t(), values.t()) and torch.equal(q[1:, ::2], values[1:, ::2])
    assert torch.equal(torch.cat([q, q]), torch.cat([values, values])) and q.sum() == values.sum() and torch.equal(q.float(), values)
    assert type(q + other) is torch.Tensor and q[1, 2].item() == values[1, 2].item()


def test_detach_shares_the_data() -> None:
    q, _ = _quantized(3, 5)
    d = q.detach()
    assert isinstance(d, Float8Tensor) and d._data is q._data and d._scale_inv is q._scale_inv and not d.requires_grad


def test_copy_takes_values_from_a_tensor_and_from_a_quantized_one() -> None:
    q, _ = _quantized(3, 5)
    data = q._data
    assert q.copy_(torch.full((3, 5), 2.0)) is q and torch.equal(q.dequantize(), torch.full((3, 5), 2.0)) and q._data is data
    other, values = _quantized(3, 5, scale=2.0)
    q.copy_(other)
    assert torch.equal(q.dequantize(), values) and q._scale_inv.item() == 1 / 2  # of the same format: the bytes and their scale
    plain = torch.zeros(3, 5)
    plain.copy_(other)
    assert torch.equal(plain, values)


def test_writing_in_place_quantizes_again() -> None:
    q, values = _quantized(3, 5)
    assert q.add_(1.0) is q and torch.equal(q.dequantize(), values + 1)
    q.mul_(torch.full((3, 5), 2.0)).zero_()
    assert torch.equal(q.dequantize(), torch.zeros(3, 5)) and isinstance(q, Float8Tensor)
    q.fill_(1e9)
    assert torch.equal(q.dequantize(), torch.full((3, 5), 56.0))  # saturated: 448 / 8


def test_a_columnwise_copy_follows_what_is_written() -> None:
    q, values = _quantized(3, 5, columnwise=True)
    assert q.get_usages() == {"rowwise": True, "columnwise": True}
    q.add_(1.0)
    q.update_usage(rowwise_usage=False)
    assert q._data is None and torch.equal(q.dequantize(), values + 1)


def test_a_columnwise_copy_made_later_does_not_go_stale() -> None:
    q, values = _quantized(3, 5)
    q.update_usage(columnwise_usage=True)
    q.add_(1.0)
    q.update_usage(rowwise_usage=False, columnwise_usage=True)
    assert torch.equal(q.dequantize(), values + 1)


def test_a_transpose_that_is_out_of_date_is_none() -> None:
    q, values = _quantized(3, 5, columnwise=True)
    q._quantizer.set_usage(columnwise=False)
    q._quantizer.update_quantized(values + 1, q)
    assert q._transpose is not None and q.get_usages() == {"rowwise": True, "columnwise": False}
    for same in (q.detach(), q.clone(), q.storage_without_autograd()):
        assert same.get_usages() == {"rowwise": True, "columnwise": False} and same._transpose is None
    other, _ = _quantized(3, 5, columnwise=True)
    other._quantizer = q._quantizer
    other.copy_(q)
    other.update_usage(rowwise_usage=False, columnwise_usage=True)
    assert torch.equal(other.dequantize(), values + 1)


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 5), (0, 5), (7,)])
def test_usages_can_be_exchanged(shape: tuple[int, ...]) -> None:
    q, values = _quantized(*shape)
    for tensor in (q, q.storage_without_autograd()):
        tensor.update_usage(rowwise_usage=False, columnwise_usage=True)
        assert tensor.get_usages() == {"rowwise": False, "columnwise": True} and tensor._transpose.shape == (shape[-1], *shape[:-1])
        assert torch.equal(tensor.dequantize(dtype=torch.float32), values) and tuple(tensor.shape) == shape
        tensor.update_usage(rowwise_usage=True, columnwise_usage=False)
        assert tensor.get_usages() == {"rowwise": True, "columnwise": False} and torch.equal(tensor.dequantize(dtype=torch.float32), values)
        with pytest.raises(ArgumentError, match="a Float8 tensor: expected at least one usage, got neither row-wise nor column-wise; keep one."):
            tensor.update_usage(rowwise_usage=False)
        assert torch.equal(tensor.dequantize(dtype=torch.float32), values)


def test_the_noop_flag_keeps_everything() -> None:
    q, values = _quantized(3, 5)
    q.quantize_(torch.full((3, 5), 2.0), noop_flag=torch.ones(1))
    assert torch.equal(q.dequantize(), values)
    q.quantize_(torch.full((3, 5), 2.0), noop_flag=torch.zeros(1))
    assert torch.equal(q.dequantize(), torch.full((3, 5), 2.0))


def test_gradients_pass_through() -> None:
    q, values = _quantized(3, 5)
    leaf = q.detach().requires_grad_()
    (leaf.dequantize() * 3).sum().backward()
    assert torch.equal(leaf.grad, torch.full((3, 5), 3.0))
    other = torch.randn(3, 5, requires_grad=True)
    (q * other).sum().backward()
    assert torch.equal(other.grad, values)


def test_copies_are_independent() -> None:
    q, values = _quantized(3, 5, columnwise=True)
    for other in (copy.deepcopy(q), q.clone()):
        assert isinstance(other, Float8Tensor) and other._data is not q._data and torch.equal(other.dequantize(), values)
        other.zero_()
        assert torch.equal(q.dequantize(), values)
    parameter = torch.nn.Parameter(q)
    twin = copy.deepcopy(parameter)
    assert twin.requires_grad and torch.equal(twin.dequantize(), values)


def test_it_is_saved_as_values() -> None:
    """Checkpoints hold plain tensors: nothing of ours is pickled."""
    q, values = _quantized(3, 5)
    buffer = io.BytesIO()
    torch.save({"w": q.dequantize()}, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=True)["w"], values)


def test_text() -> None:
    q, _ = _quantized(1, 3)
    assert repr(q) == "Float8Tensor(E4M3, data=tensor([[-4., -3., -2.]]))"
    assert repr(q.storage_without_autograd()) == "Float8TensorStorage(E4M3, shape=[1, 3], dtype=torch.float32)"
    assert repr(q._quantizer) == "Float8Quantizer(kFloat8E4M3, rowwise=True, columnwise=False)"


def test_an_internal_quantizer_gives_the_bare_storage() -> None:
    quantizer = Float8CurrentScalingQuantizer(E4M3, internal=True)
    storage = quantizer(torch.ones(2, 3))
    assert type(storage) is Float8TensorStorage and not isinstance(storage, torch.Tensor) and storage.size(1) == 3
    tensors, same = storage.prepare_for_saving()
    assert same is storage and storage._data is None
    assert storage.restore_from_saved([*tensors, "rest"]) == ["rest"] and torch.equal(storage.dequantize(), torch.ones(2, 3))


def test_a_tensor_made_empty_is_filled_later() -> None:
    quantizer = Float8Quantizer(torch.tensor([4.0]), torch.zeros(1), E4M3)
    q = quantizer.make_empty([2, 3], dtype=torch.bfloat16)
    assert isinstance(q, Float8Tensor) and q.shape == (2, 3) and q.dtype is torch.bfloat16
    quantizer.update_quantized(torch.ones(2, 3), q)
    assert torch.equal(q.dequantize(), torch.ones(2, 3, dtype=torch.bfloat16)) and quantizer.amax.item() == 1


@pytest.mark.parametrize("columnwise", [False, True])
def test_parts_of_any_kind_stay_quantized(columnwise: bool) -> None:
    q, values = _quantized(6, 10, columnwise=columnwise)
    cuts = [
        lambda x: x.chunk(3, dim=1),
        lambda x: x.chunk(4),
        lambda x: x.split([1, 2, 3]),
        lambda x: x.split([4, 6], dim=-1),
        lambda x: x.split(3, dim=1),
        lambda x: [x[1], x[:, 2:5], x[::2], x[-3:, ::3], x.select(1, 4), x.narrow(1, 1, 2)],
        lambda x: x.unbind(),
    ]
    for cut in cuts:
        for part, wanted in zip(cut(q), cut(values), strict=True):
            assert isinstance(part, Float8Tensor) and part.shape == wanted.shape and torch.equal(part.dequantize(), wanted)
            assert part.get_usages() == q.get_usages() and part._scale_inv.item() == q._scale_inv.item()
    assert torch.equal(q[0, 0] + 0, values[0, 0]) and type(q[:0]) is torch.Tensor
    q[1:3].copy_(torch.zeros(2, 10))
    values[1:3] = 0
    assert torch.equal(q.dequantize(), values), "a part shares the memory"
