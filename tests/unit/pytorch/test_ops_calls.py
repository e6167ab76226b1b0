"""Calling operations: plans are kept, what nobody needs is not computed, and the ways of torch (checkpointing, copies, threads) hold."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from quantization_error import RECIPES
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fusible import autocast, quantized_model_init, tex
from fusible.errors import FusibleError
from fusible.pytorch import ops
from fusible.quantized import (
    CustomRecipe,
    DelayedScaling,
    Float8CurrentScaling,
    Float8CurrentScalingQuantizer,
    Format,
    MXFP8Quantizer,
    QuantizedTensor,
    Recipe,
)
from fusible.tex import DType

ALL: dict[str, Recipe | None] = {"none": None, **RECIPES}


def under(recipe: Recipe | None) -> autocast:
    return autocast(enabled=recipe is not None, recipe=recipe)


def mlp(width: int = 32, **options: Any) -> ops.Sequential:
    torch.manual_seed(1)
    return ops.Sequential(ops.LayerNorm(width, **options), ops.Linear(width, 64, **options), ops.GELU(), ops.Linear(64, width, **options))


def batch(rows: int = 32, width: int = 32, seed: int = 2) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module, x: Tensor, recipe: Recipe | None) -> list[Tensor]:
    """y and all gradients."""
    x = x.detach().requires_grad_()
    model.zero_grad()
    with under(recipe):
        y = model(x)
    y.square().sum().backward()
    return [y.detach(), *(leaf.grad.clone() for leaf in (x, *model.parameters()) if leaf.grad is not None)]


@pytest.mark.parametrize("name", ALL)
def test_an_operation_alone_is_planned_once(name: str) -> None:
    for op in (ops.Linear(32, 32), ops.BasicLinear(32, 32), ops.GELU(), ops.Quantize(), ops.AddExtraInput()):
        for _ in range(3):
            with under(ALL[name]):
                op(batch().requires_grad_(), *[batch()] * (next(op.basic_operations()).num_extra_inputs))
        (fuser,) = op._runners.values()
        assert fuser.pipeline.plans_built == 1


def test_other_inputs_and_modes_have_plans_of_their_own() -> None:
    model = mlp()
    (fuser,) = model._arranged()
    for count, call in enumerate(
        (
            lambda: model(batch().requires_grad_()),
            lambda: model(batch(7)),  # of an input without gradient
            lambda: model(batch().bfloat16()),
            lambda: model.eval()(batch()),
        ),
        1,
    ):
        call()
        call()
        assert fuser.pipeline.plans_built == count


@pytest.mark.parametrize("name", ALL)
def test_a_first_layer_whose_input_needs_no_gradient_has_no_dgrad(name: str) -> None:
    counts = []
    for needs in (True, False):
        model, x = ops.Sequential(ops.Linear(32, 64), ops.ReLU(), ops.Linear(64, 32)), batch().requires_grad_(needs)
        with under(ALL[name]):
            y = model(x)
        with tex.record() as calls:
            y.sum().backward()
        counts.append(sum("gemm" in call.function for call in calls))
        assert all(p.grad is not None for p in model.parameters())
    assert counts == [4, 3]


def test_frozen_weights_have_no_wgrad() -> None:
    model, x = ops.Sequential(ops.Linear(32, 64), ops.Linear(64, 32)), batch().requires_grad_()
    model[0].weight.requires_grad_(False)
    y = model(x)
    with tex.record() as calls:
        y.sum().backward()
    assert sum("gemm" in call.function for call in calls) == 3 and model[0].weight.grad is None


@pytest.mark.parametrize("name", ALL)
def test_modules_on_the_meta_device_are_made_and_train(name: str) -> None:
    model = mlp(device="meta")
    assert all(p.is_meta for p in model.parameters())
    first = step(model, batch(), ALL[name])
    assert len(first) == 2 + 6 and not any(p.is_meta for p in model.parameters())
    weight = model[1].weight
    assert weight.grad is not None and weight is model[1].basic_ops[0].weight and 0 < weight.abs().max() <= 32**-0.5
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    assert not torch.equal(step(model, batch(), ALL[name])[0], first[0])


OPTIONS: list[tuple[str, Recipe, Recipe]] = [
    ("format", Float8CurrentScaling(fp8_format=Format.E4M3), Float8CurrentScaling(fp8_format=Format.E5M2)),
    ("powers of 2", Float8CurrentScaling(), Float8CurrentScaling(use_power_2_scales=True)),
    ("delayed format", DelayedScaling(fp8_format=Format.E4M3), DelayedScaling(fp8_format=Format.HYBRID)),
    ("delayed margin", DelayedScaling(), DelayedScaling(margin=3)),
]


@pytest.mark.parametrize(("one", "other"), [pytest.param(a, b, id=name) for name, a, b in OPTIONS])
def test_another_option_of_the_same_recipe_takes_effect(one: Recipe, other: Recipe) -> None:
    """As in a model that has seen nothing but it, or for delayed scaling the same history."""
    model, twin = mlp(), mlp()
    for _ in range(2):
        before = step(model, batch(), one)
        step(twin, batch(), one if isinstance(one, DelayedScaling) else other)
    if isinstance(other, DelayedScaling):
        after = step(model, batch(), other)
        assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
        return
    after = step(model, batch(), other)
    assert all(torch.equal(a, b) for a, b in zip(after, step(twin, batch(), other), strict=True))
    assert not torch.equal(before[0], after[0])


def _mxfp8(role: Any) -> Any:
    return MXFP8Quantizer(DType.kFloat8E4M3)


def _current(role: Any) -> Any:
    return Float8CurrentScalingQuantizer(DType.kFloat8E5M2)


def test_another_factory_takes_effect_and_gives_what_the_recipe_of_that_name_gives() -> None:
    model = mlp()
    coarse = step(model, batch(), CustomRecipe(qfactory=_current))
    fine = step(model, batch(), CustomRecipe(qfactory=_mxfp8))
    assert not torch.equal(coarse[0], fine[0])
    assert all(torch.equal(a, b) for a, b in zip(fine, step(mlp(), batch(), RECIPES["mxfp8"]), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(coarse, step(mlp(), batch(), Float8CurrentScaling(fp8_format=Format.E5M2)), strict=True))


@pytest.mark.parametrize("name", [name for name in ALL if name != "nvfp4"])
def test_a_module_at_two_places_gets_the_sum_of_its_gradients(name: str) -> None:
    torch.manual_seed(1)
    shared = ops.Linear(32, 32)
    twice = ops.Sequential(shared, ops.GELU(), shared)
    apart = ops.Sequential(ops.Linear(32, 32), ops.GELU(), ops.Linear(32, 32))
    for layer in (apart[0], apart[2]):
        layer.load_state_dict(shared.state_dict())
    for _ in range(3):
        (y, dx, dweight, dbias), (y2, dx2, *grads) = step(twice, batch(), ALL[name]), step(apart, batch(), ALL[name])
        assert torch.equal(y, y2) and torch.equal(dx, dx2)
        assert torch.equal(dweight, grads[0] + grads[2]) and torch.equal(dbias, grads[1] + grads[3])


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize("name", [name for name in ALL if name != "nvfp4"])
def test_activation_checkpointing_changes_nothing(name: str, reentrant: bool) -> None:
    """The repeated forward sees the very scales of the first one."""
    model, twin = mlp(), mlp()
    for seed in range(4):
        wanted = step(model, (seed + 1) * batch(seed=seed), ALL[name])
        x = ((seed + 1) * batch(seed=seed)).requires_grad_()
        twin.zero_grad()
        with under(ALL[name]):
            y = checkpoint(twin, x, use_reentrant=reentrant)
        assert isinstance(y, Tensor)
        y.square().sum().backward()
        found = [y.detach(), *(leaf.grad for leaf in (x, *twin.parameters()))]
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), f"step {seed}"  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name in ALL if name != "nvfp4"])
def test_a_deep_copy_is_a_model_of_its_own_with_the_same_state(name: str) -> None:
    model = mlp()
    for parameter in model.parameters():
        parameter.data.mul_(1)
    step(model, batch(), ALL[name])
    twin = copy.deepcopy(model)
    assert not {p.data_ptr() for p in model.parameters()} & {p.data_ptr() for p in twin.parameters()}
    with torch.no_grad():
        for parameter in (*model.parameters(), *twin.parameters()):
            parameter.mul_(1)
    wanted = step(model, batch(), ALL[name])
    assert all(torch.equal(a, b) for a, b in zip(step(twin, batch(), ALL[name]), wanted, strict=True))
    with torch.no_grad():
        twin[1].weight.zero_()
    assert torch.equal(step(model, batch(), None)[0], step(mlp(), batch(), None)[0])


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in ("delayed", "nvfp4")])
def test_a_quantized_tensor_passes_from_one_pipeline_to_another(name: str) -> None:
    """As inside of one: it is what the product reads, and its gradient is what the first pipeline's product gets."""
    torch.manual_seed(1)
    first, second = ops.Sequential(ops.Linear(32, 64), ops.Quantize()), ops.Sequential(ops.Quantize(False, True), ops.Linear(64, 32))
    whole = ops.Sequential(*first, *second)
    for _ in range(3):
        wanted = step(whole, batch(), RECIPES[name])
        x = batch().requires_grad_()
        whole.zero_grad()
        with autocast(recipe=RECIPES[name]):
            between = first(x)
            y = second(between)
        y.square().sum().backward()
        assert isinstance(between, QuantizedTensor)
        found = [y, *(leaf.grad for leaf in (x, *whole.parameters()))]
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))  # type: ignore[arg-type]


