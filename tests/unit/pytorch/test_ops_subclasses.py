"""Subclasses of operations of ours that write a pass in torch: it is called, and ``super()`` is the op's own pass."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from quantization_error import RECIPES
from torch import Tensor, nn

import fusible
from fusible.errors import ArgumentError
from fusible.pytorch import ops
from fusible.pytorch.ops import fused, maybe_dequantize

ALL: dict[str, fusible.Recipe | None] = {"none": None, **RECIPES}


class Both(ops.SiLU):
    """Twice a SiLU, by the op's own passes."""

    def op_forward(self, ctx: Any, input_: Tensor, **quantizers: Any) -> Tensor:
        return 2 * super().op_forward(ctx, input_, **{**quantizers, "next_op_input_quantizer": None})

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        return super().op_backward(ctx, 2 * maybe_dequantize(grad_output))


class Wasteful(ops.SiLU):
    def op_forward(self, ctx: Any, input_: Tensor, **quantizers: Any) -> Tensor:
        return maybe_dequantize(super().op_forward(ctx, input_, **quantizers))


class Anew(ops.GELU):
    """The cube, with nothing of the op's; a factor comes with the call."""

    def op_forward(self, ctx: Any, input_: Tensor, *, factor: float = 1.0, **_: Any) -> Tensor:
        x = maybe_dequantize(input_)
        ctx.save_for_backward(x)
        ctx.factor = factor
        return factor * x**3

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        return 3 * ctx.factor * ctx.saved_tensors[0] ** 2 * maybe_dequantize(grad_output)


class Watched(ops.BasicLinear):
    """The forward of a linear layer, which is looked at; the backward is the op's."""

    def op_forward(self, ctx: Any, input_: Tensor, **quantizers: Any) -> Tensor:
        self.seen = super().op_forward(ctx, input_, **quantizers)
        return self.seen


class Clipped(ops.BasicLinear):
    """The backward of a linear layer, whose weight's gradient is halved; the forward is the op's."""

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        saved = self.saved_for_backward(ctx)
        assert {"x", "weight"} == saved.keys()
        dx, (dweight,) = super().op_backward(ctx, grad_output)
        return dx, [dweight / 2]


class Begin(ops.MakeExtraOutput):
    """An extra output of twice the input."""

    def fuser_forward(self, basic_op_ctxs: Any, input_: Any, **_: Any) -> Any:
        return input_, [(2 * maybe_dequantize(input_),)]

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Tensor, *, basic_op_grad_extra_outputs: Any) -> Any:
        return grad_output + 2 * basic_op_grad_extra_outputs[0][0], [()], [()]


def step(model: nn.Module, recipe: fusible.Recipe | None = None, **kwargs: Any) -> list[Tensor]:
    """The output and the gradients of the second of two steps."""
    for _ in range(2):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(3)).requires_grad_()
        with fusible.autocast(enabled=recipe is not None, recipe=recipe):
            y = model(x, **kwargs)
        y = y[0] + y[1] if isinstance(y, tuple) else y
        grads = torch.autograd.grad(y.square().sum(), [x, *model.parameters()])
    return [y, *grads]


def linears(middle: nn.Module, cls: type[nn.Module] = ops.Sequential, first: type[ops.BasicLinear] = ops.BasicLinear) -> nn.Module:
    torch.manual_seed(1)
    return cls(ops.LayerNorm(64), first(64, 64), middle, ops.Linear(64, 64))


def alike(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", ALL)
def test_the_ops_own_passes_are_called_by_super(name: str) -> None:
    twice = ops.Sequential(ops.SiLU(), ops.ConstantScale(2.0))
    assert alike(step(linears(Both()), ALL[name]), step(linears(twice), ALL[name]))


@pytest.mark.parametrize("container", [ops.Sequential, fusible.Sequential])
@pytest.mark.parametrize("name", ALL)
def test_one_pass_may_be_written_and_the_other_be_the_ops(name: str, container: type[nn.Module]) -> None:
    plain = step(linears(ops.SiLU(), container), ALL[name])
    watched = linears(ops.SiLU(), container, Watched)
    assert alike(step(watched, ALL[name]), plain)
    seen = next(op for op in watched.modules() if isinstance(op, Watched)).seen
    assert maybe_dequantize(seen).shape == (32, 64)
    clipped = step(linears(ops.SiLU(), container, Clipped), ALL[name])
    plain[4] /= 2  # y, dx, the norm's two, the first weight's
    assert alike(clipped, plain)


def test_a_subclass_may_use_nothing_of_the_op() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    for model in (Anew(), ops.Sequential(Anew()), fusible.Sequential(Anew())):
        y = model(x)
        assert torch.equal(y, x**3)
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], 3 * x.detach() ** 2)
        with torch.no_grad():
            assert torch.equal(model(x), x**3)
    model = ops.Sequential(ops.Identity(), Anew())
    assert torch.equal(model(x, op_kwargs={1: {"factor": 2.0}}), 2 * x**3)


def test_extra_tensors_pass_by_the_code_of_a_subclass() -> None:
    model = ops.Sequential(Begin(), ops.ConstantScale(3.0))
    y, dx = step(model)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(3))
    assert torch.equal(y, 5 * x) or torch.allclose(y, 5 * x, rtol=1e-6)  # 3 x and 2 x, each exact, rounded once in their sum
    assert torch.allclose(dx, 50 * x, rtol=1e-6)


