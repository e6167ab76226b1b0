"""What a user's fused operation may do with operations of ours: compute itself, leave and find what they save, take the channels inside it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import fusible
from fusible.errors import ArgumentError
from fusible.pytorch import ops

ROWS, WIDTH = 32, 64
RECIPES = {
    "none": None,
    "delayed": fusible.DelayedScaling(amax_history_len=4),
    "current": fusible.Float8CurrentScaling(),
    "mxfp8": fusible.MXFP8BlockScaling(),
}
recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


class ComposedForward(ops.FusedOperation):
    """The operations one after another, each by its own ``fuser_forward``; ``inner``: places of (producer, consumer) of a channel inside."""

    inner: tuple[int, int] | None = None

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, prev_op_grad_output_quantizer, next_op_input_quantizer, basic_op_kwargs):
        extra = [list(values) for values in basic_op_extra_inputs]
        outputs = []
        last = len(basic_op_ctxs) - 1
        for i, (op, ctx) in enumerate(zip(self.basic_ops, basic_op_ctxs, strict=True)):
            if self.inner is not None and i == self.inner[1]:
                assert extra[i] == [None]
                extra[i] = [outputs[self.inner[0]][0]]
            input_, (given,) = op.fuser_forward(
                [ctx],
                input_,
                basic_op_extra_inputs=[tuple(extra[i])],
                prev_op_grad_output_quantizer=None,
                next_op_input_quantizer=next_op_input_quantizer if i == last else None,
                basic_op_kwargs=[{}],
            )
            outputs.append(given)
        return input_, outputs


class ComposedBackward(ops.FusedOperation):
    inner: tuple[int, int] | None = None

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        grads, extra_grads = [], []
        extra = [list(values) for values in basic_op_grad_extra_outputs]
        for i in reversed(range(len(basic_op_ctxs))):
            grad_output, (own,), (given,) = self.basic_ops[i].fuser_backward(
                [basic_op_ctxs[i]], grad_output, basic_op_grad_extra_outputs=[tuple(extra[i])]
            )
            grads.insert(0, own)
            extra_grads.insert(0, given)
            if self.inner is not None and i == self.inner[1]:
                before = extra[self.inner[0]][0]
                extra[self.inner[0]][0] = given[0] if before is None else before + given[0]
        return grad_output, grads, extra_grads


class ComposedBoth(ComposedForward, ComposedBackward):
    pass


COMPOSED = [ComposedForward, ComposedBackward, ComposedBoth]


def _train(model: Any, extra: int, recipe: Any) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(3)  # of dropout
    results: list[Any] = []
    for _ in range(2):
        tensors = [torch.randn(ROWS, WIDTH, generator=generator).to(torch.bfloat16).requires_grad_() for _ in range(1 + extra)]
        with fusible.autocast(enabled=recipe is not None, recipe=recipe):
            out = model(*tensors)
        outs = out if isinstance(out, tuple) else (out,)
        torch.autograd.backward(outs, [torch.randn(o.shape, generator=generator).to(o.dtype) for o in outs])
        results += [*(o.detach() for o in outs), *(t.grad for t in tensors)]
    return results + [p.grad for p in model.parameters()]


def _assert_same(got: list[Any], wanted: list[Any]) -> None:
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


def _linear() -> ops.BasicLinear:
    return ops.BasicLinear(WIDTH, WIDTH, dtype=torch.bfloat16)


@recipes
@pytest.mark.parametrize("cls", COMPOSED)
def test_operations_with_extra_tensors_run_inside_a_fused_operation(cls: Any, recipe: Any) -> None:
    torch.manual_seed(0)
    basics = [ops.MakeExtraOutput(), ops.RMSNorm(WIDTH, dtype=torch.bfloat16), ops.Identity(), ops.AddExtraInput()]
    plain = _train(ops.Sequential(*copy.deepcopy(basics), _linear_of(1)), 1, recipe)
    got = _train(ops.Sequential(cls(copy.deepcopy(basics)), _linear_of(1)), 1, recipe)
    if cls is ComposedForward:
        _assert_same(got, plain)
    for one, other in zip(got, plain, strict=True):
        # The engine adds the gradient of the extra output within that of the norm, and rounds once; apart there are two roundings to bf16.
        torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=4 * 2**-8 * float(other.float().abs().max()))


def _linear_of(seed: int) -> ops.BasicLinear:
    torch.manual_seed(seed)
    return _linear()


@recipes
@pytest.mark.parametrize("to_caller", [False, True])
@pytest.mark.parametrize("cls", COMPOSED)
def test_a_channel_may_begin_and_end_inside_a_fused_operation(cls: Any, to_caller: bool, recipe: Any) -> None:
    torch.manual_seed(0)
    begin, end = ops.MakeExtraOutput(), ops.AddExtraInput()
    begin.set_extra_output_channel(0, "residual", output_to_caller=to_caller)
    end.set_extra_input_channel(0, "residual")
    basics = [begin, ops.Identity(), ops.ConstantScale(0.5), end]
    wanted = _train(ops.Sequential(*copy.deepcopy(basics), _linear_of(1)), 0, recipe)
    fused = cls(copy.deepcopy(basics))
    fused.inner = (0, 3)
    _assert_same(_train(ops.Sequential(fused, _linear_of(1)), 0, recipe), wanted)


def test_a_channel_inside_is_seen_in_inference_too() -> None:
    begin, end = ops.MakeExtraOutput(), ops.AddExtraInput()
    begin.set_extra_output_channel(0, "residual", output_to_caller=False)
    end.set_extra_input_channel(0, "residual")
    fused = ComposedForward([begin, ops.ConstantScale(0.5), end])
    fused.inner = (0, 2)
    x = torch.randn(4, 8)
    with torch.no_grad():
        assert torch.equal(ops.Sequential(fused)(x), x + x * 0.5)


@pytest.mark.parametrize("cls", COMPOSED)
def test_dropout_draws_the_same_inside_a_fused_operation(cls: Any) -> None:
    basics = [ops.Dropout(0.5), ops.GELU()]
    wanted = _train(ops.Sequential(*basics), 0, None)
    assert not torch.equal(wanted[0], _train(ops.Sequential(ops.GELU()), 0, None)[0])
    _assert_same(_train(ops.Sequential(cls(basics)), 0, None), wanted)


@recipes
def test_an_operation_inside_quantizes_where_it_is_given_a_quantizer(recipe: Any) -> None:
    seen: list[bool] = []

    class Looks(ops.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, *, next_op_input_quantizer, **_: Any):
            activation, linear = self.basic_ops
            options: dict[str, Any] = {"prev_op_grad_output_quantizer": None, "next_op_input_quantizer": None}
            hidden = activation.op_forward(basic_op_ctxs[0], input_, **options)
            seen.append(type(hidden) is torch.Tensor)
            return linear.op_forward(basic_op_ctxs[1], hidden, **options), [(), ()]

    torch.manual_seed(0)
    basics = [ops.GELU(), _linear()]
    _train(ops.Sequential(Looks(basics)), 0, recipe)
    assert seen == [True, True]


def test_code_of_the_user_is_called_at_every_call() -> None:
    calls: list[str] = []

    class Counts(ComposedForward):
        def fuser_forward(self, *args: Any, **kwargs: Any):
            calls.append("forward")
            return super().fuser_forward(*args, **kwargs)

    model = ops.Sequential(Counts([ops.BasicLinear(WIDTH, WIDTH), ops.Bias(WIDTH)]))
    for _ in range(5):  # a pass of the engine's own would be replayed from the third on
        model(torch.ones(ROWS, WIDTH, requires_grad=True)).sum().backward()
    assert calls == ["forward"] * 5


class OwnProduct(ops.FusedOperation):
    """Computes the forward of a linear layer in torch, and leaves what its own backward needs."""

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **_: Any):
        linear, bias = self.basic_ops
        linear.save_for_backward(basic_op_ctxs[0], x=input_)
        x = ops.maybe_dequantize(input_, linear.weight.dtype)
        return torch.nn.functional.linear(x, linear.weight.detach(), bias.bias.detach()), [(), ()]


@recipes
def test_a_forward_of_the_users_own_leaves_by_name_what_our_backward_needs(recipe: Any) -> None:
    torch.manual_seed(0)
    basics = [_linear(), ops.Bias(WIDTH, dtype=torch.bfloat16)]
    wanted = _train(ops.Sequential(*copy.deepcopy(basics)), 0, recipe)
    got = _train(ops.Sequential(OwnProduct(copy.deepcopy(basics))), 0, recipe)
    # The gradients are the engine's, of the same quantized operands; the outputs (0 and 2) are the user's own.
    _assert_same([t for i, t in enumerate(got) if i not in (0, 2)], [t for i, t in enumerate(wanted) if i not in (0, 2)])


class OwnElementwise(ops.FusedOperation):
    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **_: Any):
        norm, act = self.basic_ops
        rsigma = torch.rsqrt(input_.float().square().mean(-1) + norm.eps)
        norm.save_for_backward(basic_op_ctxs[0], x=input_, rsigma=rsigma)
        normed = (input_ * rsigma[:, None] * norm.weight.detach()).to(input_.dtype)
        act.save_for_backward(basic_op_ctxs[1], x=normed)
        return torch.relu(normed), [(), ()]


def test_norms_and_activations_take_what_is_left_by_name() -> None:
    x = torch.randn(ROWS, WIDTH)
    dy = torch.randn(ROWS, WIDTH)
    grads = []
    for cls in (OwnElementwise, None):
        norm = ops.RMSNorm(WIDTH)
        leaf = x.clone().requires_grad_()
        model = ops.Sequential(cls([norm, ops.ReLU()])) if cls else ops.Sequential(norm, ops.ReLU())
        model(leaf).backward(dy)
        grads += [(leaf.grad, norm.weight.grad)]
    for one, other in zip(*grads, strict=True):
        # rsigma in another order of its sum over WIDTH columns; the gradient of the weight sums ROWS of them.
        torch.testing.assert_close(one, other, rtol=0, atol=WIDTH * torch.finfo(torch.float32).eps * float(other.abs().max()))


class OwnGradient(ops.FusedOperation):
    """Computes the backward of a linear layer in torch, of what its own forward left."""

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        saved = self.basic_ops[0].saved_for_backward(basic_op_ctxs[0])
        assert set(saved) == {"x", "weight"}
        x, weight = (ops.maybe_dequantize(tensor, torch.float32) for tensor in (saved["x"], saved["weight"]))
        dy = grad_output.float()
        return (dy @ weight).to(grad_output.dtype), [[(dy.T @ x).to(grad_output.dtype)], [grad_output.sum(0)]], [(), ()]


def test_a_backward_of_the_users_own_reads_by_name_what_our_forward_left() -> None:
    torch.manual_seed(0)
    basics = [_linear(), ops.Bias(WIDTH, dtype=torch.bfloat16)]
    wanted = _train(ops.Sequential(*copy.deepcopy(basics)), 0, None)
    for one, other in zip(_train(ops.Sequential(OwnGradient(copy.deepcopy(basics))), 0, None), wanted, strict=True):
        # fp32 sums of at most WIDTH products in another order, rounded once to bf16; the two steps' gradients are added in bf16.
        torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=2 * 2**-8 * float(other.float().abs().max()))
    saved_for_fp8 = _train(ops.Sequential(OwnGradient(copy.deepcopy(basics))), 0, RECIPES["mxfp8"])
    for one, other in zip(saved_for_fp8, wanted, strict=True):
        # Operands of 4 significant bits: a relative error of 2^-4 each at most, far less in a sum.
        torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=2**-3 * float(other.float().abs().max()))


class OwnBoth(OwnProduct):
    """Both passes in torch, with tensors of their own in the context."""

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **_: Any):
        linear, bias = self.basic_ops
        basic_op_ctxs[0].save_for_backward(input_, None, linear.weight)
        return torch.nn.functional.linear(input_, linear.weight.detach(), bias.bias.detach()), [(), ()]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        x, nothing, weight = basic_op_ctxs[0].saved_tensors
        assert nothing is None
        return grad_output @ weight, [[grad_output.T @ x], [grad_output.sum(0)]], [(), ()]


def test_a_joint_operation_saves_tensors_of_its_own_for_operations_of_ours() -> None:
    linear, bias = ops.BasicLinear(WIDTH, WIDTH), ops.Bias(WIDTH)
    x, dy = torch.randn(ROWS, WIDTH, requires_grad=True), torch.randn(ROWS, WIDTH)
    y = ops.Sequential(OwnBoth([linear, bias]))(x)
    y.backward(dy, retain_graph=True)
    assert x.grad is not None and torch.equal(x.grad, dy @ linear.weight)
    y.backward(dy)
    assert linear.weight.grad is not None and torch.equal(linear.weight.grad, 2 * (dy.T @ x))


def _first_call(fused: Any) -> None:
    ops.Sequential(fused)(torch.randn(ROWS, WIDTH, requires_grad=True))


class LeavesNothing(ops.FusedOperation):
    left: Any = staticmethod(lambda op, ctx, x: None)

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **_: Any):
        self.left(self.basic_ops[0], basic_op_ctxs[0], input_)
        return input_, [()]


def test_a_forward_that_leaves_nothing_is_told_what_to_leave() -> None:
    fused = LeavesNothing([ops.BasicLinear(WIDTH, WIDTH)])
    of = r"the context of basic_ops\[0\] \(BasicLinear\) after LeavesNothing.fuser_forward"
    do = r"call basic_ops\[0\].save_for_backward\(ctx, x=...\)"
    with pytest.raises(ArgumentError, match=rf"^{of}: expected what its own backward needs \(x, weight\), got nothing; {do}\.$"):
        _first_call(fused)
    for saved in ((), (None, torch.ones(2)), 3 * (torch.ones(2),)):
        fused.left = lambda op, ctx, x, saved=saved: ctx.save_for_backward(*saved)
        with pytest.raises(ArgumentError, match="got tensors without names; "):
            _first_call(fused)


class AsNvidias(ops.FusedOperation):
    """A forward that saves as the basic operations of NVIDIA's package do, by order."""

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **_: Any):
        norm, linear, _ = self.basic_ops
        rsigma = input_.float().square().mean(1).add(norm.eps).rsqrt()
        y = (input_ * rsigma[:, None] * norm.weight.detach()).to(input_.dtype)
        basic_op_ctxs[0].save_for_backward(input_, rsigma)
        basic_op_ctxs[1].save_for_backward(y, linear.weight)
        basic_op_ctxs[1].dtype = input_.dtype
        z = torch.nn.functional.linear(y, linear.weight.detach())
        basic_op_ctxs[2].save_for_backward(z)
        return torch.relu(z), [(), (), ()]