def test_channels_and_options_are_copied() -> None:
    begin, end = ops.MakeExtraOutput(), ops.AddExtraInput()
    begin.set_extra_output_channel(0, "a", output_to_caller=False)
    end.set_extra_input_channel(0, "a")
    model = ops.Sequential(begin, ops.ConstantScale(2.0), end)
    model(batch())
    twin, x = copy.deepcopy(model), batch()
    assert torch.equal(twin(x), 3 * x)
    twin[0].set_extra_output_channel(0, None)
    assert torch.equal(model(x), 3 * x)
    with pytest.raises(FusibleError, match="the channel 'a' that .*: expected an earlier operation that gives it"):
        ops.Sequential(*twin)(x)


@pytest.mark.parametrize("name", ["none", "current", "mxfp8", "block"])
def test_threads_may_call_one_model(name: str) -> None:
    model, failures = mlp(), []
    results: dict[int, list[Tensor]] = {}
    inputs = [batch(seed=seed) for seed in range(4)]
    wanted = []
    for x in inputs:
        with under(ALL[name]), torch.no_grad():
            wanted.append(model(x))

    def work(place: int) -> None:
        try:
            for _ in range(5):
                leaf = inputs[place].clone().requires_grad_()
                with under(ALL[name]):
                    y = model(leaf)
                dx = torch.autograd.grad(y.square().sum(), leaf)[0]
                results[place] = [y.detach(), dx]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    for place, x in enumerate(inputs):
        torch.testing.assert_close(results[place][0], wanted[place], rtol=1e-5, atol=1e-6)
        assert torch.equal(results[place][1], step(model, x, ALL[name])[1])


