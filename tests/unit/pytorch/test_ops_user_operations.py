"""Operations that a user writes in plain torch: what they are given, what they may give back, and what goes on under recipes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quantization_error import RECIPES
from torch import Tensor, nn

from fusible import autocast
from fusible.errors import ArgumentError
from fusible.pytorch import ops
from fusible.pytorch.ops import BasicOperation, FusibleOperation, OperationContext, maybe_dequantize
from fusible.quantized import (
    CustomRecipe,
    DelayedScaling,
    DelayedScalingRequest,
    Float8CurrentScaling,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Format,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
    QuantizedTensorStorage,
    QuantizerRole,
    Recipe,
)
from fusible.tex import DType


class Scale(BasicOperation):
    """``y = x * weight``; saves None among tensors, and takes ``shift``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), 2.0))

    def op_forward(self, ctx: OperationContext, input_: Tensor, *, shift: float = 0.0, **_: Any) -> Tensor:
        ctx.save_for_backward(input_, None, self.weight)
        ctx.shift = shift  # type: ignore[attr-defined]
        return input_ * self.weight + shift

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> Any:
        assert ctx.saved_tensors is not None
        x, nothing, weight = ctx.saved_tensors
        assert nothing is None
        return grad_output * weight, [(grad_output * x).sum(0)]


class Square(BasicOperation):
    """``y = x^2``; has no parameters, and gives a bare gradient."""

    def op_forward(self, ctx: OperationContext, input_: Tensor, **_: Any) -> Tensor:
        ctx.save_for_backward(input_)
        return input_.square()

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> Any:
        assert ctx.saved_tensors is not None
        return 2 * ctx.saved_tensors[0] * grad_output


class Mix(BasicOperation):
    """``y = x + a * b``, and ``a`` as an extra output. The gradient of ``b`` is left out where ``silent``."""

    num_extra_inputs = 2
    num_extra_outputs = 1

    def __init__(self, silent: bool = False) -> None:
        super().__init__()
        self.silent = silent
        self.seen: list[Any] = []

    def fuser_forward(self, basic_op_ctxs: Any, input_: Tensor, *, basic_op_extra_inputs: Any, **_: Any) -> Any:
        ((a, b),) = basic_op_extra_inputs
        basic_op_ctxs[0].save_for_backward(a, b)
        return input_ + a * b, [(a.clone(),)]

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Tensor, *, basic_op_grad_extra_outputs: Any) -> Any:
        ((extra,),) = basic_op_grad_extra_outputs
        self.seen.append(extra)
        a, b = basic_op_ctxs[0].saved_tensors
        da = grad_output * b + (0 if extra is None else extra)
        return grad_output, [()], [(da, None if self.silent else grad_output * a)]


class Rounded(BasicOperation):
    """The identity by quantizers of its own: x and one more tensor in forward, the gradient in backward. Saves a quantized tensor."""

    def __init__(self, roles: bool = True) -> None:
        super().__init__()
        self.with_roles = roles
        self.used: dict[str, list[Any]] = {"forward": [], "backward": []}

    def num_quantizers(self, mode: str) -> int:
        return 2 if mode == "forward" else 1

    def get_quantizer_roles(self, mode: str) -> list[QuantizerRole] | None:
        names = ("input", "weight") if mode == "forward" else ("grad_output",)
        return [QuantizerRole("linear", name) for name in names] if self.with_roles else None

    def op_forward(self, ctx: OperationContext, input_: Tensor, **_: Any) -> Tensor:
        quantizers = [self.get_quantizer("forward", i) for i in range(2)]
        self.used["forward"] = quantizers
        first = input_ if quantizers[0] is None else quantizers[0](input_)
        tripled = 3 * maybe_dequantize(input_)
        second = tripled if quantizers[1] is None else quantizers[1](tripled)
        ctx.save_for_backward(second, None, first)
        ctx.dtype = input_.dtype  # type: ignore[attr-defined]
        return maybe_dequantize(first, input_.dtype)

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> Any:
        assert ctx.saved_tensors is not None
        second, nothing, first = ctx.saved_tensors
        assert nothing is None and maybe_dequantize(second).shape == maybe_dequantize(first).shape == grad_output.shape
        for saved, quantizer in ((first, self.used["forward"][0]), (second, self.used["forward"][1])):
            assert isinstance(saved, (QuantizedTensor, QuantizedTensorStorage)) is (quantizer is not None)
        torch.testing.assert_close(maybe_dequantize(second), 3 * maybe_dequantize(first), rtol=0.5, atol=0.5)
        quantizer = self.get_quantizer("backward", 0)
        self.used["backward"] = [quantizer]
        return grad_output if quantizer is None else maybe_dequantize(quantizer(grad_output), ctx.dtype)  # type: ignore[attr-defined]


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).requires_grad_()