class ReadsDtype(ops.FusedOperation):
    """A backward that asks the context as it asks NVIDIA's."""

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        ctx = basic_op_ctxs[0]
        x, weight = ctx.saved_tensors
        assert ctx.dtype is grad_output.dtype and ctx.input_requires_grad and ctx.weight_requires_grad
        return (grad_output @ weight).to(ctx.dtype), [[grad_output.T @ x]], [()]


@pytest.mark.parametrize("placed", [lambda norm, linear, relu: [AsNvidias([norm, linear, relu])], lambda n, linear, r: [n, ReadsDtype([linear]), r]])
def test_passes_written_for_nvidias_package_fit_the_others_of_ours(placed: Any) -> None:
    torch.manual_seed(0)
    basics = [ops.RMSNorm(WIDTH), ops.BasicLinear(WIDTH, WIDTH), ops.ReLU()]
    x, dy = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    found = []
    for model in (ops.Sequential(*copy.deepcopy(basics)), ops.Sequential(*placed(*copy.deepcopy(basics)))):
        leaf = x.clone().requires_grad_()
        model(leaf).backward(dy)
        found.append([leaf.grad, *(parameter.grad for parameter in model.parameters())])
    for one, other in zip(*found, strict=True):
        # fp32 sums of at most WIDTH products, in another order.
        torch.testing.assert_close(one, other, rtol=0, atol=WIDTH * 2**-23 * float(one.abs().max()))


