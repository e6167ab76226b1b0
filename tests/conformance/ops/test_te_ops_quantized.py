"""Operations under every recipe, beside the products that quantize their results: against float64, within what the roundings of the format can do.

See ``quantization_error`` for the bounds. They follow from the format, the data and the reduction length; nothing in them is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from ops_tolerance import assert_close
from quantization_error import RECIPES, Uncertain, check, linear, linear_dweight, linear_dx
from te_ops_table import TE_TABLE, TeRecord
from torch import Tensor
from torch.func import jacrev, vmap  # type: ignore[attr-defined]

from fusible import autocast
from fusible.pytorch import ops
from fusible.quantized import (
    FP8_MAX,
    DelayedScaling,
    DelayedScalingRequest,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    NVFP4BlockScaling,
    QuantizerRole,
    Recipe,
    quantizer_for_role,
)
from fusible.tex import DType

FP32 = torch.finfo(torch.float32).eps
FORMS: list[tuple[torch.dtype, tuple[int, ...]]] = [(torch.float32, (32,)), (torch.bfloat16, (4, 8)), (torch.float16, (2, 4, 4))]
"""The dtype of activations, and the rows of 2-D inputs and more."""
NAMES = [str(dtype)[6:] for dtype, _ in FORMS]
WITH_NONE: dict[str, Recipe | None] = {"none": None, **RECIPES}
BESIDE = [pytest.param(record, id=name) for name, record in TE_TABLE.items() if not record.asks and record.name != "Dropout-off"]


def random(generator: torch.Generator, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def under(recipe: Recipe | None) -> autocast:
    return autocast(enabled=recipe is not None, recipe=recipe)


def step(op: Any, leaves: Sequence[Tensor], dys: Sequence[Tensor], recipe: Recipe | None) -> list[Tensor]:
    """The outputs of a training step; gradients are in ``.grad``.

    Under delayed scaling it comes after one on scales of 1 and one on those that follow, from which it differs in nothing, so that its scales are
    those of its own values. A weight takes a new scale when it has been written to.
    """
    outputs: list[Tensor] = []
    for _ in range(3 if isinstance(recipe, DelayedScaling) else 1):
        for leaf in (*leaves, *op.parameters()):
            leaf.grad = None
        with torch.no_grad():
            for parameter in op.parameters():
                parameter.mul_(1)
        with under(recipe):
            result = op(*leaves)
        outputs = list(result) if isinstance(result, tuple) else [result]
        torch.autograd.backward(outputs, list(dys))
    return [output.detach() for output in outputs]


def grad(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


@pytest.mark.parametrize(("dtype", "leading"), FORMS, ids=NAMES)
@pytest.mark.parametrize("held", ["same", "fp32"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("recipe", WITH_NONE.values(), ids=WITH_NONE)
def test_a_linear_layer_errs_as_its_format_does(recipe: Recipe | None, bias: bool, held: str, dtype: torch.dtype, leading: tuple[int, ...]) -> None:
    generator, held_dtype = torch.Generator().manual_seed(1), torch.float32 if held == "fp32" else dtype
    for columns, width in ((64, 96), (160, 32)):
        op = ops.Linear(width, columns, bias=bias, dtype=held_dtype)
        with torch.no_grad():
            op.weight.copy_(random(generator, (columns, width), held_dtype) / width**0.5)
            if op.bias is not None:
                op.bias.copy_(random(generator, (columns,), held_dtype))
        x, dy = random(generator, (*leading, width), dtype).requires_grad_(), random(generator, (*leading, columns), dtype)
        (y,) = step(op, [x], [dy], recipe)
        x_, dy_, weight = Uncertain.exact(rows(x)), Uncertain.exact(rows(dy)), Uncertain.exact(op.weight)
        wanted = linear(x_, weight, recipe, dtype)
        if op.bias is not None:
            wanted = wanted.plus(Uncertain.exact(op.bias.expand_as(wanted.value)).rounded(dtype)).rounded(dtype)
            assert_close("dbias", grad(op.bias).to(dtype), rows(dy).double().sum(0), dtype, 32, 2)
        check("y", rows(y), wanted)
        check("dx", rows(grad(x)), linear_dx(dy_, weight, recipe, dtype))
        check("dweight", grad(op.weight), linear_dweight(dy_, x_, recipe, dtype, held_dtype))
        assert y.dtype is dtype and grad(x).dtype is dtype and grad(op.weight).dtype is held_dtype


DETERMINISTIC = RECIPES | {"nvfp4": NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True)}


@pytest.mark.parametrize(("dtype", "leading"), FORMS, ids=NAMES)
@pytest.mark.parametrize("name", DETERMINISTIC)
def test_a_linear_layer_is_exact_on_its_quantized_operands(name: str, dtype: torch.dtype, leading: tuple[int, ...]) -> None:
    """With the operands that the recipe's quantizers make (which have an oracle of their own), nothing is left but fp32 sums and one rounding.

    Without stochastic rounding there is one such set of operands, and without the Hadamard transform both copies of an operand are read as they are.
    Row-wise copies go into y and dx, column-wise ones into dx and dweight: that is checked too, as the two have different blocks.
    """
    recipe, generator = DETERMINISTIC[name], torch.Generator().manual_seed(2)

    def read(tensor: Tensor, tensor_type: str, columns: bool) -> Tensor:
        quantizer: Any = quantizer_for_role(recipe, QuantizerRole("linear", tensor_type))
        if isinstance(quantizer, DelayedScalingRequest):
            fp8 = DType.kFloat8E5M2 if tensor_type == "grad_output" else DType.kFloat8E4M3
            amax = tensor.detach().float().abs().max()
            quantizer = Float8Quantizer(torch.full_like(amax, FP8_MAX[fp8])[None] / amax, torch.zeros(1), fp8)
        elif not isinstance(quantizer, Float8CurrentScalingQuantizer):  # whose copies, as those above, have the same bytes
            quantizer.set_usage(rowwise=not columns, columnwise=columns)
        return quantizer(rows(tensor.detach())).dequantize(dtype=torch.float32).double()

    op = product_of(generator, 96, 64, dtype)
    x, dy = random(generator, (*leading, 96), dtype).requires_grad_(), random(generator, (*leading, 64), dtype)
    (y,) = step(op, [x], [dy], recipe)
    assert_close("y", rows(y), read(x, "input", False) @ read(op.weight, "weight", False).T, dtype, 96)
    assert_close("dx", rows(grad(x)), read(dy, "grad_output", False) @ read(op.weight, "weight", True), dtype, 64)
    assert_close("dweight", grad(op.weight), read(dy, "grad_output", True).T @ read(x, "input", True), dtype, 32)


class Reference:
    """An operation at a point, by rows: its value, and its derivatives as a matrix per row."""

    def __init__(self, record: TeRecord, op: torch.nn.Module, x: Tensor, extras: Sequence[Tensor]) -> None:
        self.record = record
        parameters = {name.rpartition(".")[2]: p.detach().double() for name, p in op.named_parameters()}
        self.names = (*record.extras, *parameters)
        per_row = [rows(x), *(e.reshape(-1) if name == "scales" else rows(e) for name, e in zip(record.extras, extras, strict=True))]
        values = (*(tensor.detach().double() for tensor in per_row), *parameters.values())

        def of_row(row: Tensor, *rest: Tensor) -> Tensor:
            return record.reference(row, dict(zip(self.names, rest, strict=True)))

        dims = (*(0 for _ in per_row), *(None for _ in parameters))
        self.value = vmap(of_row, dims)(*values)
        self.jacobians = vmap(jacrev(of_row, tuple(range(len(values)))), dims)(*values)
        self.parameters = frozenset(parameters)

    def computed(self, value: Uncertain, dtype: torch.dtype) -> Uncertain:
        """After fp32 arithmetic of some sixteen steps, and the rounding of the result."""
        return value.off_by((self.record.length + 16) * FP32 * value.value.abs().max().clamp(min=1)).rounded(dtype)

    def gradients(self, dy: Uncertain, dtype: torch.dtype) -> dict[str, Uncertain]:
        """Of x, the extra inputs and the parameters, for a gradient of y."""
        found = {}
        for name, jacobian in zip(("x", *self.names), self.jacobians, strict=True):
            turned = jacobian.reshape(*self.value.shape, -1).transpose(1, 2)
            each = dy.through(turned)
            if name in self.parameters:
                each = Uncertain(each.value.sum(0), each.worst.sum(0), each.variance.sum(0))
            found[name] = self.computed(each.reshape(-1) if name == "scales" else each, dtype)
        return found


def leaves_of(record: TeRecord, generator: torch.Generator, leading: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    shapes = [leading if name == "scales" else (*leading, record.width) for name in record.extras]
    return [random(generator, shape, dtype).requires_grad_() for shape in shapes]


def made(record: TeRecord, generator: torch.Generator, dtype: torch.dtype) -> Any:
    op = record.make(record.width, dtype)
    with torch.no_grad():
        for parameter in op.parameters():
            parameter.copy_(random(generator, parameter.shape, dtype))
    return op


def product_of(generator: torch.Generator, width: int, columns: int, dtype: torch.dtype) -> ops.BasicLinear:
    product = ops.BasicLinear(width, columns, dtype=dtype)
    with torch.no_grad():
        product.weight.copy_(random(generator, (columns, width), dtype) / width**0.5)
    return product


@pytest.mark.parametrize(("dtype", "leading"), FORMS, ids=NAMES)
@pytest.mark.parametrize("record", BESIDE)
def test_an_operation_whose_result_is_quantized(record: TeRecord, dtype: torch.dtype, leading: tuple[int, ...]) -> None:
    """Before a product: it writes the product's operand where it can, and its backward starts from a gradient of quantized operands."""
    generator = torch.Generator().manual_seed(3)
    op = made(record, generator, dtype)
    x = random(generator, (*leading, record.width), dtype).requires_grad_()
    extras = leaves_of(record, generator, leading, dtype)
    reference = Reference(record, op, x, extras)
    product = product_of(generator, reference.value.shape[-1], 32, dtype)
    rest = (-1,) if "Reshape" in record.name else leading
    dy = random(generator, (32, 32), dtype).reshape(*rest, 32)
    dextra = [random(generator, x.shape, dtype)] if record.extra_output else []
    h = reference.computed(Uncertain.exact(reference.value), dtype)
    weight, dy_ = Uncertain.exact(product.weight), Uncertain.exact(rows(dy))
    model = ops.Sequential(op, product)
    for name, recipe in WITH_NONE.items():
        y, *extra = step(model, [x, *extras], [dy, *dextra], recipe)
        check(f"{name}: y", rows(y), linear(h, weight, recipe, dtype))
        check(f"{name}: dweight", grad(product.weight), linear_dweight(dy_, h, recipe, dtype, dtype))
        wanted = reference.gradients(linear_dx(dy_, weight, recipe, dtype), dtype)
        for got in extra:
            assert torch.equal(got, x)
            wanted["x"] = wanted["x"].plus(Uncertain.exact(rows(dextra[0]))).rounded(dtype)
        names = ["x", *record.extras, *(name for name, _ in op.named_parameters())]
        for what, leaf in zip(names, [x, *extras, *op.parameters()], strict=True):
            check(f"{name}: d{what}", grad(leaf).reshape(wanted[what].value.shape), wanted[what])