def test_each_thread_has_a_recipe_of_its_own() -> None:
    model, x = mlp(), batch()
    plain = model(x)
    found: list[Tensor] = []

    def work() -> None:
        found.append(model(x))

    with autocast(recipe=RECIPES["mxfp8"]):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        quantized = model(x)
    assert torch.equal(found[0], plain) and not torch.equal(quantized, plain)


def test_backward_goes_on_outside_of_autocast_and_several_calls_may_be_in_flight() -> None:
    for name, recipe in RECIPES.items():
        if name == "nvfp4":
            continue
        model, inputs = mlp(), [batch(seed=seed).requires_grad_() for seed in range(3)]
        with autocast(recipe=recipe):
            outputs = [model(x) for x in inputs]
        for y in reversed(outputs):
            y.square().sum().backward()
        single = mlp()
        with autocast(recipe=recipe):
            y = single(batch(seed=0).requires_grad_())
        assert torch.equal(y, outputs[0]) and all(x.grad is not None for x in inputs)


SENTENCE = r"^.+: expected .+, got .+; .+\.$"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.Linear(32, 32)(batch(width=16)), "32 columns"),
        (lambda: ops.Linear(32, 32)(batch().double()), "the parameters of Linear: expected fp64"),
        (lambda: ops.AddExtraInput()(batch(), batch(16)), r"shape \[32, 32\]"),
        (lambda: ops.FusedOperation([]), "at least one basic operation"),
        (lambda: ops.SwiGLU(glu_interleave_size=0)(batch()), "a positive number of columns"),
        (lambda: ops.Reshape((-1, -1))(batch()), "at most one of them -1"),
        (lambda: ops.unregister_fusion(print), "a registered fusion"),  # type: ignore[arg-type]
        (lambda: autocast(recipe=3), "a recipe"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_call_is_answered_in_one_sentence(call: Any, message: str) -> None:
    with pytest.raises(FusibleError, match=message) as caught:
        call()
    assert caught.match(SENTENCE)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_a_shape_in_which_a_weight_cannot_be_held_is_answered_in_one_sentence(name: str) -> None:
    """What is quantized on the way to a product may have any shape; what is held has whole blocks."""
    with autocast(recipe=RECIPES[name]):
        assert ops.Linear(32, 40)(batch(13)).shape == (13, 40)
    with pytest.raises(FusibleError, match="rows and columns in multiples of") as caught, quantized_model_init(recipe=RECIPES[name]):
        ops.Linear(40, 32)
    assert caught.match(SENTENCE)