def test_an_operation_that_needs_nothing_may_be_left_alone() -> None:
    fused = LeavesNothing([ops.ConstantScale(2.0)])
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    ops.Sequential(fused)(x).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full_like(x, 2.0))


@pytest.mark.parametrize("names", [(), ("y",), ("x", "y")])
def test_other_names_are_refused(names: tuple[str, ...]) -> None:
    fused = LeavesNothing([ops.BasicLinear(WIDTH, WIDTH)])
    fused.left = lambda op, ctx, x: op.save_for_backward(ctx, **dict.fromkeys(names, x))
    with pytest.raises(ArgumentError, match=r"^BasicLinear.save_for_backward: expected tensors by the names x, got .*; give these\.$"):
        _first_call(fused)


def test_a_context_of_no_fuser_is_refused() -> None:
    linear = ops.BasicLinear(WIDTH, WIDTH)
    with pytest.raises(
        ArgumentError, match=r"^BasicLinear.save_for_backward: expected a context that a fuser gave, of an operation of ours, got another; "
    ):
        linear.save_for_backward(ops.OperationContext(), x=torch.randn(2, WIDTH))
    with pytest.raises(ArgumentError, match=r"BasicLinear.saved_for_backward: expected .*, got a context without; "):
        linear.saved_for_backward(ops.OperationContext())


