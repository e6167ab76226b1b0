"""Every basic operation of ``fusible.pytorch.ops`` alone: against float64, forward and all gradients; and under every recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from ops_tolerance import assert_close
from quantization_error import RECIPES
from te_ops_table import ELSEWHERE, TE_TABLE, TeRecord
from torch import Tensor

from fusible import autocast
from fusible.pytorch import ops
from fusible.pytorch.ops import BasicOperation, FusibleOperation
from fusible.quantized import Float8CurrentScalingQuantizer, QuantizedTensor, Recipe
from fusible.tex import DType

RECORDS = [pytest.param(record, id=record.name) for record in TE_TABLE.values()]
DTYPES = [pytest.param(dtype, id=str(dtype)[6:]) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
LEADING = ((13,), (1,), (0,), (3, 5), (2, 0))
"""Rows of 2-D and 3-D inputs: multiples of nothing, a single one, none."""


class Run(NamedTuple):
    """What a call and its backward gave, by name; ``gave``: the gradients that came in."""

    found: dict[str, Tensor]
    gave: list[Tensor]


def random(generator: torch.Generator, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def made(record: TeRecord, generator: torch.Generator, dtype: torch.dtype) -> FusibleOperation:
    op = record.make(record.width, dtype)
    with torch.no_grad():
        for parameter in op.parameters():
            parameter.copy_(random(generator, parameter.shape, dtype) / parameter.shape[-1] ** (parameter.dim() / 2 - 0.5))
    return op


def inputs(record: TeRecord, generator: torch.Generator, leading: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """x and the extra inputs."""
    shapes = [(*leading, record.width), *(leading if name == "scales" else (*leading, record.width) for name in record.extras)]
    return [random(generator, shape, dtype).requires_grad_() for shape in shapes]


def run(record: TeRecord, op: FusibleOperation, leaves: Sequence[Tensor], seed: int = 5) -> Run:
    """y, the extra output, and all gradients of one training step."""
    for leaf in (*leaves, *op.parameters()):
        leaf.grad = None
    result = op(*leaves)
    outputs = list(result) if isinstance(result, tuple) else [result]
    generator = torch.Generator().manual_seed(seed)
    gave = [random(generator, output.shape, output.dtype) for output in outputs]
    torch.autograd.backward(outputs, gave)
    found: dict[str, Tensor] = {}
    found.update(zip(("y", "extra output"), (output.detach() for output in outputs), strict=False))
    names = ["x", *record.extras, *(name for name, _ in op.named_parameters())]
    for name, leaf in zip(names, (*leaves, *op.parameters()), strict=True):
        assert leaf.grad is not None, f"no gradient of {name}"
        found[f"d{name}"] = leaf.grad
    return Run(found, gave)


def reference(record: TeRecord, op: FusibleOperation, leaves: Sequence[Tensor], gave: Sequence[Tensor]) -> dict[str, Tensor]:
    """The same in float64, over rows."""
    x, *extras = (leaf.detach().double().requires_grad_() for leaf in leaves)
    parameters = {name: p.detach().double().requires_grad_() for name, p in op.named_parameters()}
    values = {**dict(zip(record.extras, extras, strict=True)), **{name.rpartition(".")[2]: p for name, p in parameters.items()}}
    y = record.reference(x, values)
    outputs = [y, x * 1] if record.extra_output else [y]
    named = {"x": x, **dict(zip(record.extras, extras, strict=True)), **parameters}
    grads = torch.autograd.grad(outputs, list(named.values()), [g.double().reshape(o.shape) for g, o in zip(gave, outputs, strict=True)])
    found = dict(zip(("y", "extra output"), (output.detach() for output in outputs), strict=False))
    return {**found, **{f"d{name}": grad for name, grad in zip(named, grads, strict=True)}}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("record", RECORDS)
def test_an_operation_agrees_with_float64(record: TeRecord, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(7)
    op = made(record, generator, dtype)
    for leading in LEADING if "Reshape" not in record.name else LEADING[:3]:
        leaves = inputs(record, generator, leading, dtype)
        found, gave = run(record, op, leaves)
        wanted = reference(record, op, leaves, gave)
        with torch.no_grad():
            inferred = op(*leaves)
        found["y inferred"] = inferred[0] if record.extra_output else inferred
        rows = torch.Size(leading).numel()
        assert found.keys() - {"y inferred"} == wanted.keys()
        for what, got in found.items():
            of_parameter = what.removeprefix("d") in dict(op.named_parameters())
            length = record.length + (rows if of_parameter else 0)
            assert_close(f"{record.name} {list(leading)}: {what}", got, wanted[what.removesuffix(" inferred")], dtype, length, record.roundings)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("record", [p for p in RECORDS if not p.values[0].asks])  # type: ignore[attr-defined]
def test_an_operation_that_asks_for_nothing_computes_the_same_under_a_recipe(record: TeRecord, recipe: Recipe) -> None:
    """Bit for bit: no recipe quantizes what no product reads. Twice, as delayed scaling has scales from the second call on."""
    for dtype in (torch.float32, torch.bfloat16):
        generator = torch.Generator().manual_seed(8)
        op = made(record, generator, dtype)
        leaves = inputs(record, generator, (32,), dtype)
        wanted = run(record, op, leaves).found
        for _ in range(2):
            with autocast(recipe=recipe):
                found = run(record, op, leaves).found
            assert found.keys() == wanted.keys()
            for what in wanted:
                assert found[what].dtype is wanted[what].dtype and torch.equal(found[what], wanted[what]), what


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", "GELU ErfGELU QGELU ReLU SiLU SReLU GLU GEGLU ErfGEGLU QGEGLU ReGLU SReGLU SwiGLU SiTUGLU".split())
def test_a_cached_quantized_input_is_what_backward_sees(name: str, dtype: torch.dtype) -> None:
    """y is that of x itself; dx is the derivative at x in E4M3, scaled by its own amax."""
    record, generator = TE_TABLE[name], torch.Generator().manual_seed(9)
    (x,) = inputs(record, generator, (16,), dtype)
    plain, cached = record.make(record.width, dtype), getattr(ops, name)(cache_quantized_input=True)
    exact = run(record, plain, [x])
    dequantized = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, "cpu")(x.detach()).dequantize(dtype=torch.float32)
    found = run(record, cached, [x]).found
    assert torch.equal(found["y"], exact.found["y"])
    # The decoded input may pass through a value of the activations' type.
    assert_close(f"{name}: dx", found["dx"], reference(record, cached, [dequantized.to(dtype)], exact.gave)["dx"], dtype, roundings=2)
    # The derivative of ReLU is the same on either side of a rounding.
    assert torch.equal(found["dx"], exact.found["dx"]) is (name == "ReLU")


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("leading", [(32,), (4, 8)], ids=str)
def test_quantize_gives_quantized_tensors_at_the_ends_of_a_pipeline(leading: tuple[int, ...], recipe: Recipe) -> None:
    """What a caller gets is a ``torch.Tensor`` of the nominal dtype, quantized; a gradient has the quantized values, and is a plain tensor."""
    for forward, backward in ((True, False), (False, True), (True, True)):
        op, generator = ops.Quantize(forward, backward), torch.Generator().manual_seed(10)
        for _ in range(4):  # delayed scaling has scales from the second call on; from the third on passes are replayed
            x, dy = random(generator, (*leading, 64), torch.bfloat16).requires_grad_(), random(generator, (*leading, 64), torch.bfloat16)
            with autocast(recipe=recipe):
                y = op(x)
            y.backward(dy)
            assert x.grad is not None
            assert isinstance(y, QuantizedTensor) is forward and type(x.grad) is torch.Tensor
            for got, wanted, quantizes in ((y, x, forward), (x.grad, dy, backward)):
                assert got.dtype is torch.bfloat16 and got.shape == wanted.shape
                assert torch.equal(got.dequantize() if isinstance(got, QuantizedTensor) else got, wanted) is not quantizes
            with torch.no_grad(), autocast(recipe=recipe):
                assert isinstance(op(x), QuantizedTensor) is forward


def test_the_table_covers_every_basic_operation() -> None:
    base = {"BasicOperation"}
    exported = {name for name in ops.__all__ if isinstance(c := getattr(ops, name), type) and issubclass(c, BasicOperation)} - base - ELSEWHERE
    driven = {type(op).__name__ for record in TE_TABLE.values() for op in record.make(record.width, torch.float32).basic_operations()}
    assert exported == driven


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("leading", [(97, 103), (11, 9, 103)], ids=str)
def test_dropout_keeps_a_share_and_sends_the_gradient_the_same_way(leading: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    op, p = ops.Dropout(0.3), 0.3
    x = (torch.rand(leading) + 0.5).to(dtype).requires_grad_()
    y = op(x)
    kept = y != 0
    # Some ten thousand draws: six standard deviations.
    assert abs(kept.double().mean().item() - (1 - p)) < 6 * (p * (1 - p) / x.numel()) ** 0.5
    dy = torch.randn(leading).to(dtype)
    y.backward(dy)
    assert x.grad is not None
    assert_close("y", y.detach(), x.detach().double() * kept / (1 - p), dtype)
    assert_close("dx", x.grad, dy.double() * kept / (1 - p), dtype)
    assert not torch.equal(op(x) != 0, kept)
    op.eval()
    evaluated: Any = op(x)
    assert torch.equal(evaluated, x)
