"""When the 8-bit copies of parameters are made: once after each change of a weight or of its scale, and not at every call."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fusible
from fusible import autocast
from fusible.nvte import nvte_dtype
from fusible.pytorch import DelayedScaling, Float8CurrentScaling, HighPrecision, Linear, Recipe, Sequential
from fusible.pytorch.engine import weights
from fusible.quantized import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Tensor,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from fusible.tex import DType
from fusible.tex.backends.cpu import fingerprints

RECIPES = [DelayedScaling(), Float8CurrentScaling()]


class Counted:
    """An executor that notes which parameters were quantized."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.name, self.whole, self.in_place = inner, inner.name, inner.whole, inner.in_place
        self.quantized: list[tuple[int, ...]] = []

    def __call__(self, key: Any, program: Any, inputs: Any) -> Any:
        if key[1] == "weights":
            self.quantized.append(key[2])
        return self.inner(key, program, inputs)


def counted() -> tuple[Sequential, Counted]:
    torch.manual_seed(0)
    model = Sequential(Linear(16, 32), Linear(32, 16))
    runner = model._runner()
    runner.executor = Counted(runner.executor)
    return model, runner.executor


def call(model: nn.Module, recipe: Recipe, seed: int = 1) -> torch.Tensor:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    with autocast(recipe=recipe):
        return model(x)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
def test_micro_batches_and_inference_share_one_quantization(recipe: Recipe) -> None:
    """From when the scales have settled: under delayed scaling the first is 1, the second follows from what was seen, and the third, by which that
    one is seen to recur, has the copy for all that follow."""
    model, executor = counted()
    for seed in range(6):
        call(model, recipe, seed).sum().backward()
    with torch.no_grad():
        call(model, recipe)
    assert executor.quantized == [(0, 2)] * (3 if isinstance(recipe, DelayedScaling) else 1)


