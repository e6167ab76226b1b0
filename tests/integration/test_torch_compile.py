"""``torch.compile(fullgraph=True)`` of pipelines: one graph, no recompilation in a steady loop, and what the model gives without it, bit for bit.

``aot_eager`` traces forward and backward as ``inductor`` does, and then runs torch's own kernels; so everything around our operators is comparable to
the bit. ``inductor`` is used where its memory planning matters.
"""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from compiled_models import (
    DELAYED,
    RECIPES,
    WIDTH,
    block,
    compiled_by,
    fresh_compiler,  # noqa: F401
    needs_compiler,
    operations,
    outside,
    same,
    states,
    tokens,
    train,
    transformer,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusible
from fusible.pytorch.engine import compiled
from fusible.quantized import DelayedScaling, Float8CurrentScaling, HighPrecision, Recipe

# from within inductor
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")


@pytest.mark.parametrize(
    ("make", "name"), [*((block, name) for name in RECIPES), (operations, "none"), (operations, "delayed"), (transformer, "delayed")]
)
def test_a_training_is_that_of_the_model_as_it_is(make: Callable[[], nn.Module], name: str) -> None:
    recipe, model = RECIPES[name], make()
    twin = copy.deepcopy(model)
    call, counter = compiled_by("aot_eager", twin)
    assert same(train(outside(recipe, call), twin), train(outside(recipe, model), model))
    assert counter.frame_count == 1
    mine, theirs = states(twin), states(model)
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@needs_compiler
def test_inductor_runs_the_same_kernels_inside_our_operators() -> None:
    model = operations()
    twin = copy.deepcopy(model)
    call, counter = compiled_by("inductor", twin)
    assert same(train(outside(DELAYED, call), twin), train(outside(DELAYED, model), model))
    assert counter.frame_count == 1


@needs_compiler
def test_memory_that_inductor_uses_again_is_not_what_was_kept_for_backward() -> None:
    model = fusible.Sequential(fusible.Linear(WIDTH, WIDTH, param_dtype=torch.float32), fusible.ReLU())
    twin = copy.deepcopy(model)

    def around(inner: nn.Module, x: Tensor) -> Tensor:
        return ((inner(x * 2) + 1) * 3).relu() * 5

    def batch(step: int) -> Tensor:
        return tokens(step, 4, dtype=torch.float32)

    call, _ = compiled_by("inductor", lambda x: around(twin, x))
    assert same(train(call, twin, batch=batch), train(lambda x: around(model, x), model, batch=batch))


def test_an_autocast_inside_the_compiled_function_holds_for_what_is_called_in_it() -> None:
    model = block()
    twin = copy.deepcopy(model)

    def step(inner: nn.Module, x: Tensor) -> Tensor:
        with fusible.autocast(recipe=DELAYED):
            y = inner(x)
            with fusible.autocast(enabled=False):
                y = y + inner(y)
        return inner(y)

    call, counter = compiled_by("aot_eager", lambda x: step(twin, x))
    assert same(train(call, twin), train(lambda x: step(model, x), model))
    assert counter.frame_count == 1


def test_another_recipe_compiles_anew_and_an_equal_one_does_not() -> None:
    model = block()
    twin = copy.deepcopy(model)
    call, counter = compiled_by("aot_eager", twin)
    recipes = [DelayedScaling(amax_history_len=3), Float8CurrentScaling(), DelayedScaling(amax_history_len=3), HighPrecision("float32")]
    for recipe in recipes:
        x = tokens(0)
        y = outside(recipe, model)(x)
        assert torch.equal(outside(recipe, call)(x), y)
        assert y.dtype is (torch.float32 if recipe == recipes[-1] else torch.bfloat16)
    assert counter.frame_count == 3


def test_modules_of_others_and_hooked_ones_stand_between_pipelines() -> None:
    model = block(nn.Tanh(), nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16), fusible.Linear(WIDTH, WIDTH), block())
    model[6].register_forward_hook(lambda module, args, y: y * 2)
    twin = copy.deepcopy(model)
    call, counter = compiled_by("aot_eager", twin)
    assert same(train(outside(DELAYED, call), twin), train(outside(DELAYED, model), model))
    assert counter.frame_count == 1


def test_evaluation_drops_nothing_and_records_nothing() -> None:
    model = block(fusible.Dropout(0.5))
    twin = copy.deepcopy(model)
    call, counter = compiled_by("aot_eager", twin)
    for mode in (True, False, True, False):
        for each in (model, twin):
            each.train(mode)
        with torch.no_grad():
            torch.manual_seed(2)
            wanted = outside(DELAYED, model)(tokens(0))
            torch.manual_seed(2)
            y = outside(DELAYED, call)(tokens(0))
        assert torch.equal(y, wanted) and not y.requires_grad
    assert counter.frame_count == 2
    assert not compiled._tickets


def test_frozen_parameters_get_no_gradient() -> None:
    model = block()
    for frozen in (model[1].weight, model[3].bias):
        frozen.requires_grad_(False)
    twin = copy.deepcopy(model)
    call, _ = compiled_by("aot_eager", twin)
    for each, run in ((model, model), (twin, call)):
        outside(DELAYED, run)(tokens(0)).float().sum().backward()
        assert each[1].weight.grad is None and each[3].bias.grad is None
    for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        assert (mine.grad is None and theirs.grad is None) or torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]


