"""Passes that are repeated, concurrent, or fail: activation checkpointing, threads, a kernel that raises in the middle."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fusible import GELU, DelayedScaling, Dropout, Float8CurrentScaling, LayerNorm, Linear, Recipe, Residual, Sequential, autocast, nvte, tex
from fusible.errors import NotServedError

WIDTH = 8
RECIPES = [
    pytest.param(None, id="none"),
    pytest.param(DelayedScaling(amax_history_len=3), id="delayed"),
    pytest.param(Float8CurrentScaling(), id="current"),
]


@pytest.fixture(autouse=True)
def one_thread_per_kernel() -> Iterator[None]:
    """Kernels that all take every core, called from several threads of several test processes, would spin for minutes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def under(recipe: Recipe | None) -> autocast:
    return autocast(enabled=recipe is not None, recipe=recipe)


def block(dropout: float = 0.0) -> Sequential:
    torch.manual_seed(1)
    return Sequential(Residual(LayerNorm(WIDTH), Linear(WIDTH, 12), GELU(), Dropout(dropout), Linear(12, WIDTH)))


def everything(model: Sequential) -> dict[str, Tensor]:
    """Parameters and scaling state, as they are now."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_activation_checkpointing_changes_nothing(reentrant: bool, recipe: Recipe | None) -> None:
    """Outputs, gradients and scaling state of five steps, with dropout, equal those of a model that saves its activations."""
    plain, repeating = block(0.25), block(0.25)
    generator = torch.Generator().manual_seed(3)
    for step in range(5):
        x = torch.randn(6, WIDTH, generator=generator)
        results = []
        for model, run in ((plain, plain), (repeating, lambda x: checkpoint(repeating, x, use_reentrant=reentrant))):
            torch.manual_seed(step)
            leaf = x.clone().requires_grad_()
            with under(recipe):
                y = run(leaf)
            y.square().sum().backward()
            results.append((y.detach(), leaf.grad, [p.grad for p in model.parameters()]))
            model.zero_grad()
        (y, dx, grads), (y_, dx_, grads_) = results
        assert torch.equal(y, y_) and torch.equal(dx, dx_)
        assert all(torch.equal(a, b) for a, b in zip(grads, grads_, strict=True))
        assert same(everything(plain), everything(repeating))


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_checkpointed_parts_of_one_model(reentrant: bool) -> None:
    """Several parts, each repeated in backward, the last first."""
    recipe = DelayedScaling(amax_history_len=2)
    torch.manual_seed(0)
    parts, twins = [[Sequential(Linear(WIDTH, WIDTH), GELU()) for _ in range(3)] for _ in range(2)]
    for part, twin in zip(parts, twins, strict=True):
        twin.load_state_dict(part.state_dict())
    for _ in range(3):
        x = torch.randn(4, WIDTH)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        with autocast(recipe=recipe):
            y, z = a, b
            for part, twin in zip(parts, twins, strict=True):
                y, z = part(y), checkpoint(twin, z, use_reentrant=reentrant)
        y.sum().backward()
        z.sum().backward()
        assert torch.equal(a.grad, b.grad)
        assert all(same(everything(part), everything(twin)) for part, twin in zip(parts, twins, strict=True))


def test_an_inference_before_backward_loses_no_observation() -> None:
    """Forward, a look at the model without gradients, backward: the scales are those of a model that nobody looked at."""
    model, twin, x = block(), block(), torch.randn(4, WIDTH)
    with autocast(recipe=DelayedScaling(amax_history_len=2)):
        for _ in range(3):
            y, z = model(x), twin(x)
            with torch.no_grad():
                model(x)
            y.sum().backward()
            z.sum().backward()
            assert same(everything(model), everything(twin))


@pytest.mark.parametrize("executor", ["eager", "compiled"])
def test_a_backward_after_a_reset_gives_its_gradients_and_leaves_nothing_behind(executor: str) -> None:
    """The model begins anew at its next call, not in the middle of one."""
    recipe, x = DelayedScaling(amax_history_len=3), torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(4))
    grads = []
    for reset in (False, True):
        model = block()
        call = torch.compile(model, backend="eager") if executor == "compiled" else model
        with autocast(recipe=recipe):
            y = call(x)
            if reset:
                model.reset_scaling_state()
            y.square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
        assert any("scaling" in name for name in everything(model)) is not reset
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_threads_on_two_models(recipe: Recipe | None) -> None:
    """Each thread has its own recipe and pass; both get what they get alone."""
    alone = [_train(block(), i, recipe if i == 0 else None) for i in range(2)]
    together: list[Any] = [None, None]
    models = [block(), block()]
    barrier = threading.Barrier(2)

    def work(i: int) -> None:
        barrier.wait()
        together[i] = _train(models[i], i, recipe if i == 0 else None)

    _in_threads(work, 2)
    for mine, theirs in zip(together, alone, strict=True):
        assert same(mine, theirs)


def _train(model: Sequential, seed: int, recipe: Recipe | None) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(8):
        x = torch.randn(5, WIDTH, generator=generator)
        with under(recipe):
            model(x).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
        model.zero_grad()
    return everything(model)


def _in_threads(work: Callable[[int], None], count: int) -> None:
    errors: list[BaseException] = []

    def guarded(i: int) -> None:
        try:
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("recipe", RECIPES)
def test_threads_share_a_model(recipe: Recipe | None) -> None:
    """One model, four threads: one plan per kind of call; the state has seen the largest of all calls."""
    model = block()
    generator = torch.Generator().manual_seed(4)
    xs = [torch.randn(5, WIDTH, generator=generator) for _ in range(4)]
    barrier = threading.Barrier(4)

    def work(i: int) -> None:
        barrier.wait()
        for _ in range(6):
            leaf = xs[i].clone().requires_grad_()
            with under(recipe):
                y = model(leaf)
            grads = torch.autograd.grad(y.sum(), [leaf, *model.parameters()])
            assert all(g.isfinite().all() for g in grads)

    _in_threads(work, 4)
    (runner,) = model._runners.values()
    assert runner.pipeline.plans_built == 1
    if isinstance(recipe, DelayedScaling):
        current = runner.scaling.current
        assert current is not None
        seen = current.forward.amax_history.amax(0)[list(current.forward.slots).index("6.weight")]
        assert seen == list(model.parameters())[-2].abs().max()


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, word: str, at: int) -> Iterator[None]:
    """The word raises at its call number ``at``."""
    original, calls = getattr(nvte, word), 0

    def raising(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise MemoryError("no room for the result")
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(nvte, word, raising)
        yield
    assert calls >= at


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("word", "at"), [("layernorm", 1), ("matmul_transpose_add_gelu", 1), ("matmul_transpose_add_add", 1)])
def test_a_kernel_that_raises_in_forward_changes_nothing(word: str, at: int, recipe: Recipe | None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    model, twin = (Sequential(Residual(LayerNorm(WIDTH), Linear(WIDTH, 12), GELU(), Linear(12, WIDTH))) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    x = torch.randn(4, WIDTH)
    with under(recipe):
        for m in (model, twin):
            m(x).sum().backward()
            m.zero_grad()
        before = everything(model)
        with failing(monkeypatch, word, at), pytest.raises(MemoryError, match="no room for the result"):
            model(100 * x)
        assert same(everything(model), before) and all(p.grad is None for p in model.parameters())
        assert nvte.current_pass().kind == "inference"
        # What comes next is what would have come without the failure.
        for m in (model, twin):
            m(2 * x).sum().backward()
    assert same(everything(model), everything(twin))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("word", ["dlayernorm", "matmul", "transpose_matmul"])
def test_a_kernel_that_raises_in_backward_changes_nothing(word: str, recipe: Recipe | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Sequential(LayerNorm(WIDTH), Linear(WIDTH, 12, bias=False), GELU(), Linear(12, WIDTH, bias=False))
    x = torch.randn(4, WIDTH)
    with under(recipe):
        model(x).sum().backward()
        model.zero_grad()
        y = model(x)
        before = everything(model)
        with failing(monkeypatch, word, 1), pytest.raises(MemoryError, match="no room for the result"):
            y.sum().backward(retain_graph=True)
        assert same(everything(model), before) and all(p.grad is None for p in model.parameters())
        y.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_second_derivatives_are_refused() -> None:
    model, x = block(), torch.randn(3, WIDTH, requires_grad=True)
    with pytest.raises(NotServedError, match="a backward through a pipeline: expected create_graph=False, got True; "):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


def test_backward_twice_through_a_kept_graph() -> None:
    model, x = block(), torch.randn(3, WIDTH, requires_grad=True)
    with autocast(recipe=DelayedScaling()):
        y = model(x).sum()
    first = torch.autograd.grad(y, x, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(y, x)[0], first)


@pytest.mark.parametrize("recipe", [DelayedScaling(), Float8CurrentScaling()], ids=["delayed", "current"])
def test_saved_operands_of_products_are_8_bit(recipe: Recipe) -> None:
    """Of a linear layer with 8-bit operands, backward keeps one byte per element of x and of the weight, and a scale each."""
    model, tokens = Sequential(Linear(64, 32)), 48
    x = torch.randn(tokens, 64, dtype=torch.bfloat16, requires_grad=True)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with autocast(recipe=recipe), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    held = sum(t.numel() * t.element_size() for t in saved)
    assert held == tokens * 64 + 32 * 64 + 2 * 4
    saved.clear()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.to(torch.bfloat16)(x)
    assert sum(t.numel() * t.element_size() for t in saved) == 2 * (tokens * 64 + 32 * 64)


def test_a_block_keeps_its_8_bit_tensors_once() -> None:
    """The norm and the GELU write 8 bits: no bf16 copy of an operand is kept beside the inputs of the norm and of the GELU."""
    hidden, tokens = 64, 32
    model = Sequential(LayerNorm(hidden), Linear(hidden, 4 * hidden), GELU(), Linear(4 * hidden, hidden)).to(torch.bfloat16)
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
    sizes: dict[torch.dtype, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
        return tensor

    with autocast(recipe=DelayedScaling()), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    assert sizes[torch.uint8] == tokens * hidden + tokens * 4 * hidden + 2 * 4 * hidden * hidden
    assert sizes[torch.bfloat16] == tokens * hidden + hidden + tokens * 4 * hidden
    assert sizes[torch.float32] == 2 * tokens + 4


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_go_through_as_in_torch(bad: float) -> None:
    torch.manual_seed(1)
    mine = Sequential(Linear(WIDTH, 6), GELU(), Linear(6, WIDTH))
    theirs = torch.nn.Sequential(torch.nn.Linear(WIDTH, 6), torch.nn.GELU(approximate="tanh"), torch.nn.Linear(6, WIDTH))
    theirs.load_state_dict(mine.state_dict())
    x = torch.randn(4, WIDTH)
    x[1, 3] = bad
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, z = mine(a), theirs(b)
    torch.testing.assert_close(y, z, equal_nan=True)
    y.sum().backward()
    z.sum().backward()
    torch.testing.assert_close(a.grad, b.grad, equal_nan=True)
    for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, equal_nan=True)


@pytest.mark.parametrize("recipe", [DelayedScaling(), Float8CurrentScaling()], ids=["delayed", "current"])
def test_nan_goes_through_8_bits(recipe: Recipe) -> None:
    """A NaN makes its own row NaN and no other; an infinity is the largest value of the format."""
    model = Linear(WIDTH, 6)
    x = torch.randn(4, WIDTH)
    x[1, 3] = float("nan")
    with autocast(recipe=recipe):
        y = model(x)
    assert y[1].isnan().all() and y[[0, 2, 3]].isfinite().all()
    x[1, 3] = float("inf")
    with autocast(recipe=recipe):
        assert model(x).isfinite().all()


def test_recorded_calls_are_of_fused_kernels() -> None:
    """The plan's fusions are what runs: three products forward and no separate GELU."""
    model, x = block(), torch.randn(4, WIDTH)
    model(x)
    with tex.record() as calls:
        model(x)
    names = [call.function for call in calls]
    assert names.count("generic_gemm") == 2 and "layernorm_fwd" in names
