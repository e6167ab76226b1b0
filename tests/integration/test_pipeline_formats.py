"""Every recipe in a pipeline: what is quantized how, what backward reads, and quantizers that no backend knows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fusible
from fusible import tex
from fusible.errors import ArgumentError
from fusible.pytorch import ops as te_ops
from fusible.pytorch.quantized_init import as_parameter, quantized_model_init
from fusible.quantized import (
    CustomRecipe,
    DelayedScalingRequest,
    Float8CurrentScalingQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
    QuantizedTensorStorage,
    Quantizer,
    QuantizerRole,
    Recipe,
)
from fusible.tex import DType

WIDTH = 64
BLOCKS = {"mxfp8": fusible.MXFP8BlockScaling(), "block": fusible.Float8BlockScaling(), "nvfp4": fusible.NVFP4BlockScaling()}
RECIPES: dict[str, Recipe] = {"delayed": fusible.DelayedScaling(), "current": fusible.Float8CurrentScaling(), **BLOCKS}
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def linear(**options: Any) -> fusible.Linear:
    torch.manual_seed(0)
    return fusible.Linear(WIDTH, WIDTH, **options)


def gradients(model: torch.nn.Module, x: Tensor, dy: Tensor, recipe: Recipe | None) -> list[Tensor]:
    x = x.clone().requires_grad_()
    model.zero_grad()
    with fusible.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x)
    y.backward(dy)
    assert x.grad is not None
    return [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("make", [fusible.Float8CurrentScaling, *(type(recipe) for recipe in BLOCKS.values())], ids=lambda c: c.__name__)
def test_a_backward_in_high_precision_is_that_of_no_recipe(make: Any) -> None:
    x, dy = normal(WIDTH, WIDTH), normal(WIDTH, WIDTH, seed=2)
    plain = gradients(linear(), x, dy, None)
    for _ in range(3):  # the third is replayed
        model = linear()
        assert all(map(torch.equal, gradients(model, x, dy, make(backward_override="high_precision")), plain))
    with fusible.autocast(recipe=make(backward_override="high_precision")):
        y = model(x)
    assert not torch.equal(y, linear()(x))


@pytest.mark.parametrize("make", [fusible.Float8CurrentScaling, fusible.MXFP8BlockScaling, fusible.Float8BlockScaling], ids=lambda c: c.__name__)
def test_a_backward_of_dequantized_operands_reads_what_forward_read(make: Any) -> None:
    x, dy, recipe = normal(WIDTH, WIDTH), normal(WIDTH, WIDTH, seed=2), make(backward_override="dequantized")
    found = gradients(linear(bias=False), x, dy, recipe)
    held = linear(bias=False)
    quantizers = [fusible.quantized.quantizer_for_role(make(), QuantizerRole("linear", name)) for name in ("input", "weight")]
    values, weight = (quantizer(t).dequantize() for quantizer, t in zip(quantizers, (x, held.weight.detach()), strict=True))  # type: ignore[misc]
    held.weight.data.copy_(weight)
    assert all(map(torch.equal, found, gradients(held, values, dy, None)))


def test_a_layer_of_many_weights_says_that_it_cannot_override() -> None:
    op = te_ops.GroupedLinear(2, WIDTH, WIDTH)
    with (
        pytest.raises(ArgumentError, match="backward_override='high_precision'"),
        fusible.autocast(recipe=fusible.MXFP8BlockScaling(backward_override="high_precision")),
    ):
        op(normal(WIDTH, WIDTH), torch.tensor([32, 32]))


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_what_quantizes_activations_alone_has_no_backward_to_override(override: str) -> None:
    """Its gradient passes as it is, whatever becomes of the layers' gradients."""
    x, dy = normal(WIDTH, WIDTH), normal(WIDTH, WIDTH, seed=2)
    model = te_ops.Sequential(te_ops.Quantize(forward=True, backward=False), te_ops.ConstantScale(3.0))
    (dx,) = gradients(model, x, dy, fusible.Float8CurrentScaling(backward_override=override))
    assert torch.equal(dx, 3 * dy)


@every_recipe
def test_only_the_copies_that_products_read_are_made(recipe: Recipe) -> None:
    model, x = linear(bias=False), normal(WIDTH, WIDTH)
    with fusible.autocast(recipe=recipe):
        text = model.explain(x)
        with torch.no_grad(), tex.record() as calls:
            model(x)
    assert "mxfp8]" in text or "block]" in text or "nvfp4]" in text or recipe.float8_per_tensor_scaling()  # x needs no gradient: no dgrad
    assert [call.function for call in calls].count("quantize") == 2


@every_recipe
def test_a_pipeline_may_end_in_8_bits(recipe: Recipe) -> None:
    first, second, x = te_ops.Sequential(te_ops.Quantize(True, True)), te_ops.Linear(WIDTH, WIDTH), normal(WIDTH, WIDTH).requires_grad_()
    for _ in range(3):
        with fusible.autocast(recipe=recipe):
            h = first(x)
            second(h).sum().backward()
    assert isinstance(h, QuantizedTensor) and h.dtype is torch.float32 and h.requires_grad
    assert x.grad is not None and x.grad.isfinite().all() and type(x.grad) is Tensor
    with torch.no_grad(), fusible.autocast(recipe=recipe):
        assert isinstance(first(x), QuantizedTensor)
    assert torch.equal(first(x), x)


