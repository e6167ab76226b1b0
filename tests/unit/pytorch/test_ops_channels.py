"""Channels: extra outputs that go to extra inputs of later operations of the same fuser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from quantization_error import RECIPES
from torch import Tensor

import fusible
from fusible import autocast
from fusible.errors import ArgumentError
from fusible.pytorch import ops
from fusible.pytorch.ops import BasicOperation


def gives(channel: str | None = "a", *, to_caller: bool = False) -> ops.MakeExtraOutput:
    op = ops.MakeExtraOutput()
    op.set_extra_output_channel(0, channel, output_to_caller=to_caller)
    return op


def takes(channel: str | None = "a") -> ops.AddExtraInput:
    op = ops.AddExtraInput()
    op.set_extra_input_channel(0, channel)
    return op


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).requires_grad_()


def test_a_residual_goes_by_a_channel() -> None:
    x = leaf(5, 8)
    y = ops.Sequential(gives(), ops.ConstantScale(3.0), takes())(x)
    y.backward(torch.ones(5, 8))
    torch.testing.assert_close(y, 4 * x)
    torch.testing.assert_close(x.grad, torch.full((5, 8), 4.0))


def test_a_channel_has_any_number_of_consumers_and_the_caller() -> None:
    x = leaf(5, 8)
    y, extra = ops.Sequential(gives(to_caller=True), ops.ConstantScale(3.0), takes(), ops.ConstantScale(2.0), takes(), takes())(x)
    torch.testing.assert_close(y, 10 * x)
    assert torch.equal(extra, x)
    torch.autograd.backward([y, extra], [torch.ones(5, 8), torch.full((5, 8), 0.5)])
    torch.testing.assert_close(x.grad, torch.full((5, 8), 10.5))


class Multiples(BasicOperation):
    """``x``, with twice ``x`` and three times ``x`` as extra outputs."""

    num_extra_outputs = 2

    def fuser_forward(self, basic_op_ctxs: Any, input_: Tensor, **_: Any) -> Any:
        return input_, [(2 * input_, 3 * input_)]

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Tensor, *, basic_op_grad_extra_outputs: Any) -> Any:
        ((twice, thrice),) = basic_op_grad_extra_outputs
        return grad_output + 2 * twice + 3 * thrice, [()], [()]


@pytest.mark.parametrize("index", [0, 1])
def test_one_extra_output_goes_by_a_channel_and_another_to_the_caller(index: int) -> None:
    model = ops.Sequential(Multiples().set_extra_output_channel(index, "a", output_to_caller=False), takes())
    x = leaf(5, 8)
    y, extra = model(x)
    y.sum().backward()
    torch.testing.assert_close(y, (3 + index) * x)
    torch.testing.assert_close(extra, (3 - index) * x)
    torch.testing.assert_close(x.grad, torch.full((5, 8), 3.0 + index))


def test_channels_cross_and_pass_beside_extra_tensors_of_the_caller() -> None:
    x, extra = leaf(5, 8), leaf(5, 8).detach().mul(0.3).requires_grad_()
    model = ops.Sequential(gives("a"), ops.ConstantScale(2.0), gives("b"), takes("a"), ops.AddExtraInput(), takes("b"), ops.MakeExtraOutput())
    y, out = model(x, extra)
    torch.testing.assert_close(y, 5 * x + extra)
    assert torch.equal(y, out)
    (y.sum() + out.sum()).backward()
    torch.testing.assert_close(x.grad, torch.full((5, 8), 10.0))
    torch.testing.assert_close(extra.grad, torch.full((5, 8), 2.0))


def test_a_channel_that_nobody_reads_is_dropped() -> None:
    x = leaf(5, 8)
    y = ops.Sequential(gives(), ops.ConstantScale(3.0))(x)
    assert isinstance(y, Tensor)
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.full((5, 8), 3.0))


def test_none_gives_a_tensor_back_to_the_caller() -> None:
    first, last = gives(), takes()
    model, x = ops.Sequential(first, ops.ConstantScale(3.0), last), leaf(5, 8)
    assert isinstance(model(x), Tensor)
    last.set_extra_input_channel(0, None)
    for to_caller in (True, False):  # without a channel it is the caller's, whatever else is said
        first.set_extra_output_channel(0, None, output_to_caller=to_caller)
        y, extra = ops.Sequential(first, ops.ConstantScale(3.0), last)(x, 10 * x)
        torch.testing.assert_close(y, 13 * x)
        assert torch.equal(extra, x)


def test_alone_an_operation_has_its_channels_still() -> None:
    """A call of one operation does not settle them: it may go into a Sequential afterwards."""
    op, x = ops.AddExtraInput(), leaf(5, 8)
    torch.testing.assert_close(op(x, x), 2 * x)
    op.set_extra_input_channel(0, "a")
    torch.testing.assert_close(ops.Sequential(gives(), ops.ConstantScale(2.0), op)(x), 3 * x)
    with pytest.raises(ArgumentError, match="the channel 'a' that AddExtraInput reads: expected an earlier operation that gives it, got none"):
        op(x)


@pytest.mark.parametrize("recipe", [None, *RECIPES.values()], ids=["none", *RECIPES])
def test_channels_under_every_recipe(recipe: object) -> None:
    """What goes around the layers is not quantized."""
    torch.manual_seed(1)
    model = ops.Sequential(gives(), ops.RMSNorm(64), ops.Linear(64, 128), ops.SwiGLU(), ops.Linear(64, 64), takes())
    with torch.no_grad():
        for parameter in model[-2].parameters():  # type: ignore[union-attr]
            parameter.zero_()
    for _ in range(3):
        x = torch.randn(32, 64, requires_grad=True)
        with autocast(enabled=recipe is not None, recipe=recipe):  # type: ignore[arg-type]
            y = model(x)
        y.backward(torch.full_like(y, 0.5))
        assert torch.equal(y, x) and torch.equal(x.grad, torch.full_like(x, 0.5))  # type: ignore[arg-type]


class Turn(BasicOperation):
    """Gives an extra output for an extra input."""

    num_extra_inputs = num_extra_outputs = 1


def turn() -> Turn:
    op = Turn()
    op.set_extra_input_channel(0, "a")
    op.set_extra_output_channel(0, "a", output_to_caller=False)
    return op


WRONG: list[tuple[Callable[[], list[BasicOperation]], str]] = [
    (lambda: [takes()], "the channel 'a' that AddExtraInput reads: expected an earlier operation that gives it, got none"),
    (lambda: [takes(), gives()], "the channel 'a' that AddExtraInput reads.*: expected .*.*got a later one"),
    (lambda: [gives(), gives(), takes()], "the channel 'a'.*: expected .*one producer.*got several"),
    (lambda: [gives("b"), takes("a")], "the channel 'a' that AddExtraInput reads.*: expected .*.*got none"),
    (lambda: [turn()], "the channel 'a' that Turn reads: expected an earlier operation that gives it, got"),
]


@pytest.mark.parametrize(("make", "message"), WRONG, ids=range(len(WRONG)))
def test_channels_that_do_not_match_are_refused(make: Callable[[], list[BasicOperation]], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ops.Sequential(*make())(leaf(2, 4))
    with pytest.raises(ArgumentError, match=message):
        ops.OperationFuser(make())


def test_a_channel_does_not_reach_another_fuser() -> None:
    model = ops.Sequential(gives(), torch.nn.ReLU(), takes())
    with pytest.raises(ArgumentError, match="the channel 'a' that .*: expected an earlier operation that gives it"):
        model(leaf(2, 4))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: ops.AddExtraInput().set_extra_input_channel(1, "a"),
            "AddExtraInput.set_extra_input_channel: expected an index below 1, the number of extra inputs",
        ),
        (lambda: ops.AddExtraInput().set_extra_input_channel(-1, "a"), "an index below 1"),
        (
            lambda: ops.MakeExtraOutput().set_extra_output_channel(1, "a"),
            "MakeExtraOutput.set_extra_output_channel: expected an index below 1, the number of extra outputs",
        ),
        (lambda: ops.GELU().set_extra_output_channel(0, "a"), "an index below 0"),
        (lambda: ops.AddExtraInput().set_extra_input_channel(0, ""), "AddExtraInput.set_extra_input_channel: expected a name or None, got ''"),
        (lambda: ops.AddExtraInput().set_extra_input_channel(0, 3), "AddExtraInput.set_extra_input_channel: expected a name or None, got 3"),  # type: ignore[arg-type]
    ],
)
def test_a_channel_that_cannot_be_bound_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()


@pytest.mark.parametrize("count", [0, 2])
def test_another_number_of_extra_inputs_is_refused(count: int) -> None:
    x = leaf(2, 4)
    for call in (ops.AddExtraInput(), ops.Sequential(ops.Identity(), ops.AddExtraInput())):
        with pytest.raises(ArgumentError, match=f"a call of .*: expected 1 extra inputs, got {count}"):
            call(x, *[x] * count)


def test_an_extra_input_that_alone_is_differentiated_has_its_gradient() -> None:
    """Wherever it joins: backward comes by every operation from there on."""
    for before in ([], [ops.GELU()]):
        extra, x = leaf(3, 4), torch.randn(3, 4)
        model = ops.Sequential(*before, ops.AddExtraInput(), ops.ConstantScale(3.0))
        model(x, extra).sum().backward()
        assert torch.equal(extra.grad, torch.full((3, 4), 3.0))  # type: ignore[arg-type]
    extra = leaf(3, 4)
    ops.Sequential(ops.AddExtraInput())(torch.randn(3, 4), extra).sum().backward()
    assert torch.equal(extra.grad, torch.ones(3, 4))  # type: ignore[arg-type]


def test_the_same_operations_in_other_blocks_are_another_pipeline() -> None:
    give, take, x = gives(), takes(), leaf(3, 4)
    model = fusible.Sequential(give, take)
    assert torch.equal(model(x), 2 * x)
    setattr(model, "0", ops.Sequential(give))
    with pytest.raises(ArgumentError, match="that AddExtraInput reads: expected .*, got one in a block that does not hold it"):
        model(x)
    setattr(model, "0", give)
    assert torch.equal(model(x), 2 * x)