def test_saved_tensors_come_back_in_their_order_and_none_stays_none() -> None:
    for op in (Scale(4), ops.Sequential(ops.Identity(), Scale(4), ops.Identity())):
        x = leaf(3, 4)
        op(x).backward(torch.full((3, 4), 0.5))
        (weight,) = op.parameters()
        assert torch.equal(x.grad, torch.ones(3, 4)) and weight.grad is not None  # type: ignore[arg-type]
        assert torch.equal(weight.grad, (0.5 * x.detach()).sum(0))


def test_an_operation_without_parameters_may_give_the_bare_gradient() -> None:
    x = leaf(3, 4)
    ops.Sequential(ops.ConstantScale(2.0), Square())(x).sum().backward()
    torch.testing.assert_close(x.grad, 8 * x.detach())


def test_keyword_arguments_reach_the_operation_that_they_are_for() -> None:
    first, second = Scale(4), Scale(4)
    model, x = ops.Sequential(first, ops.Identity(), second), leaf(3, 4)
    y = model(x, op_kwargs={first: {"shift": 1.0}, -1: {"shift": 3.0}})
    torch.testing.assert_close(y, (2 * x + 1) * 2 + 3)
    torch.testing.assert_close(first(x, shift=1.0), 2 * x + 1)
    torch.testing.assert_close(model(x), 4 * x)
    with pytest.raises(ArgumentError, match="Identity.op_forward: expected no keyword arguments, got shift"):
        model(x, op_kwargs={1: {"shift": 1.0}})
    with pytest.raises(ArgumentError, match="a key of op_kwargs: expected a basic operation in the Sequential, or its index, got 3"):
        model(x, op_kwargs={3: {}})
    with pytest.raises(ArgumentError, match="a key of op_kwargs: expected .*, got Scale"):
        model(x, op_kwargs={Scale(4): {}})


@pytest.mark.parametrize("needs", [(True, True, True), (True, False, False), (False, True, False), (False, False, True)], ids=str)
@pytest.mark.parametrize("silent", [False, True])
def test_extra_tensors_have_gradients_where_anyone_needs_them(needs: tuple[bool, bool, bool], silent: bool) -> None:
    op = Mix(silent)
    model = ops.Sequential(ops.ConstantScale(2.0), op, ops.ConstantScale(3.0))
    x, a, b = (leaf(3, 4).detach().requires_grad_(need) for need in needs)
    y, extra = model(x, a, b)
    torch.testing.assert_close(y, 3 * (2 * x + a * b))
    assert torch.equal(extra, a)
    (y.sum() + 5 * extra.sum()).backward()
    wanted = (torch.full((3, 4), 6.0), 3 * b.detach() + 5, 3 * a.detach())
    for tensor, need, gradient in zip((x, a, b), needs, wanted, strict=True):
        if not need or (silent and tensor is b):
            assert tensor.grad is None or (tensor is b and not tensor.grad.any())
        else:
            torch.testing.assert_close(tensor.grad, gradient)