@every_recipe
def test_weights_that_are_held_quantized_are_read_as_they_are(recipe: Recipe) -> None:
    model, x = linear(), normal(WIDTH, WIDTH)
    with quantized_model_init(recipe=recipe):
        model.weight = as_parameter(model.weight)
    assert isinstance(model.weight, QuantizedTensor) and isinstance(model.weight, torch.nn.Parameter)
    before = model.weight.detach().dequantize().clone()
    with fusible.autocast(recipe=recipe), tex.record() as calls:
        loss = (model(x) - normal(WIDTH, WIDTH, seed=3)).square().mean()
    assert [call.function for call in calls].count("quantize") == 1  # x alone
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=10.0).step()
    assert not torch.equal(model.weight.detach().dequantize(), before)


class _Ints(QuantizedTensorStorage):
    """Eight bits by a quantizer that tex has never heard of: rows and columns apart, a scale each."""

    def __init__(self, x: Tensor, quantizer: Quantizer) -> None:
        rows = x.reshape(-1, x.shape[-1]).float()
        self.scale, self.scale_t = rows.abs().amax(1, keepdim=True) / 127, rows.abs().amax(0)[:, None] / 127
        self.data, self.data_t = (rows / self.scale).round().to(torch.int8), (rows.t() / self.scale_t).round().to(torch.int8)
        self.original_shape, self._quantizer, self._dtype = x.shape, quantizer, x.dtype

    dtype = property(lambda self: self._dtype)

    def size(self) -> torch.Size:
        return self.original_shape

    def prepare_for_saving(self) -> tuple[list[Any], Any]:
        tensors = [self.data, self.scale, self.data_t, self.scale_t]
        self.data = self.scale = self.data_t = self.scale_t = None  # type: ignore[assignment]
        return tensors, self

    def restore_from_saved(self, tensors: list[Any]) -> list[Any]:
        self.data, self.scale, self.data_t, self.scale_t, *rest = tensors
        return rest

    def dequantize(self, *, dtype: Any = None) -> Tensor:
        return (self.data * self.scale).reshape(self.original_shape).to(dtype or self._dtype)


class _ShapedInts(_Ints):
    shape = property(_Ints.size)


class _IntQuantizer(Quantizer):
    custom = True  # type: ignore[assignment]

    def __init__(self, storage: type[_Ints] = _ShapedInts) -> None:
        super().__init__(rowwise=True, columnwise=True)
        self.storage = storage

    def quantize_impl(self, tensor: Tensor) -> Any:
        return self.storage(tensor, self)

    def qgemm(self, qx: Tensor, qw: Tensor, params: Any, out_dtype: Any, sx: Tensor, sw: Tensor, bias: Any, **_: Any) -> Tensor:
        return ((qx * sx) @ (qw * sw).t()).to(out_dtype)


E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2


def factories() -> Iterator[tuple[str, Any, float]]:
    """By name: a factory, and a bound of the relative error of a product of vectors: two roundings to ``eps``, as if they all fell together."""
    yield "custom", lambda role: _IntQuantizer(), 2 * 2**-7 * 4  # a scale per row: 4 stands for amax over rms
    yield "custom, with a size alone", lambda role: _IntQuantizer(_Ints), 2 * 2**-7 * 4
    rows, columns = Float8CurrentScalingQuantizer, MXFP8Quantizer
    yield "hybrid", lambda role: HybridQuantizer(rowwise_quantizer=rows(E4M3), columnwise_quantizer=columns(E4M3)), 2**-3
    yield "identity", lambda role: IdentityQuantizer(), 0.0
    yield (
        "delayed beside current",
        lambda role: (
            DelayedScalingRequest() if role.tensor_type == "input" else Float8CurrentScalingQuantizer(E5M2 if "grad" in role.tensor_type else E4M3)
        ),
        2**-2,
    )
    yield "two formats", lambda role: MXFP8Quantizer(E4M3) if role.tensor_type == "input" else NVFP4Quantizer(), 2**-1
    yield "none", lambda role: None, 0.0


@pytest.mark.parametrize(("factory", "bound"), [pytest.param(f, bound, id=name) for name, f, bound in factories()])
def test_a_factory_decides_tensor_by_tensor(factory: Any, bound: float) -> None:
    def model() -> te_ops.Sequential:
        torch.manual_seed(0)
        parts = te_ops.LayerNorm(WIDTH), te_ops.Linear(WIDTH, WIDTH), te_ops.GELU(), te_ops.Linear(WIDTH, 32, bias=False), te_ops.Linear(32, WIDTH)
        return te_ops.Sequential(*parts)

    x, dy, recipe = normal(2, 32, WIDTH), normal(2, 32, WIDTH, seed=2), CustomRecipe(factory)
    ours, plain = model(), gradients(model(), x, dy, None)
    for _ in range(4):  # a delayed scale is of the step before
        found = gradients(ours, x, dy, recipe)
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(found, plain, strict=True)]
    layers = 3  # through which the error of a gradient passes
    assert max(errors) <= layers * bound and (min(errors[1:-1]) > 0) == (bound > 0)
    assert ("scaling_state.0" in ours.state_dict()) == any(isinstance(factory(QuantizerRole("linear", "input")), c) for c in (DelayedScalingRequest,))


