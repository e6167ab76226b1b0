"""``GroupedLinear`` among other operations, and what becomes of the weights' gradients: ``main_grad``, ``backward_dw``, checkpoints."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusible
from fusible.pytorch.ops import BasicOperation, GroupedLinear, Sequential
from fusible.pytorch.quantized_init import quantized_model_init
from fusible.quantized import QuantizedTensor

RECIPES = {"none": None, "delayed": fusible.DelayedScaling(), "current": fusible.Float8CurrentScaling(), "mxfp8": fusible.MXFP8BlockScaling()}
SIZES = [torch.tensor(sizes, dtype=torch.int32) for sizes in ((32, 0, 64), (0, 96, 0), (32, 32, 32))]
ROWS, WIDTH, HIDDEN = 96, 32, 64


class ScaledSwiGLU(BasicOperation):
    """``silu(a) * b * scale`` of ``[a, b] = x``, in plain torch."""

    num_extra_inputs = 1

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **rest):
        scales = basic_op_extra_inputs[0][0]
        basic_op_ctxs[0].save_for_backward(input_, scales)
        a, b = input_.chunk(2, -1)
        return F.silu(a) * b * scales[:, None], [()]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        x, scales = (tensor.detach().requires_grad_() for tensor in basic_op_ctxs[0].saved_tensors or ())
        with torch.enable_grad():
            a, b = x.chunk(2, -1)
            y = F.silu(a) * b * scales[:, None]
        dx, dscales = torch.autograd.grad(y, (x, scales), grad_output)
        return dx, [()], [(dscales,)]


class Sizes(BasicOperation):
    """The input, and the sizes of three equal groups of its rows."""

    num_extra_outputs = 1

    def fuser_forward(self, basic_op_ctxs, input_, **rest):
        return input_, [(torch.full((3,), len(input_) // 3),)]

    def fuser_backward(self, basic_op_ctxs, grad_output, **rest):
        return grad_output, [()], [()]


def quantized(recipe: str) -> fusible.autocast:
    return fusible.autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe])


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def linear(in_features: int = WIDTH, out_features: int = HIDDEN, **options: Any) -> GroupedLinear:
    made = GroupedLinear(3, in_features, out_features, **options)
    with torch.no_grad():
        for i, (name, parameter) in enumerate(made.named_parameters()):
            # The first of many and the first rows of one are alike.
            parameter.copy_(random(i, *parameter.shape) / (6 if "weight" in name else 1))
    return made


def experts() -> Sequential:
    return Sequential(linear(WIDTH, 2 * HIDDEN), ScaledSwiGLU(), linear(HIDDEN, WIDTH, scale_bias=True))


def expected_values(model: Sequential, x: Tensor, sizes: Tensor, scales: Tensor) -> Tensor:
    ys = []
    for i, (part, scale) in enumerate(zip(x.double().split(sizes.tolist()), scales.double().split(sizes.tolist()), strict=True)):
        first, second = ({name: getattr(model[at], f"{name}{i}").double() for name in ("weight", "bias")} for at in (0, 2))
        a, b = (part @ first["weight"].T + first["bias"]).chunk(2, -1)
        ys.append(F.silu(a) * b * scale[:, None] @ second["weight"].T + scale[:, None] * second["bias"])
    return torch.cat(ys)


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_around_an_activation_are_the_experts_of_a_mixture(recipe: str) -> None:
    model = experts()
    for step, sizes in enumerate(SIZES):
        x, scales, dy = random(step, ROWS, WIDTH).requires_grad_(), random(step + 50, ROWS).requires_grad_(), random(step + 70, ROWS, WIDTH)
        inputs = [x, scales, *model.parameters()]
        wanted = expected_values(model, x, sizes, scales)
        wanted_grads = torch.autograd.grad(wanted, inputs, dy.double())
        with quantized(recipe):
            y = model(x, sizes, scales, sizes, scales)
        grads = torch.autograd.grad(y, inputs, dy)
        # fp32: sums of at most 96 terms three deep. 8 bits: each of up to six roundings is off by 2^-4 at most, 2^-5 of the norm in the mean.
        relative = 96 * 2.0**-24 * 3 if recipe == "none" else 6 * 2.0**-5
        for got, want in zip((y, *grads), (wanted, *wanted_grads), strict=True):
            assert (got.double() - want).norm() <= relative * want.norm()


def test_sizes_may_come_by_a_channel() -> None:
    model = Sequential(Sizes().set_extra_output_channel(0, "sizes", output_to_caller=False), *experts())
    for i in (1, 3):
        model[i].set_extra_input_channel(0, "sizes")
    x, scales = random(0, ROWS, WIDTH).requires_grad_(), random(1, ROWS)
    y = model(x, scales, scales)
    y.sum().backward()
    z = x.detach().clone().requires_grad_()
    w = experts()(z, SIZES[2], scales, SIZES[2], scales)
    w.sum().backward()
    assert x.grad is not None and z.grad is not None
    assert torch.equal(y, w) and torch.equal(x.grad, z.grad)


@pytest.mark.parametrize("options", [{}, {"single_grouped_weight": True}], ids=["many", "single"])
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_sum_in_main_grad_is_that_of_autograd(recipe: str, delay: bool, options: dict) -> None:
    plain, fused = linear(**options), linear(accumulate_into_main_grad=True, delay_wgrad_compute=delay, **options)
    names = [name for name, _ in fused.named_parameters() if "weight" in name]
    for name in names:
        weight: Any = fused._parameters[name]
        weight.main_grad = torch.full_like(weight, 0.5)
    for step, sizes in enumerate((*SIZES, SIZES[0])):
        for model in (plain, fused):
            with quantized(recipe):
                model(random(step, ROWS, WIDTH), sizes).square().sum().backward()
        if delay:
            fused.backward_dw()
    for name in names:
        mine, theirs = fused._parameters[name], plain._parameters[name]
        assert mine is not None and theirs is not None and mine.grad is None and theirs.grad is not None
        # Both add fp32 products to an fp32 sum; the one within the accumulator, the other after it.
        torch.testing.assert_close(mine.main_grad - 0.5, theirs.grad, rtol=1e-5, atol=1e-5 * theirs.grad.abs().max().item())  # type: ignore[attr-defined]
    assert torch.equal(fused.bias0.grad, plain.bias0.grad)  # type: ignore[arg-type]


def test_one_weight_may_have_a_main_grad_and_another_none() -> None:
    plain: Any = linear()
    fused: Any = linear(accumulate_into_main_grad=True)
    fused.weight1.main_grad = torch.ones_like(fused.weight1)
    for model in (plain, fused):
        model(random(0, ROWS, WIDTH), SIZES[2]).square().sum().backward()
    assert fused.weight1.grad is None and plain.weight1.grad is not None
    torch.testing.assert_close(fused.weight1.main_grad - 1, plain.weight1.grad, rtol=1e-5, atol=1e-5 * plain.weight1.grad.abs().max().item())
    assert torch.equal(fused.weight0.grad, plain.weight0.grad) and torch.equal(fused.weight2.grad, plain.weight2.grad)


@pytest.mark.parametrize("options", [{}, {"single_grouped_weight": True}, {"scale_bias": True}], ids=["many", "single", "scaled"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_delayed_gradients_are_the_direct_ones(recipe: str, options: dict) -> None:
    direct, delayed = linear(**options), linear(delay_wgrad_compute=True, **options)
    called: list[int] = []
    delayed.register_wgrad_accumulation_and_reduce_hooks(lambda: called.append(len(called)))
    assert delayed.need_backward_dw() and not direct.need_backward_dw()
    names = [name for name, _ in delayed.named_parameters() if "weight" in name]
    assert all(getattr(delayed, name).skip_backward_post_hook for name in names)
    for step, sizes in enumerate(SIZES):
        grads = []
        for model in (direct, delayed):
            x = random(step, ROWS, WIDTH).requires_grad_()
            with quantized(recipe):
                model(x, sizes, *([random(9, ROWS)] if "scale_bias" in options else [])).square().sum().backward()
            grads.append(x.grad)
        assert torch.equal(*grads)
    assert all(getattr(delayed, name).grad is None for name in names)
    for _ in SIZES:  # in the order of the backwards
        delayed.backward_dw()
    delayed.backward_dw()  # nothing waits
    assert called == [0, 1, 2]
    for (name, mine), theirs in zip(delayed.named_parameters(), direct.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None and torch.equal(mine.grad, theirs.grad), name


@pytest.mark.parametrize("options", [{}, {"single_grouped_weight": True, "single_grouped_bias": True}], ids=["many", "single"])
@pytest.mark.parametrize("recipe", ["none", "delayed"])
def test_training_goes_on_from_a_checkpoint(recipe: str, options: dict) -> None:
    def train(model: GroupedLinear, steps: range) -> Tensor:
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for step in steps:
            with quantized(recipe):
                y = model(random(step, ROWS, WIDTH), SIZES[step % 3])
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return y

    model = linear(**options)
    train(model, range(3))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = linear(**options)
    other.load_state_dict(torch.load(file, weights_only=True))
    names = ["weight", "bias"] if options else [f"{name}{i}" for name in ("weight", "bias") for i in range(3)]
    assert [name for name in other.state_dict() if not name.startswith(("scaling_state", "_extra_state"))] == names
    assert torch.equal(train(model, range(3, 6)), train(other, range(3, 6)))
    assert torch.equal(train(copy.deepcopy(model), range(6, 8)), train(model, range(6, 8)))


@pytest.mark.parametrize("options", [{}, {"single_grouped_weight": True, "single_grouped_bias": True}], ids=["many", "single"])
def test_parameters_are_drawn_group_by_group(options: dict) -> None:
    class Tracker:
        entered = 0

        def fork(self) -> Any:
            Tracker.entered += 1
            return torch.random.fork_rng()

    def draw(**more: Any) -> list[Tensor]:
        torch.manual_seed(3)
        made = GroupedLinear(3, WIDTH, HIDDEN, dtype=torch.bfloat16, **options, **more)
        if more.get("device") == "meta":
            assert all(parameter.is_meta for parameter in made.parameters())
            torch.manual_seed(3)
            made(torch.zeros(3, WIDTH, dtype=torch.bfloat16), torch.tensor([1, 1, 1]))
        return [parameter.detach().reshape(-1, *parameter.shape[-1:]) for parameter in made.parameters()]

    assert torch.equal(torch.cat(draw()[: 1 if options else 3]), torch.cat(draw(device="meta")[: 1 if options else 3]))
    weights = torch.cat(draw()[: 1 if options else 3]).view(3, HIDDEN, WIDTH)
    torch.manual_seed(3)
    wanted = [torch.nn.init.kaiming_uniform_(torch.empty(HIDDEN, WIDTH, dtype=torch.bfloat16), a=5**0.5) for _ in range(3)]
    assert torch.equal(weights, torch.stack(wanted))
    assert not any(bias.any() for bias in draw()[1 if options else 3 :])
    draw(rng_state_tracker_function=Tracker)
    assert Tracker.entered == 3


def test_delayed_gradients_come_one_backward_after_the_other_and_where_they_are_wanted() -> None:
    delayed, direct = linear(delay_wgrad_compute=True), linear()
    delayed.weight0.requires_grad_(False)
    for step, sizes in enumerate(SIZES):
        delayed(random(step, ROWS, WIDTH), sizes).square().sum().backward()
    for step, sizes in enumerate(SIZES):
        direct(random(step, ROWS, WIDTH), sizes).square().sum().backward()
        delayed.backward_dw()
        assert torch.equal(delayed.weight2.grad, direct.weight2.grad)  # type: ignore[arg-type]
    assert delayed.weight0.grad is None


def test_delayed_gradients_are_not_left_to_a_replay() -> None:
    """What hands something over is run as it stands, however often it comes."""
    model = linear(delay_wgrad_compute=True)
    for _ in range(4):
        model(random(0, ROWS, WIDTH), SIZES[0]).sum().backward()
    assert len(model._deferred) == 4


@pytest.mark.parametrize("made", [linear, experts])
def test_the_plan_names_every_group(made: Callable[[], Any]) -> None:
    model = made()
    runner = model._fuser() if isinstance(model, GroupedLinear) else model._arranged()[0]
    slots = runner.pipeline.state.forward
    assert {"0.x0", "0.x1", "0.x2", "0.weight0", "0.weight1", "0.weight2"} <= set(slots)


HELD: dict[str, Any] = {
    "delayed": RECIPES["delayed"],
    "current": RECIPES["current"],
    "mxfp8": RECIPES["mxfp8"],
    "block": fusible.Float8BlockScaling(),
    "nvfp4": fusible.NVFP4BlockScaling(disable_stochastic_rounding=True),
}


@pytest.mark.parametrize("single", [False, True], ids=["one for each", "one for all"])
@pytest.mark.parametrize("recipe", HELD)
def test_weights_that_are_held_in_8_bits_train(recipe: str, single: bool) -> None:
    """Results and gradients are those of weights in high precision that hold the same values, where these are quantized to the same again."""

    def made() -> Any:
        torch.manual_seed(0)
        return Sequential(GroupedLinear(3, WIDTH, HIDDEN, single_grouped_weight=single))

    def step(model: Any) -> list[Any]:
        x = random(1, ROWS, WIDTH).requires_grad_()
        with fusible.autocast(recipe=HELD[recipe]):
            y = model(x, SIZES[2])
        y.square().sum().backward()
        return [y.detach(), x.grad, *(p.grad for p in model.parameters())]

    with quantized_model_init(recipe=HELD[recipe]):
        model = made()
    plain, file = made(), io.BytesIO()
    held = [p for name, p in model.named_parameters() if "weight" in name]
    assert len(held) == (1 if single else 3) and all(isinstance(p, QuantizedTensor) for p in held)
    with torch.no_grad():
        for p, other in zip(model.parameters(), plain.parameters(), strict=True):
            other.copy_(p)
    found, wanted = step(model), step(plain)
    if recipe not in ("delayed", "current"):  # weights are scaled by what was seen before, or by another rounding of the same largest magnitude
        assert all(map(torch.equal, found, wanted))
    before = [p.dequantize().clone() for p in held]  # type: ignore[operator]
    fusible.FusedAdam(model.parameters(), lr=0.01).step()
    assert not any(torch.equal(p.dequantize(), b) for p, b in zip(held, before, strict=True))  # type: ignore[operator]
    torch.save(model.state_dict(), file)
    file.seek(0)
    with quantized_model_init(recipe=HELD[recipe]):
        other = made()
    other.load_state_dict(torch.load(file, weights_only=True))
    model.zero_grad()
    assert all(map(torch.equal, step(other), step(model)))
    other[0].reset_parameters()
    assert all(type(p) is type(q) for p, q in zip(other.parameters(), model.parameters(), strict=True))