def test_an_extra_output_that_nobody_differentiates_has_no_gradient() -> None:
    op = Mix()
    x, a, b = leaf(3, 4), leaf(3, 4), leaf(3, 4)
    y, _ = ops.Sequential(op)(x, a, b)
    y.sum().backward()
    assert op.seen[0] is None or not op.seen[0].any()
    torch.testing.assert_close(a.grad, b.detach())


@pytest.mark.parametrize("placed", ["alone", "between", "beside linear layers"])
@pytest.mark.parametrize("name", ["none", *RECIPES])
def test_quantizers_are_there_under_every_recipe(name: str, placed: str) -> None:
    recipe, op = RECIPES.get(name), Rounded()
    around = {"alone": [op], "between": [ops.Identity(), op, ops.GELU()], "beside linear layers": [ops.Linear(32, 64), op, ops.Linear(64, 32)]}
    model = ops.Sequential(*around[placed])
    for _ in range(3):
        x = torch.randn(32, 64 if placed != "beside linear layers" else 32, requires_grad=True)
        with autocast(enabled=recipe is not None, recipe=recipe):
            y = model(x)
        y.backward(torch.randn(y.shape))
        assert x.grad is not None and x.grad.isfinite().all()
    quantizers = [*op.used["forward"], *op.used["backward"]]
    assert len(quantizers) == 3 and all((quantizer is None) is (recipe is None) for quantizer in quantizers)
    assert op.get_input_quantizer() is (op.used["forward"][0] if recipe is not None else None)
    with autocast(enabled=False):
        model(x)
    assert op.get_quantizer("forward", 0) is None, "outside of a recipe there is none"


@pytest.mark.parametrize("roles", [True, False])
def test_delayed_scaling_records_what_an_operation_quantized(roles: bool) -> None:
    op = Rounded(roles)
    model, recipe = ops.Sequential(ops.ConstantScale(-1.0), op), DelayedScaling(amax_history_len=4)
    amaxes: list[tuple[float, float]] = []
    for step in range(3):
        x, dy = (step + 1.0) * leaf(32, 32).detach(), 0.1 * (step + 1) * leaf(32, 32).detach()
        x.requires_grad_()
        with autocast(recipe=recipe):
            y = model(x)
        largest = max(amaxes, default=None)
        first, second = op.used["forward"]
        for quantizer, factor in ((first, 1.0), (second, 3.0)):
            assert isinstance(quantizer, Float8Quantizer) and quantizer.dtype == DType.kFloat8E4M3
            wanted = 1.0 if largest is None else 448.0 / (factor * largest[0])
            torch.testing.assert_close(quantizer.scale.item(), wanted)
        y.backward(dy)
        (backward,) = op.used["backward"]
        assert backward.dtype == DType.kFloat8E5M2
        torch.testing.assert_close(backward.scale.item(), 1.0 if largest is None else 57344.0 / largest[1])
        amaxes.append((x.abs().max().item(), dy.abs().max().item()))


def test_another_option_of_a_recipe_makes_other_quantizers() -> None:
    op = Rounded()
    for kind in (Float8CurrentScaling, DelayedScaling):
        for fp8_format in (Format.E4M3, Format.E5M2, Format.HYBRID):
            recipe = kind(fp8_format=fp8_format)
            with autocast(recipe=recipe):
                op(torch.randn(32, 32, requires_grad=True)).sum().backward()
            found = [quantizer.dtype for quantizer in (*op.used["forward"], *op.used["backward"])]
            assert found == [fp8_format.forward, fp8_format.forward, fp8_format.backward]


def factory(role: QuantizerRole | None) -> Any:
    """Another format for each tensor, and one that is not quantized."""
    made = {"input": DelayedScalingRequest(amax_history_len=2), "weight": NVFP4Quantizer(), "grad_output": MXFP8Quantizer(DType.kFloat8E5M2)}
    return made.get(role.tensor_type) if role is not None else None