_ROLES = "input", "weight", "grad_output"


@pytest.mark.parametrize("between", [[], [fusible.GELU()], [fusible.ReLU()]], ids=["nothing", "GELU", "ReLU"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("asked", [roles for count in (1, 2) for roles in itertools.combinations(_ROLES, count)], ids=str)
def test_a_product_of_a_custom_tensor_and_another_is_refused(asked: tuple[str, ...], bias: bool, between: list[torch.nn.Module]) -> None:
    """Whichever product has the one and the other, fused with whatever."""
    recipe = fusible.CustomRecipe(qfactory=lambda role: _IntQuantizer() if role.tensor_type in asked else None)
    model = fusible.Sequential(fusible.Linear(32, 64, bias=bias), *between, fusible.Linear(64, 32, bias=bias))
    with pytest.raises(fusible.errors.DTypeError, match="expected two operands of custom quantizers, got .*quantize both by quantizers of your own"):
        with fusible.autocast(recipe=recipe):
            model(torch.randn(16, 32, requires_grad=True)).sum().backward()


def _step(recipe: Any, executor: str) -> None:
    model = fusible.Sequential(fusible.Linear(32, 64), fusible.Linear(64, 32)).compile(executor)
    with fusible.autocast(recipe=recipe):
        model(torch.randn(16, 32, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("asked", [(role,) for role in _ROLES] + [_ROLES])
def test_a_custom_quantizer_is_refused_where_a_pass_is_compiled(asked: tuple[str, ...]) -> None:
    said = r"what is quantized by the custom quantizer _IntQuantizer( of .*)?: expected a tensor of torch, got one that a compiled pass records; "
    with pytest.raises(fusible.errors.NotServedError, match=said):
        _step(fusible.CustomRecipe(qfactory=lambda role: _IntQuantizer() if role.tensor_type in asked else None), "xla")


@pytest.mark.parametrize("lacking", ["data", "scale", "data_t", "scale_t", "dequantize", "dtype", "prepare_for_saving", "restore_from_saved"])
def test_what_a_custom_quantizer_makes_says_what_it_lacks(lacking: str) -> None:
    class Lacking:
        def __init__(self, x: Tensor, quantizer: Quantizer) -> None:
            self._made = _ShapedInts(x, quantizer)

        def __getattr__(self, name: str) -> Any:
            if name == lacking:
                raise AttributeError(name)
            return getattr(self._made, name)

    said = rf"what is made by the custom quantizer _IntQuantizer( of .*)?: expected {lacking} of it, got a Lacking without; define {lacking}"
    with pytest.raises(fusible.errors.NotServedError, match=said):
        _step(fusible.CustomRecipe(qfactory=lambda role: _IntQuantizer(Lacking)), "eager")  # type: ignore[arg-type]  # pyright: ignore


@pytest.mark.parametrize("executor", ["eager", "xla"])
def test_a_quantizer_that_does_not_say_that_it_is_custom_is_refused(executor: str) -> None:
    quiet = type("Quiet", (_IntQuantizer,), {"custom": False})
    with pytest.raises(fusible.errors.DTypeError, match="custom of the quantizer Quiet( of .*)?: expected True, got False; let it be True"):
        _step(fusible.CustomRecipe(qfactory=lambda role: quiet()), executor)


def test_a_weight_is_held_as_a_tensor_alone() -> None:
    recipe = fusible.CustomRecipe(qfactory=lambda role: _IntQuantizer())
    said = "a weight that is held as _IntQuantizer quantizes it: expected a QuantizedTensor, got _ShapedInts; "
    with pytest.raises(fusible.errors.NotServedError, match=said), fusible.quantized_model_init(recipe=recipe):
        fusible.Linear(32, 64)
    model = fusible.Sequential(fusible.Linear(32, 64), fusible.Linear(64, 32))
    with pytest.raises(fusible.errors.NotServedError, match=said):
        fusible.quantize_parameters(model, recipe=recipe)
    assert all(type(parameter) is torch.nn.Parameter for parameter in model.parameters())


def test_delayed_scaling_of_two_kinds_is_refused() -> None:
    recipe = CustomRecipe(lambda role: DelayedScalingRequest(amax_history_len=4 if role.tensor_type == "input" else 8))
    with pytest.raises(ArgumentError, match="one delayed scaling"), fusible.autocast(recipe=recipe):
        linear()(normal(WIDTH, WIDTH))