def test_no_fusion_passes_by_what_a_subclass_has_written() -> None:
    model = ops.Sequential(ops.BasicLinear(64, 64), ops.Bias(64), Both())
    assert torch.equal(model(torch.ones(1, 64)), 2 * ops.SiLU()(model[:2](torch.ones(1, 64))))
    assert re.search(r"\n  2 +SiLU .* Both\n", model.explain())
    gelu = ops.Sequential(ops.BasicLinear(64, 64), ops.Bias(64), Anew())
    assert "  forward: mmt_add_gelu_fwd_fused at 0-2: Anew has 2\n" in gelu.explain()
    with ops.register_forward_fusion(fused.ForwardLinearBiasActivation.fuse_forward_ops):
        assert "ForwardLinearBiasActivation at 0-1" in gelu.explain()
    with pytest.raises(ArgumentError, match=r"^linear of ForwardLinearBiasAdd: expected BasicLinear, got Watched; "):
        fused.ForwardLinearBiasAdd(linear=Watched(4, 4), bias=None, add=ops.AddExtraInput())


@pytest.mark.parametrize("name", ["DelayedScaling", "MXFP8BlockScaling"])
def test_its_quantizers_are_those_of_the_pass(name: str) -> None:
    """What a pass quantizes by ``get_quantizer`` is what the op would have: same scale, and the same amax is recorded."""

    class Quantizes(ops.BasicLinear):
        def op_forward(self, ctx: Any, input_: Any, **quantizers: Any) -> Tensor:
            quantizer = self.get_quantizer("forward", 0)
            assert quantizer is not None
            given = quantizer(maybe_dequantize(input_))
            return super().op_forward(ctx, given, **quantizers)

    recipe = next(recipe for key, recipe in RECIPES.items() if type(recipe).__name__ == name)

    def net(first: type[ops.BasicLinear]) -> nn.Module:
        torch.manual_seed(1)
        return ops.Sequential(ops.Identity(), ops.AddExtraInput(), first(64, 64))

    one, other = net(ops.BasicLinear), net(Quantizes)
    x = torch.randn(32, 64)
    for _ in range(3):
        with fusible.autocast(recipe=recipe):
            a, b = one(x, x), other(x, x)
        (a.sum() + b.sum()).backward()
    assert torch.equal(a, b)
    assert alike(list(one.state_dict().values()), list(other.state_dict().values()))


def test_a_forward_that_leaves_nothing_for_the_ops_backward_is_one_sentence() -> None:
    class Silent(ops.GELU):
        def op_forward(self, ctx: Any, input_: Tensor, **_: Any) -> Tensor:
            return 2 * input_

    x = torch.ones(2, 2)
    assert torch.equal(Silent()(x), 2 * x)
    message = r"^the context of self \(Silent\) after Silent.op_forward: expected what its own backward needs \(x\), got nothing; "
    with pytest.raises(ArgumentError, match=message + r"call self\.save_for_backward\(ctx, x=\.\.\.\)\.$"):
        Silent()(x.requires_grad_())


def test_quantizing_twice_by_one_scale_is_one_sentence() -> None:
    with pytest.raises(ArgumentError, match=r"^what is quantized by the scale '3\.x' in a pass of .*: expected one tensor, got another; hand on "):
        step(linears(Wasteful()), fusible.DelayedScaling())


def test_beside_compiled_programs_it_is_called() -> None:
    model = ops.Sequential(ops.SiLU(), Both(), ops.SiLU())
    x = torch.randn(2, 2, generator=torch.Generator().manual_seed(0))
    wanted = model(x)
    torch.testing.assert_close(model.compile("xla")(x), wanted)


def test_called_on_its_own_an_operation_follows_the_recipe_in_force_and_no_former_one() -> None:
    layer, x = ops.BasicLinear(32, 32), torch.randn(32, 32)
    with fusible.autocast(recipe=fusible.Float8CurrentScaling()):
        quantized = layer(x)
        within = layer.op_forward(ops.OperationContext(), x, prev_op_grad_output_quantizer=None, next_op_input_quantizer=None)
    y = layer.op_forward(ops.OperationContext(), x, prev_op_grad_output_quantizer=None, next_op_input_quantizer=None)
    assert torch.equal(y, layer(x)) and not torch.equal(y, quantized) and torch.equal(within, quantized)


def test_called_on_its_own_an_operation_has_the_weights_that_it_is_given_later() -> None:
    layer, x = ops.BasicLinear(32, 32), torch.randn(32, 32)
    layer(x)
    for weight in (torch.zeros(32, 32), torch.eye(32)):
        layer.weight = torch.nn.Parameter(weight)
        y = layer.op_forward(ops.OperationContext(), x, prev_op_grad_output_quantizer=None, next_op_input_quantizer=None)
        assert torch.equal(y, x @ weight)


def test_called_on_its_own_an_operation_has_the_options_that_it_is_given_later() -> None:
    scale, x = ops.ConstantScale(2.0), torch.randn(4, 32)
    scale(x)
    scale.scale = 5.0
    assert torch.equal(scale.op_forward(ops.OperationContext(), x, prev_op_grad_output_quantizer=None, next_op_input_quantizer=None), 5.0 * x)