class Miscounts(ComposedForward):
    def fuser_forward(self, *args: Any, **kwargs: Any):
        return super().fuser_forward(*args, **kwargs)[0], [()]


def test_missing_extra_outputs_are_named() -> None:
    with pytest.raises(ArgumentError, match=r"^what Miscounts.fuser_forward returns for MakeExtra\(.*\): expected 1 extra outputs, got 0; "):
        _first_call(Miscounts([ops.MakeExtraOutput()]))


def test_a_missing_extra_input_is_named() -> None:
    class Forgets(ops.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **_: Any):
            op: Any = self.basic_ops[0]
            return op.op_forward(basic_op_ctxs[0], input_, prev_op_grad_output_quantizer=None, next_op_input_quantizer=None), [()]

    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with pytest.raises(ArgumentError, match=r"^AddExtra\(.*\) in AddExtraInput.fuser_forward: expected 1 extra inputs, got 0; "):
        ops.Sequential(Forgets([ops.AddExtraInput()]))(x, x)


def test_what_was_saved_is_let_go_after_backward() -> None:
    kept: list[Any] = []

    class Watches(OwnBoth):
        def fuser_backward(self, basic_op_ctxs, *args: Any, **kwargs: Any):
            kept.extend(basic_op_ctxs)
            return super().fuser_backward(basic_op_ctxs, *args, **kwargs)

    y = ops.Sequential(Watches([ops.BasicLinear(WIDTH, WIDTH), ops.Bias(WIDTH)]))(torch.randn(ROWS, WIDTH, requires_grad=True))
    y.sum().backward()
    assert len(kept) == 2
    assert all(ctx.saved_tensors is None and ctx._tensors is None for ctx in kept)