PLACES = {name: place for place, name in enumerate(TE_TABLE)}


@pytest.mark.parametrize("name", WITH_NONE)
@pytest.mark.parametrize("record", BESIDE)
def test_an_operation_whose_gradient_is_quantized(record: TeRecord, name: str) -> None:
    """After a product: it starts from the product's result, and its backward writes the gradient that the product's two products read.

    Each operation meets each dtype, and so does each recipe.
    """
    recipe = WITH_NONE[name]
    dtype, leading = FORMS[(PLACES[record.name] + list(WITH_NONE).index(name)) % 3]
    generator = torch.Generator().manual_seed(4)
    op = made(record, generator, dtype)
    product = product_of(generator, 32, record.width, dtype)
    x = random(generator, (*leading, 32), dtype).requires_grad_()
    extras = leaves_of(record, generator, leading, dtype)
    (z,) = step(product, [x], [torch.ones(*leading, record.width, dtype=dtype)], recipe)
    reference = Reference(record, op, z, extras)
    rest = (-1,) if "Reshape" in record.name else leading
    dy = random(generator, reference.value.shape, dtype).reshape(*rest, reference.value.shape[-1])
    dextra = [random(generator, z.shape, dtype)] if record.extra_output else []
    y, *extra = step(ops.Sequential(product, op), [x, *extras], [dy, *dextra], recipe)
    # Where both are one pass, the result may follow from the product before it is rounded to z; the derivative follows from z in any case.
    z_ = Uncertain.exact(rows(z)).rounded(dtype)
    moved = Uncertain(torch.zeros_like(z_.value), z_.worst, z_.variance).through(reference.jacobians[0])
    check("y", rows(y), reference.computed(Uncertain.exact(reference.value).plus(moved), dtype))
    wanted = reference.gradients(Uncertain.exact(rows(dy)), dtype)
    for got in extra:
        assert torch.equal(got, z)
        wanted["x"] = wanted["x"].plus(Uncertain.exact(rows(dextra[0]))).rounded(dtype)
    check("dx", rows(grad(x)), linear_dx(wanted["x"], Uncertain.exact(product.weight), recipe, dtype))
    check("dweight", grad(product.weight), linear_dweight(wanted["x"], Uncertain.exact(rows(x)), recipe, dtype, dtype))
    names = [*record.extras, *(parameter for parameter, _ in op.named_parameters())]
    for what, leaf in zip(names, [*extras, *op.parameters()], strict=True):
        check(f"d{what}", grad(leaf).reshape(wanted[what].value.shape), wanted[what])


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_quantize_rounds_once_in_the_format_that_the_recipe_has(recipe: Recipe) -> None:
    generator = torch.Generator().manual_seed(5)
    x, dy = random(generator, (4, 8, 64), torch.float32).requires_grad_(), random(generator, (4, 8, 64), torch.float32)
    (y,) = step(ops.Quantize(forward=True, backward=True), [x], [dy], recipe)
    identity = Uncertain.exact(torch.eye(64))
    # A product with the identity has one quantized operand, whose rows are the tensor's; in the identity each value is exact.
    for what, got, value, bound in (("y", y, x, linear), ("dx", grad(x), dy, linear_dx)):
        wanted = bound(Uncertain.exact(rows(value)), identity, recipe, torch.float32)
        check(what, rows(got.dequantize()), wanted)
        assert not torch.equal(got.dequantize(), value)


def test_the_bounds_notice_an_operand_of_another_format() -> None:
    """A forward in E5M2 where the recipe says E4M3, and a scale that is off by a tenth, are outside."""
    generator = torch.Generator().manual_seed(6)
    x, weight = random(generator, (32, 64), torch.float32), random(generator, (32, 64), torch.float32)
    for recipe in RECIPES.values():
        wanted = linear(Uncertain.exact(x), Uncertain.exact(weight), recipe, torch.float32)
        coarse = Float8CurrentScalingQuantizer(DType.kFloat8E5M2, "cpu")(x).dequantize() @ weight.T
        for wrong in (1.3 * wanted.value, *([1.1 * wanted.value, wanted.value + 2 * (coarse - wanted.value)] if not recipe.nvfp4() else [])):
            with pytest.raises(AssertionError, match="of the"):
                check("y", wrong, wanted)
