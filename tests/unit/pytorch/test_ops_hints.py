"""What the next operation wants quantized is quantized once, wherever the operations between it and the producer allow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from quantization_error import RECIPES
from torch import Tensor, nn

import fusible
from fusible import nvte
from fusible.nvte import DType, QuantizedType, make_nvte_tensor
from fusible.pytorch import ops
from fusible.quantized import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    HybridQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)

every_recipe = pytest.mark.parametrize("name", RECIPES)
WIDTH = 128


def batch(seed: int = 3) -> Tensor:
    return torch.randn(128, WIDTH, generator=torch.Generator().manual_seed(seed))


def model(*between: nn.Module) -> ops.Sequential:
    torch.manual_seed(1)
    norm, linear = ops.LayerNorm(WIDTH), ops.Linear(WIDTH, WIDTH)
    return ops.Sequential(norm, *between, linear)


def step(net: nn.Module, recipe: fusible.Recipe, steps: int = 4) -> list[Tensor]:
    """The output and the gradients of the last of several steps, by which delayed scales have settled; the same random bits for each model."""
    for _ in range(steps):
        x = batch().requires_grad_()
        torch.manual_seed(5)
        with fusible.autocast(recipe=recipe):
            y = net(x)
        y, *extra = y if isinstance(y, tuple) else (y,)
        loss = y.square().sum() + sum((value.square().sum() for value in extra), torch.zeros(()))
        result = [y, *extra, *torch.autograd.grad(loss, [x, *net.parameters()])]
        with torch.no_grad():
            for parameter in net.parameters():
                parameter += 0  # so that weights are quantized by the new scales
    return result


def plan_of(net: ops.Sequential, recipe: fusible.Recipe) -> Any:
    (fuser,) = net._arranged()
    with fusible.autocast(recipe=recipe) as context:
        return fuser.plan(batch().requires_grad_(), fuser.parameters(), context or fusible.autocast(recipe=recipe), True)


def alike(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("factor", [4.0, 0.125, 1.0])
@every_recipe
def test_a_hint_crosses_a_power_of_two(name: str, factor: float) -> None:
    """The norm writes 8 bits, and the product is that of the scaled values to the bit: as where the factor was multiplied before, into the norm's own
    parameters, which a power of two does exactly."""
    recipe = RECIPES[name]
    scaled, folded = model(ops.ConstantScale(factor)), model(ops.Identity())
    with torch.no_grad():
        for parameter in folded[0].parameters():
            parameter *= factor
    assert isinstance(plan_of(scaled, recipe).ops[0].y_dtype, QuantizedType)
    (y, dx, dgamma, dbeta, *rest), (y_, dx_, dgamma_, dbeta_, *rest_) = step(scaled, recipe), step(folded, recipe)
    assert alike([y, dx, *rest], [y_, dx_, *rest_])
    assert alike([dgamma, dbeta], [factor * dgamma_, factor * dbeta_])


@pytest.mark.parametrize("factor", [3.0, -2.0, 0.0])
@every_recipe
def test_another_factor_is_multiplied_before_anything_is_quantized(name: str, factor: float) -> None:
    recipe = RECIPES[name]
    plan = plan_of(model(ops.ConstantScale(factor)), recipe)
    assert not isinstance(plan.ops[0].y_dtype, QuantizedType) and not isinstance(plan.ops[1].x_dtype, QuantizedType)
    results = [step(model(between), recipe) for between in (ops.ConstantScale(factor), Times(factor))]
    assert alike(*results)


class Times(ops.BasicOperation):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def op_forward(self, ctx: Any, input_: Tensor, **_: Any) -> Tensor:
        return ops.maybe_dequantize(input_) * self.factor

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Tensor:
        return ops.maybe_dequantize(grad_output) * self.factor


def test_a_hint_crosses_a_power_of_two_on_the_way_back() -> None:
    """The activation's backward writes the gradient in the type in which the product before the factor reads it."""
    recipe = fusible.Float8CurrentScaling()
    torch.manual_seed(1)
    linear = ops.BasicLinear(WIDTH, WIDTH)
    net, apart = ops.Sequential(linear, ops.ConstantScale(0.5), ops.GELU()), ops.Sequential(linear, Times(0.5), ops.GELU())
    plan = plan_of(net, recipe)
    assert isinstance(plan.ops[2].dx_dtype, QuantizedType) and isinstance(plan.ops[1].dx_dtype, QuantizedType)
    assert alike(step(net, recipe), step(apart, recipe))