def test_where_every_forward_is_followed_by_a_step_no_fingerprints_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the first, of which nobody knows yet; and again as soon as a weight recurs."""
    model, executor = counted()
    taken: list[int] = []
    monkeypatch.setattr(weights, "fingerprints", lambda tensors: taken.append(len(tensors)) or fingerprints(tensors))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for forwards in (1, 1, 1, 3, 2):
        for seed in range(forwards):
            call(model, Float8CurrentScaling(), seed).sum().backward()
        optimizer.step()
    # The fourth step's first call takes none, its second finds that the weights recur, its third uses that call's copy. In the fifth the first does.
    assert taken == [2, 2, 2, 2, 2] and executor.quantized == [(0, 2)] * 6


@pytest.mark.parametrize("frozen", [False, True])
def test_without_native_kernels_nothing_vouches_for_a_copy(frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, executor = counted()
    model.requires_grad_(not frozen)
    monkeypatch.setattr(weights, "fingerprints", lambda tensors: None)
    for seed in range(3):
        call(model, Float8CurrentScaling(), seed)
    assert executor.quantized == [(0, 2)] * 3


def _optimizer(model: Sequential) -> None:
    torch.optim.AdamW(model.parameters(), lr=0.1).step()


class _ByData(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(1.5)


def _in_place(model: Sequential) -> None:
    with torch.no_grad():
        model[0].weight.mul_(2)


def _replaced(model: Sequential) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach().clone() + 1)


def _loaded(model: Sequential) -> None:
    model.load_state_dict({name: value + 1 if value.is_floating_point() else value for name, value in model.state_dict().items()})


def _other_storage(model: Sequential) -> None:
    model[0].weight.data = model[0].weight.data + 1


CHANGES: dict[str, tuple[Callable[[Sequential], None], tuple[int, ...]]] = {
    "optimizer": (_optimizer, (0, 2)),
    "optimizer that writes by .data": (lambda model: _ByData(model.parameters()).step(), (0, 2)),
    "in place": (_in_place, (0,)),
    "replaced": (_replaced, (0,)),
    "loaded": (_loaded, (0, 2)),
    "other storage": (_other_storage, (0,)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_has_changed_is_quantized_again(name: str) -> None:
    model, executor = counted()
    recipe = Float8CurrentScaling()
    for seed in range(3):
        call(model, recipe, seed).sum().backward()
    change, expected = CHANGES[name]
    change(model)
    after = call(model, recipe)
    assert executor.quantized == [(0, 2), expected]
    fresh = Sequential(Linear(16, 32), Linear(32, 16))
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(after, call(fresh, recipe))


def test_frozen_weights_outlive_optimizer_steps() -> None:
    model, executor = counted()
    model[0].weight.requires_grad_(False)
    recipe = Float8CurrentScaling()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for seed in range(3):
        call(model, recipe, seed).sum().backward()
        optimizer.step()
    assert executor.quantized == [(0, 2), (2,), (2,)]


def test_weights_of_inference_mode_have_no_version_but_their_bytes() -> None:
    with torch.inference_mode():
        model, executor = counted()
        for seed in range(3):
            call(model, Float8CurrentScaling(), seed)
            call(model, Float8CurrentScaling(), seed)
            model[0].weight.mul_(2)
    assert executor.quantized == [(0, 2), (0,), (0,)]


@pytest.mark.parametrize("deviation", [0.02, 0.005, 1e-4])
def test_a_frozen_weight_is_cast_as_a_trainable_one(deviation: float) -> None:
    """Delayed scaling's first scale is 1, at which small weights lose most of their bits. From the second call on the scale follows from the largest
    weight, in whatever mode; then the error is that of E4M3: half a step of 2^-3 for what is normal, so 2^-4 of each term at most."""
    recipe = DelayedScaling(amax_history_len=4)
    models = []
    for frozen in (False, True):
        torch.manual_seed(0)
        model = Sequential(Linear(64, 64, bias=False))
        nn.init.normal_(model[0].weight, std=deviation)
        model[0].weight.requires_grad_(not frozen)
        models.append(model)
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    found = []
    for model in models:
        for _ in range(4):
            with autocast(recipe=recipe):
                y = model(x.clone().requires_grad_())
            y.sum().backward()
        with torch.no_grad(), autocast(recipe=recipe):
            found.append((y.detach(), model(x)))
    wanted = x.double() @ models[0][0].weight.double().t()
    error = (found[1][0] - wanted).norm() / wanted.norm()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)) and error < 2**-4
    fresh = Sequential(Linear(64, 64, bias=False))
    fresh.load_state_dict(models[1].state_dict())
    with torch.no_grad(), autocast(recipe=recipe):
        assert torch.equal(fresh(x), found[1][1])


def test_the_amax_of_a_weight_is_observed_in_every_iteration() -> None:
    model, _ = counted()
    recipe = DelayedScaling(amax_history_len=4)
    for seed in range(3):
        call(model, recipe, seed).sum().backward()
    state = model._runner().scaling.current
    assert state is not None
    slot = state.forward.slots.index("0.weight")
    largest = model[0].weight.abs().max().item()
    assert sorted(state.forward.amax_history[:, slot].tolist()) == [0.0, largest, largest, largest]


def held(weight: torch.Tensor) -> nn.Parameter:
    quantizer = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, columnwise=False)
    return nn.Parameter(quantizer(weight.detach()), requires_grad=False)


@pytest.mark.parametrize("recipe", [*RECIPES, HighPrecision()], ids=lambda r: type(r).__name__)
def test_a_parameter_that_is_held_in_8_bits_is_taken_as_it_is(recipe: Recipe) -> None:
    model, executor = counted()
    values = {}
    for i, linear in enumerate(model):
        linear.weight = held(linear.weight)
        assert isinstance(linear.weight, Float8Tensor)
        values[f"{i}.weight"] = linear.weight.dequantize()
    with torch.no_grad():
        results = [call(model, recipe) for _ in range(4)]
    assert all(torch.equal(result, results[0]) for result in results) and not executor.quantized
    if isinstance(recipe, DelayedScaling):
        return  # whose first scale is 1, by which plain weights would lose more
    plain = Sequential(Linear(16, 32), Linear(32, 16))
    plain.load_state_dict({**{n: p for n, p in model.state_dict().items() if n not in values and "scaling" not in n}, **values})
    # Of values that E4M3 holds exactly nothing is lost by quantizing them once more: the two differ by the order of the sums alone.
    torch.testing.assert_close(results[0], call(plain, recipe).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recipe", [*RECIPES, HighPrecision()], ids=lambda r: type(r).__name__)
def test_a_weight_that_is_held_by_columns_alone_is_taken_by_rows(recipe: Recipe) -> None:
    """As it may be after a backward: NVIDIA's modules let the rows go then."""
    results = []
    for columns in (False, True):
        model, _ = counted()
        for linear in model:
            linear.weight = held(linear.weight)
            if columns:
                linear.weight.update_usage(rowwise_usage=True, columnwise_usage=True)
                linear.weight.update_usage(rowwise_usage=False)
                assert linear.weight._data is None
        with torch.no_grad():
            results.append(call(model, recipe))
    assert torch.equal(*results)


@pytest.mark.parametrize("recipe", [*RECIPES, HighPrecision()], ids=lambda r: type(r).__name__)
def test_another_parameter_that_is_held_in_8_bits_is_taken_in_the_place_of_one(recipe: Recipe) -> None:
    """What comes of the unit matrix is the weight, but for its own scale and the product of both, which are fp32."""
    layer = Linear(16, 32, bias=False)
    first, second = (held(factor * layer.weight.detach()) for factor in (1, -2))
    for weight in (first, first, second, second, first):
        layer.weight = weight
        with torch.no_grad(), autocast(recipe=recipe):
            torch.testing.assert_close(layer(torch.eye(16)), weight.dequantize().t(), rtol=4 * torch.finfo(torch.float32).eps, atol=0)


def test_copies_go_with_the_parameters_that_they_were_made_of() -> None:
    model, _ = counted()
    with torch.no_grad():
        call(model, Float8CurrentScaling())
    copies = [weakref.ref(copy.tensor.data) for copy in model._runner()._weights._copies.values()]
    assert len(copies) == 2 and all(ref() is not None for ref in copies)
    model.to(torch.bfloat16)
    gc.collect()
    assert not any(ref() is not None for ref in copies)