def test_a_custom_recipe_may_mix_formats() -> None:
    op, linear = Rounded(), ops.Linear(64, 64)
    recipe: Recipe = CustomRecipe(qfactory=factory)
    model = ops.Sequential(ops.Linear(64, 64), ops.GELU(), op, linear)
    for _ in range(3):
        x = torch.randn(32, 64, requires_grad=True)
        with autocast(recipe=recipe):
            y = model(x)
        y.sum().backward()
        assert y.isfinite().all() and x.grad is not None and x.grad.isfinite().all()
    first, second = op.used["forward"]
    assert isinstance(first, Float8Quantizer) and isinstance(second, NVFP4Quantizer) and isinstance(op.used["backward"][0], MXFP8Quantizer)
    assert first.scale.item() != 1.0, "what a DelayedScalingRequest asks for has its amaxes recorded"


def test_an_operation_that_lacks_a_pass_says_so() -> None:
    class Half(BasicOperation):
        def op_forward(self, ctx: OperationContext, input_: Tensor, **_: Any) -> Tensor:
            return input_

    class Extra(Square):
        num_extra_inputs = 1

    x = leaf(2, 2)
    with pytest.raises(NotImplementedError, match="Half overrides neither op_backward nor make_op"):
        Half()(x).sum().backward()
    for base in (BasicOperation, FusibleOperation):
        with pytest.raises(TypeError, match=f"{base.__name__}: expected a class derived from it, got the class itself"):
            base()
    with pytest.raises(NotImplementedError, match="1 extra inputs and 0 extra outputs, so it must override fuser_forward"):
        Extra()(x, x)
    with pytest.raises(ArgumentError, match=r"Square\.get_quantizer\('forward', index\): expected an index below 0, got 0"):
        Square().get_quantizer("forward", 0)


def test_a_wrong_number_of_gradients_is_one_sentence() -> None:
    class Forgets(Scale):
        def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> Any:
            return grad_output

    with pytest.raises(ArgumentError, match="what the backward of Forgets returns: expected gradients of 1 parameters, got 0"):
        Forgets(2)(leaf(2, 2)).sum().backward()


def test_a_quantizer_of_a_neighbour_may_be_used() -> None:
    """``next_op_input_quantizer`` is how the linear layer would quantize: to hand over the quantized tensor gives the same."""
    given: list[Any] = []

    class Hands(BasicOperation):
        def __init__(self, uses: bool) -> None:
            super().__init__()
            self.uses = uses

        def op_forward(self, ctx: OperationContext, input_: Tensor, *, next_op_input_quantizer: Any = None, **_: Any) -> Tensor:
            given.append(next_op_input_quantizer)
            return next_op_input_quantizer(input_) if self.uses and next_op_input_quantizer is not None else input_

        def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> Any:
            return maybe_dequantize(grad_output)

    for recipe in RECIPES.values():
        torch.manual_seed(1)
        linear, x = ops.Linear(64, 64), torch.randn(32, 64)
        results = []
        for uses in (False, True):
            model = ops.Sequential(Hands(uses), linear)
            for _ in range(2):
                with autocast(recipe=recipe), torch.no_grad():
                    y = model(x)
            results.append(y)
        assert given[-1] is not None and torch.equal(*results)
    assert any(isinstance(quantizer, Float8CurrentScalingQuantizer) for quantizer in given)


class Told(Square):
    """Notes what it is told before forward."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[bool | str] = []

    def pre_first_fuser_forward(self) -> None:
        self.told.append("first")

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        self.told.append(requires_grad)


def test_an_operation_is_told_before_each_forward_whether_backward_will_come_by() -> None:
    """It comes by every operation from the first on that has a gradient to give: of its parameters, or of what comes before it."""
    before, after = Told(), Told()
    model = ops.Sequential(before, ops.ConstantScale(2.0), Scale(4), after, Told())
    x = torch.randn(3, 4)
    model(x)
    model(x.clone().requires_grad_())
    with torch.no_grad():
        model(x.clone().requires_grad_())
    model[2].weight.requires_grad_(False)
    model(x)
    assert before.told == ["first", False, True, False, False] and after.told == ["first", True, True, False, False]