QUANTIZERS = [
    Float8CurrentScalingQuantizer(DType.Float8E4M3, rowwise=True, columnwise=True),
    Float8BlockQuantizer(DType.Float8E4M3, rowwise=True, columnwise=True, block_scaling_dim=1),
    Float8BlockQuantizer(DType.Float8E4M3, rowwise=True, columnwise=True),
    MXFP8Quantizer(DType.Float8E4M3, rowwise=True, columnwise=True),
    NVFP4Quantizer(rowwise=True, columnwise=True),
]


@pytest.mark.parametrize("exponent", [-20, -1, 0, 3, 30])
@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=repr)
def test_a_rescaled_tensor_is_the_quantized_product(quantizer: Any, exponent: int) -> None:
    x = batch()
    x[:32, :32] = 0.0  # blocks of zeros have the smallest scale
    type = QuantizedType.of(quantizer)
    got = nvte.rescale(nvte.cast(make_nvte_tensor(x), type), exponent)
    wanted = nvte.cast(make_nvte_tensor(x * 2.0**exponent), type)
    assert got.type == wanted.type
    fields, fields_ = got.data.get_metadata(), wanted.data.get_metadata()
    for field, value in fields_.items():
        if isinstance(value, Tensor) and "scale_inv" not in field:
            assert torch.equal(fields[field], value), field
    assert got.data.get_usages() == wanted.data.get_usages()
    assert torch.equal(got.data.dequantize(), wanted.data.dequantize())


def test_exponents_of_mxfp8_stay_within_their_range() -> None:
    """A block of zeros stays one: its byte must not wrap to 255, which is no number."""
    x = make_nvte_tensor(torch.zeros(32, 32))
    type = QuantizedType.of(MXFP8Quantizer(DType.Float8E4M3, rowwise=True, columnwise=True))
    for exponent, byte in ((-3, 0), (3, 3), (300, 254)):
        scaled = nvte.rescale(nvte.cast(x, type), exponent)
        assert scaled.data._rowwise_scale_inv[0, 0] == byte and torch.equal(scaled.data.dequantize(), torch.zeros(32, 32))


def test_only_quantizers_of_one_scale_are_crossed() -> None:
    rows, columns = QUANTIZERS[3].copy(), QUANTIZERS[3].copy()
    assert not nvte.is_rescalable(QuantizedType.of(HybridQuantizer(rowwise_quantizer=rows, columnwise_quantizer=columns)))
    assert not nvte.is_rescalable(DType.Float32)
    assert [nvte.exponent_of(value) for value in (1.0, 0.5, 8.0, 3.0, -2.0, 0.0, float("inf"), float("nan"))] == [0, -1, 3] + [None] * 5


@every_recipe
def test_an_extra_output_is_plain_and_the_product_reads_what_was_quantized_once(name: str) -> None:
    recipe = RECIPES[name]
    plan = plan_of(model(ops.MakeExtraOutput()), recipe)
    assert not isinstance(plan.ops[0].y_dtype, QuantizedType) and plan.ops[1].y_dtype == plan.ops[2].x_dtype
    for between in ([], [ops.Identity()], [ops.ConstantScale(1.0)]):
        y, extra, _dx, *grads = step(model(ops.MakeExtraOutput(), *between), recipe)
        norm = model()[0]
        assert torch.equal(extra, norm(batch())) and extra.dtype is torch.float32
        plain_y, *_, dweight, dbias = step(model(), recipe)
        assert torch.equal(y, plain_y) and alike([dweight, dbias], grads[-2:])


def test_the_quantized_copy_is_made_where_the_extra_output_leaves() -> None:
    recipe = fusible.Float8CurrentScaling()
    net = model(ops.MakeExtraOutput(), ops.Identity(), ops.Reshape((-1, WIDTH)))
    types = [op.y_dtype for op in plan_of(net, recipe).ops[:4]]
    assert not isinstance(types[0], QuantizedType) and all(isinstance(type, QuantizedType) for type in types[1:])


@every_recipe
def test_an_extra_output_that_goes_nowhere_is_no_barrier(name: str) -> None:
    extra = ops.MakeExtraOutput()
    extra.set_extra_output_channel(0, "unused", output_to_caller=False)
    net = model(extra)
    assert isinstance(plan_of(net, RECIPES[name]).ops[0].y_dtype, QuantizedType)
    assert alike(step(net, RECIPES[name]), step(model(), RECIPES[name]))