def test_other_numbers_of_tokens_compile_once_more_and_no_further() -> None:
    model = block()
    twin = copy.deepcopy(model)
    call, counter = compiled_by("aot_eager", twin)

    def batch(step: int) -> Tensor:
        return tokens(step, 2, 5 + 3 * step)

    assert same(train(outside(DELAYED, call), twin, 6, batch), train(outside(DELAYED, model), model, 6, batch))
    assert counter.frame_count == 2


def test_sequences_of_several_lengths_are_told_when_the_program_runs() -> None:
    model = transformer()
    twin = copy.deepcopy(model)
    call, counter = compiled_by("aot_eager", twin)
    results = []
    for run in (model, call):
        torch.manual_seed(3)
        for lengths in ([3, 13], [10, 6], [1, 15]):
            y = run(tokens(0, 16), torch.tensor(lengths, dtype=torch.int32))
            y.float().square().sum().backward()
            results.append(y)
    assert same(results[3:], results[:3])
    assert same([p.grad for p in twin.parameters()], [p.grad for p in model.parameters()])  # type: ignore[misc]
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=needs_compiler)])
def test_activation_checkpoints_repeat_the_forward_with_its_scales_and_its_seed(backend: str) -> None:
    model = block(fusible.Dropout(0.25))
    twin = copy.deepcopy(model)
    call, counter = compiled_by(backend, lambda x: checkpoint(twin, x, use_reentrant=False))
    assert same(train(outside(DELAYED, call), twin), train(outside(DELAYED, model), model))
    assert counter.frame_count == 1
    mine, theirs = states(twin), states(model)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_what_is_kept_lives_as_long_as_the_graph() -> None:
    model = block()
    call, _ = compiled_by("aot_eager", model)
    call(tokens(0))
    gc.collect()
    assert not compiled._tickets
    y = call(tokens(0)).float().sum()
    y.backward(retain_graph=True)
    first = [parameter.grad for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    y.backward()
    assert same(first, [parameter.grad for parameter in model.parameters()])  # type: ignore[arg-type]
    del y
    gc.collect()
    assert not compiled._tickets


def test_two_calls_on_one_input_are_two_calls() -> None:
    model = block(fusible.Dropout(0.5))
    twin = copy.deepcopy(model)
    call, _ = compiled_by("aot_eager", lambda x: twin(x) * twin(x))
    assert same(train(outside(DELAYED, call), twin), train(outside(DELAYED, lambda x: model(x) * model(x)), model))


def test_eager_and_compiled_calls_share_state_and_weights() -> None:
    model = block()
    twin = copy.deepcopy(model)
    call, _ = compiled_by("aot_eager", twin)
    turn = iter(range(100))
    assert same(train(outside(DELAYED, lambda x: (call if next(turn) % 2 else twin)(x)), twin), train(outside(DELAYED, model), model))
    runner = twin.pipeline(0)
    for _ in range(3):  # until the scales have settled, and their copies are kept
        outside(DELAYED, twin)(tokens(0))
    held = dict(runner._weights._copies)
    outside(DELAYED, call)(tokens(0))
    assert held and runner._weights._copies == held


def test_a_model_that_has_changed_is_compiled_anew() -> None:
    model = block()
    call, _ = compiled_by("aot_eager", model)
    call(tokens(0))
    model.append(fusible.Linear(WIDTH, 8))
    assert torch.equal(call(tokens(0)), model(tokens(0)))
    model[1].weight = nn.Parameter(torch.ones_like(model[1].weight))
    assert torch.equal(call(tokens(0)), model(tokens(0)))


def test_copies_are_models_of_their_own() -> None:
    model = block()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            twin[3].bias.add_(1)
        assert torch.equal(compiled_by("aot_eager", twin)[0](tokens(0)), twin(tokens(0)))
        assert not torch.equal(twin(tokens(0)), model(tokens(0)))


def test_weights_that_are_held_in_8_bits_stay_inside() -> None:
    model = fusible.pytorch.quantize_parameters(block())
    call, counter = compiled_by("aot_eager", model)
    with torch.no_grad():
        assert torch.equal(call(tokens(0)), model(tokens(0)))
    x, y = tokens(1).requires_grad_(), tokens(1).requires_grad_()
    call(x).float().square().sum().backward()
    model(y).float().square().sum().backward()
    assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]
    assert counter.frame_count == 2


def test_the_compiler_of_ours_works_inside_that_of_torch() -> None:
    model = block().compile("xla")
    twin = copy.deepcopy(model)
    call, _ = compiled_by("aot_eager", twin)
    assert same(train(outside(DELAYED, call), twin, 2), train(outside(DELAYED, model), model, 2))


@pytest.mark.parametrize("recipe", [None, DELAYED])
def test_the_operators_keep_what_they_promise(recipe: Recipe | None) -> None:
    model = block()
    with fusible.autocast(enabled=recipe is not None, recipe=recipe) as context:
        args = (tokens(0).requires_grad_(), list(model.parameters()), [], None, None, compiled._begin(model._handle, 0), context.key, [True] * 7)
        for check in ("test_schema", "test_faketensor", "test_autograd_registration"):
            torch.library.opcheck(torch.ops.fusible.pipeline_forward, args, test_utils=check)


def test_an_autocast_may_be_traced_before_a_thread_has_entered_any() -> None:
    model = block()
    twin = copy.deepcopy(model)

    def step(inner: nn.Module, x: Tensor) -> Tensor:
        with fusible.autocast(recipe=DELAYED):
            return inner(x)

    call, _ = compiled_by("aot_eager", lambda x: step(twin, x))
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(train, call, twin).result()
    assert same(found, train(lambda x: step(model, x), model))
