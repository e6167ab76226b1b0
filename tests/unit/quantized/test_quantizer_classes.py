"""Hybrid, identity and custom quantizers, and what every quantizer answers."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fusible import quantized, tex
from fusible.errors import ArgumentError, DTypeError, NotServedError, ShapeError
from fusible.quantized import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
    HybridQuantizedTensor,
    HybridQuantizedTensorStorage,
    HybridQuantizer,
    IdentityQuantizer,
    IdentityTensor,
    IdentityTensorStorage,
    MXFP8Quantizer,
    MXFP8Tensor,
    NVFP4Quantizer,
    QuantizedTensorStorage,
    Quantizer,
    operand,
)
from fusible.tex import DType

E4M3 = DType.kFloat8E4M3


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def delayed() -> Float8Quantizer:
    return Float8Quantizer(torch.tensor([16.0]), torch.zeros(1), E4M3)


def pair(**options: Any) -> HybridQuantizer:
    return HybridQuantizer(rowwise_quantizer=MXFP8Quantizer(E4M3), columnwise_quantizer=Float8CurrentScalingQuantizer(E4M3), **options)


def test_a_hybrid_has_each_copy_by_its_quantizer() -> None:
    x = normal(64, 32)
    q = pair()(x)
    assert type(q) is HybridQuantizedTensor and type(q.rowwise_sub_storage) is MXFP8Tensor and type(q.columnwise_sub_storage) is Float8Tensor
    assert torch.equal(q.rowwise_sub_storage._rowwise_data, MXFP8Quantizer(E4M3)(x)._rowwise_data)
    assert torch.equal(q.columnwise_sub_storage._transpose, Float8CurrentScalingQuantizer(E4M3)(x)._transpose)
    assert q.rowwise_sub_storage._columnwise_data is None and q.columnwise_sub_storage._data is None
    assert torch.equal(q.dequantize(), q.rowwise_sub_storage.dequantize())
    twice = pair(columnwise_source="rowwise_dequantized")(x)
    assert torch.equal(twice.columnwise_sub_storage._transpose, Float8CurrentScalingQuantizer(E4M3)(MXFP8Quantizer(E4M3)(x).dequantize())._transpose)
    only = pair(columnwise_source="rowwise_dequantized")
    only.set_usage(rowwise=False)
    assert torch.equal(only(x).columnwise_sub_storage._transpose, twice.columnwise_sub_storage._transpose)
    assert only(x).rowwise_sub_storage is None and torch.equal(only(x).dequantize(), twice.columnwise_sub_storage.dequantize())


def test_a_hybrids_copies_are_dropped_and_not_made() -> None:
    q = pair()(normal(64, 32))
    q.update_usage(columnwise_usage=False)
    assert q.get_usages() == {"rowwise": True, "columnwise": False}
    for asked, message in (({"columnwise_usage": True}, "a request for columnwise data"), ({"rowwise_usage": False}, "at least one usage")):
        with pytest.raises(ArgumentError, match=message):
            q.update_usage(**asked)
    with pytest.raises(ArgumentError, match="a request for columnwise data"):
        q.update_usage(rowwise_usage=False, columnwise_usage=True)
    assert q.get_usages() == {"rowwise": True, "columnwise": False}


def test_a_hybrid_writes_what_is_there() -> None:
    quantizer, x, y = pair(), normal(64, 32), normal(64, 32, seed=2)
    q = quantizer(x)
    quantizer.update_quantized(y, q)
    assert torch.equal(q.rowwise_sub_storage._rowwise_data, quantizer(y).rowwise_sub_storage._rowwise_data)
    assert torch.equal(q.columnwise_sub_storage._transpose, quantizer(y).columnwise_sub_storage._transpose)
    twice = pair(columnwise_source="rowwise_dequantized")
    wanted = twice(q.dequantize()).columnwise_sub_storage
    assert torch.equal(twice(x).copy_(q).columnwise_sub_storage._transpose, wanted._transpose)
    with pytest.raises(DTypeError, match="a HybridQuantizedTensorStorage"):
        quantizer.update_quantized(y, MXFP8Quantizer(E4M3)(x))


def test_hybrids_are_checked_when_they_are_made() -> None:
    same = MXFP8Quantizer(E4M3)
    for arguments, error in (
        ({"rowwise_quantizer": same, "columnwise_quantizer": same}, ArgumentError),
        ({"rowwise_quantizer": same, "columnwise_quantizer": None}, DTypeError),
        ({"rowwise_quantizer": same, "columnwise_quantizer": MXFP8Quantizer(E4M3), "columnwise_source": "rowwise"}, ArgumentError),
    ):
        with pytest.raises(error, match=": expected "):
            HybridQuantizer(**arguments)
    assert same.columnwise_usage  # nothing was pinned
    quantizer = pair()
    quantizer.set_usage(rowwise=False, columnwise=False)
    for call in (lambda: quantizer(normal(32, 32)), lambda: quantizer.make_empty([32, 32])):
        with pytest.raises(ArgumentError, match="rowwise or columnwise usage"):
            call()


def test_hybrids_are_values_and_own_their_parts() -> None:
    quantizer = pair()
    other = quantizer.copy()
    assert quantizer == pair() == other and hash(quantizer) == hash(other) and quantizer != pair(columnwise_source="rowwise_dequantized")
    assert other.rowwise_quantizer is not quantizer.rowwise_quantizer and quantizer.columnwise_quantizer.get_usages()["rowwise"] is False
    group = object()
    quantizer.with_amax_reduction, quantizer.amax_reduction_group = True, group
    part: Any = quantizer.columnwise_quantizer
    assert part.with_amax_reduction and part.amax_reduction_group is group and quantizer.amax_reduction_group is group
    assert quantizer.with_amax_reduction and not other.with_amax_reduction
    state = delayed()
    HybridQuantizer(rowwise_quantizer=state, columnwise_quantizer=MXFP8Quantizer(E4M3)).calibrate(torch.tensor([[-3.0, 2.0]]))
    assert state.amax.item() == 3.0


def test_identity_keeps_the_tensor() -> None:
    x = normal(4, 6)
    q = IdentityQuantizer()(x)
    assert type(q) is IdentityTensor and q._hp_data.data_ptr() == x.data_ptr() and q.get_usages() == {"rowwise": True, "columnwise": True}
    wide = IdentityQuantizer(dtype=torch.float32)(x.t())
    assert wide.dtype is torch.float32 and torch.equal(wide.dequantize(), x.t().float()) and wide._hp_data.is_contiguous()
    q.update_usage(rowwise_usage=False, columnwise_usage=False)
    assert torch.equal(q.dequantize(), x) and type(q.dequantize()) is torch.Tensor
    quantizer = IdentityQuantizer()
    for value, flag, wanted in ((2.0, None, 2.0), (3.0, torch.ones(1), 2.0), (3.0, torch.zeros(1), 3.0)):
        quantizer.update_quantized(torch.full((4, 6), value), q, noop_flag=flag)
        assert (x == wanted).all()  # the very tensor is written
    with pytest.raises(ShapeError):
        quantizer.update_quantized(torch.ones(6, 4), q)
    with pytest.raises(DTypeError):
        quantizer.update_quantized(torch.ones(4, 6), x)
    quantizer.internal = True
    assert type(quantizer(x)) is IdentityTensorStorage


def test_products_read_the_operand_within() -> None:
    x, w = normal(64, 32), normal(48, 32, seed=2)
    plain = normal(2, 2)
    quantizer = HybridQuantizer(rowwise_quantizer=MXFP8Quantizer(E4M3), columnwise_quantizer=IdentityQuantizer())
    q, mx = quantizer(x), MXFP8Quantizer(E4M3)(x)
    assert operand(plain) is plain and operand(mx) is mx and operand(mx, columnwise=True) is mx
    assert operand(q) is q.rowwise_sub_storage and torch.equal(operand(q, columnwise=True), x) and type(operand(q, columnwise=True)) is torch.Tensor
    q.update_usage(columnwise_usage=False)
    with pytest.raises(ArgumentError, match="a hybrid tensor in a product: expected a column-wise copy"):
        operand(q, columnwise=True)
    qw = quantizer(torch.nn.functional.pad(w, (0, 0, 0, 16)))
    y = tex.generic_gemm(
        operand(qw), True, operand(q), False, None, None, torch.float32, None, DType.kFloat32, False, None, False, torch.empty(0), 0, False, True
    )[0]
    # fp32 accumulation of 32 products of magnitudes up to about 9.
    assert torch.allclose(y, q.dequantize().float() @ qw.dequantize().float().t(), atol=32 * 16 * 2.0**-24)


@pytest.mark.parametrize("quantizer", [MXFP8Quantizer(E4M3), Float8CurrentScalingQuantizer(E4M3, "cpu"), IdentityQuantizer()])
def test_a_parameter_is_viewed_in_inference_mode(quantizer: Any) -> None:
    parameter = torch.nn.Parameter(quantizer(torch.randn(64, 64)))
    values = parameter.detach().dequantize()
    with torch.inference_mode():
        for view in (lambda t: t.detach(), lambda t: t.view(2, 32, 64), lambda t: t[32:], lambda t: t.chunk(2)[1], lambda t: t.t(), lambda t: t[0]):
            assert torch.equal(view(parameter) + 0, view(values))
    assert isinstance(parameter.detach(), type(parameter.data)) and parameter.requires_grad


def test_parts_of_a_tensor_that_is_kept_as_it_is_share_its_memory() -> None:
    x = torch.arange(24.0).view(4, 6)
    q = IdentityQuantizer()(x)
    for cut in (lambda t: t[1:3], lambda t: t[:, ::2], lambda t: t.chunk(2, dim=1)[1], lambda t: t.split([1, 3])[1], lambda t: t.view(2, 12)):
        part = cut(q)
        assert isinstance(part, IdentityTensor) and torch.equal(part.dequantize(), cut(x)) and part._hp_data.data_ptr() == cut(x).data_ptr()
    turned = IdentityQuantizer()(x.t())
    assert turned._hp_data.data_ptr() == x.data_ptr() and torch.equal(turned.view(24).dequantize(), x.t().reshape(24))
    q[1:3].copy_(torch.zeros(2, 6))
    assert not x[1:3].any() and x[3].all()


def test_a_detached_hybrid_tensor_is_saved_and_the_original_stays_whole() -> None:
    x = torch.randn(32, 64)
    quantizer = HybridQuantizer(rowwise_quantizer=MXFP8Quantizer(E4M3), columnwise_quantizer=Float8CurrentScalingQuantizer(E4M3, "cpu"))
    q = quantizer(x)
    values = q.dequantize()
    tensors, emptied = q.detach().prepare_for_saving()
    assert torch.equal(q.dequantize(), values) and torch.equal(q.columnwise_sub_storage.dequantize(), q.detach().columnwise_sub_storage.dequantize())
    assert not emptied.restore_from_saved(tensors) and torch.equal(emptied.dequantize(), values)
    q.detach().clear()
    assert torch.equal(q.dequantize(), values)


@dataclass(eq=False)
class Stored(QuantizedTensorStorage):
    """A custom storage."""

    data: Any = None
    scale: Any = None
    data_t: Any = None
    scale_t: Any = None
    dtype: Any = None
    device: Any = None
    original_shape: Any = None
    _quantizer: Any = None

    def get_usages(self) -> dict[str, bool]:
        return {"rowwise": self.data is not None, "columnwise": self.data_t is not None}

    def dequantize(self, *, dtype: Any = None) -> Any:
        return (self.data.float() * self.scale).view(self.original_shape).to(dtype or self.dtype)


class Halves(Quantizer):
    """Quantizes to integers of halves."""

    custom = True  # pyright: ignore[reportAssignmentType]

    def quantize_impl(self, tensor: Any) -> Stored:
        data = (tensor.view(-1, tensor.shape[-1]) * 2).round().to(torch.int8)
        turned = data.t().contiguous() if self.columnwise_usage else None
        scale = torch.tensor(0.5)
        return Stored(data, scale, turned, scale, tensor.dtype, tensor.device, tensor.shape, self)

    def update_quantized(self, src: Any, dst: Any, *, noop_flag: Any = None) -> Any:
        vars(dst).update(vars(self.quantize(src)))
        return dst


def test_a_custom_quantizer_makes_its_own_storage() -> None:
    quantizer, x = Halves(columnwise=False), torch.tensor([[[0.6, 1.0], [-2.2, 3.0]]])
    quantizer.internal = True
    q = quantizer(x)
    assert type(q) is Stored and q.original_shape == (1, 2, 2) and q.data_t is None and torch.equal(q.dequantize(), (x * 2).round() / 2)
    assert quantizer(x * 3, out=q) is q and torch.equal(q.dequantize(), (x * 6).round() / 2)
    q.quantize_(x)
    assert torch.equal(q.dequantize(), (x * 2).round() / 2) and [type(each) for each in quantizer.multi_quantize([x, x])] == [Stored, Stored]
    assert quantizer.is_quantizable(x) and not quantizer.is_requantization_safe() and not quantizer.supports_only_rowwise_all_gather()
    assert quantizer._get_compatible_recipe() is None and quantizer.calibrate(x) is None and operand(q) is q
    with pytest.raises(NotServedError, match="the custom quantizer Halves: expected a make_empty of its own"):
        quantizer.make_empty([2, 2])
    hybrid = HybridQuantizer(rowwise_quantizer=quantizer, columnwise_quantizer=IdentityQuantizer())
    hybrid.internal = True
    assert type(hybrid(x)) is HybridQuantizedTensorStorage and type(operand(hybrid(x))) is Stored


class Unfinished(Quantizer):
    custom = True  # pyright: ignore[reportAssignmentType]


def test_a_custom_quantizer_that_lacks_a_method_says_which() -> None:
    x = torch.ones(2, 2)
    for call, method in ((lambda: Unfinished()(x), "quantize_impl"), (lambda: Unfinished().update_quantized(x, x), "update_quantized")):
        with pytest.raises(NotServedError, match=f"the custom quantizer Unfinished: expected a {method} of its own"):
            call()
    assert not MXFP8Quantizer(E4M3).custom


@pytest.mark.parametrize(
    ("make", "safe", "rowwise_only", "recipe"),
    [
        (delayed, False, True, "DelayedScaling"),
        (lambda: Float8CurrentScalingQuantizer(E4M3), True, True, "Float8CurrentScaling"),
        (lambda: Float8BlockQuantizer(E4M3), True, False, "Float8BlockScaling"),
        (lambda: MXFP8Quantizer(E4M3), True, False, "MXFP8BlockScaling"),
        (NVFP4Quantizer, True, False, "NVFP4BlockScaling"),
        (lambda: NVFP4Quantizer(stochastic_rounding=True), False, False, "NVFP4BlockScaling"),
        (IdentityQuantizer, True, False, "CustomRecipe"),
        (pair, True, False, "CustomRecipe"),
        (lambda: HybridQuantizer(rowwise_quantizer=delayed(), columnwise_quantizer=NVFP4Quantizer()), False, True, "CustomRecipe"),
    ],
)
def test_what_quantizers_answer(make: Any, safe: bool, rowwise_only: bool, recipe: str) -> None:
    quantizer = make()
    assert quantizer.is_requantization_safe() is safe and quantizer.supports_only_rowwise_all_gather() is rowwise_only
    assert quantizer._get_compatible_recipe() is getattr(quantized, recipe, None)
    x = normal(64, 64)
    if safe:
        assert torch.equal(quantizer(x).dequantize(), quantizer(x).dequantize())


def test_a_hybrid_is_as_safe_as_the_quantizers_that_it_asks() -> None:
    quantizer = HybridQuantizer(rowwise_quantizer=delayed(), columnwise_quantizer=MXFP8Quantizer(E4M3))
    quantizer.set_usage(rowwise=False)
    assert quantizer.is_requantization_safe()
    quantizer.columnwise_source = "rowwise_dequantized"
    assert not quantizer.is_requantization_safe()


def test_calibration_records_the_amax_and_nothing_else() -> None:
    quantizer = delayed()
    for values, amax in (([-3.0, 2.0], 3.0), ([1.0, 2.0], 3.0), ([1.0, 5.0], 5.0)):
        quantizer.calibrate(torch.tensor(values))
        assert quantizer.amax.item() == amax and quantizer.scale.item() == 16.0
    quantizer.amax = None
    quantizer.calibrate(torch.tensor([-7.0]).bfloat16())
    assert quantizer.amax.dtype is torch.float32 and quantizer.amax.tolist() == [7.0]


def test_row_scaled_nvfp4_is_not_gathered_quantized() -> None:
    assert not NVFP4Quantizer(row_scaled_nvfp4=True).is_quantizable(torch.ones(16, 16)) and NVFP4Quantizer().is_quantizable(torch.ones(16, 16))
    assert not pair().is_quantizable(torch.ones(3, 5)) and pair().is_quantizable(torch.ones(32, 32))


def test_quantizers_are_equal_by_options_and_copied_with_their_state() -> None:
    one, other = MXFP8Quantizer(E4M3), MXFP8Quantizer(E4M3)
    other.internal = False
    assert one == other and hash(one) == hash(other) and one.quantizes_like(MXFP8Quantizer(E4M3, columnwise=False))
    assert one != MXFP8Quantizer(E4M3, columnwise=False) and not one.quantizes_like(MXFP8Quantizer(DType.kFloat8E5M2))
    assert not one.quantizes_like(None)
    state = delayed()
    twin = copy.deepcopy(state)
    assert twin.scale is not state.scale and torch.equal(twin.scale, state.scale) and state.copy().scale is state.scale and state != twin
    group = object()
    current = Float8CurrentScalingQuantizer(E4M3, with_amax_reduction=True, amax_reduction_group=group)
    assert copy.deepcopy(current).amax_reduction_group is group
    assert one.with_usages(rowwise=True, columnwise=True) is one and one.with_usages(rowwise=False, columnwise=False) is one
    assert one.with_usages(rowwise=False, columnwise=True).get_usages() == {"rowwise": False, "columnwise": True} and one.rowwise_usage


def test_replacing_a_tensors_quantizer_warns() -> None:
    q = MXFP8Quantizer(E4M3)(normal(32, 32))
    q.update_quantizer(q._quantizer)
    other = MXFP8Quantizer(E4M3, with_2d_quantization=True)
    with pytest.warns(UserWarning, match="the quantizer of a MXFP8Tensor is replaced"):
        q.update_quantizer(other)
    q.copy_(normal(32, 32, seed=2))
    assert torch.equal(q.dequantize(), other(normal(32, 32, seed=2)).dequantize())
    q._quantizer = None
    for call in (lambda: q.update_quantizer(other), lambda: q.zero_()):
        with pytest.raises(ArgumentError, match=": expected a quantizer"):
            call()