def test_a_parameter_of_a_class_of_the_users_is_held_in_its_dtype() -> None:
    class Mine(torch.Tensor):
        pass

    for dtype in (torch.float32, torch.bfloat16):
        for parameter in (torch.ones(2, dtype=dtype), nn.Parameter(torch.ones(2, dtype=dtype)), torch.ones(2, dtype=dtype).as_subclass(Mine)):
            assert weights.stored_type(parameter) is weights.stored_key(parameter) is nvte_dtype(dtype)


class Stateful(MXFP8Quantizer):
    """Is equal to itself alone."""

    def _value_key(self) -> None:
        return None


class Named(MXFP8Quantizer):
    """Is equal to those of its class."""


E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2
QUANTIZERS: list[Callable[[], Any]] = [
    lambda: Float8CurrentScalingQuantizer(E4M3),
    lambda: Float8CurrentScalingQuantizer(E5M2),
    lambda: MXFP8Quantizer(E4M3),
    lambda: MXFP8Quantizer(E5M2),
    lambda: MXFP8Quantizer(E4M3, rowwise=False),
    lambda: MXFP8Quantizer(E4M3, columnwise=False),
    lambda: Stateful(E4M3),
    lambda: Named(E4M3),
    lambda: Float8BlockQuantizer(E4M3),
    lambda: Float8BlockQuantizer(E4M3, block_scaling_dim=1),
    lambda: Float8BlockQuantizer(E4M3, force_pow_2_scales=False),
    lambda: NVFP4Quantizer(),
    lambda: NVFP4Quantizer(with_rht=True, with_post_rht_amax=True),
    lambda: NVFP4Quantizer(with_2d_quantization=True),
    lambda: IdentityQuantizer(),
    lambda: HybridQuantizer(rowwise_quantizer=Float8CurrentScalingQuantizer(E4M3), columnwise_quantizer=MXFP8Quantizer(E4M3)),
    lambda: HybridQuantizer(rowwise_quantizer=Float8CurrentScalingQuantizer(E4M3), columnwise_quantizer=MXFP8Quantizer(E5M2)),
]


def test_keys_tell_types_apart_as_the_types_do() -> None:
    x = torch.linspace(-1, 1, 128 * 128).view(128, 128)
    with torch.no_grad():
        parameters = [nn.Parameter(make()(x)) for make in (*QUANTIZERS, *QUANTIZERS)]
    parameters += [nn.Parameter(x), nn.Parameter(x.bfloat16())]
    types = [weights.stored_type(parameter) for parameter in parameters]
    keys = [weights.stored_key(parameter) for parameter in parameters]
    assert keys == [weights.stored_key(parameter) for parameter in parameters] and len({*keys}) == len({*keys, *keys})
    for (one, key), (other, another) in itertools.combinations(zip(types, keys, strict=True), 2):
        assert one == other or key != another, (one, other)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: MXFP8Quantizer(E4M3), lambda q: setattr(q, "optimize_for_gemm", True)),
        (lambda: Float8BlockQuantizer(E4M3), lambda q: setattr(q, "amax_epsilon", 1e-3)),
        (lambda: NVFP4Quantizer(), lambda q: q.rht_matrix.neg_()),
        (lambda: NVFP4Quantizer(), lambda q: setattr(q, "rht_matrix", q.rht_matrix.clone())),
    ],
)
def test_an_option_that_is_changed_makes_another_key(make: Callable[[], Any], change: Callable[[Any], Any]) -> None:
    held = make()(torch.ones(128, 128))
    before = weights.stored_key(held)
    hash(before)
    change(held._quantizer)
    assert weights.stored_key(held) != before
    assert weights._Unchanged(torch.ones(1)) != 3


def test_a_copy_that_is_dropped_makes_another_key() -> None:
    held = MXFP8Quantizer(E4M3)(torch.ones(128, 128))
    type_before, key_before = weights.stored_type(held), weights.stored_key(held)
    held.update_usage(columnwise_usage=False)
    assert weights.stored_type(held) != type_before and weights.stored_key(held) != key_before


def test_gradients_pass_through_weights_held_in_8_bits() -> None:
    model, _ = counted()
    model[1].weight = held(model[1].weight)
    call(model, Float8CurrentScaling()).sum().backward()
    assert model[0].weight.grad is not None and model[0].weight.grad.abs().sum() > 0 and model[1].weight.grad is None


def test_a_weight_in_8_bits_of_a_layer_that_no_recipe_quantizes_keeps_its_scale() -> None:
    with fusible.quantized_model_init(recipe=DelayedScaling()):
        other = Linear(16, 16)
    model = Sequential(Linear(16, 16, high_precision=True), Linear(16, 16))
    model[0].weight = other.weight
    quantizer: Any = other.weight._quantizer
    scale, amax = quantizer.scale.clone(), quantizer.amax.clone()
    for _ in range(2):
        with autocast(recipe=DelayedScaling()):
            model(torch.randn(16, 16)).sum().backward()
    assert torch.equal(quantizer.scale, scale) and torch.equal(quantizer.amax, amax)
