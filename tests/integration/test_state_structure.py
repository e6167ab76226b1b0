"""How models are put together: nesting, names, foreign modules, hooks, and the three forms of the input."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusible import (
    GELU,
    DelayedScaling,
    Dropout,
    Float8CurrentScaling,
    LayerNorm,
    Linear,
    MultiHeadedSelfAttention,
    Recipe,
    Residual,
    RMSNorm,
    Sequential,
    autocast,
)

WIDTH = 8
RECIPES = [
    pytest.param(None, id="none"),
    pytest.param(DelayedScaling(amax_history_len=3), id="delayed"),
    pytest.param(Float8CurrentScaling(), id="current"),
]


def under(recipe: Recipe | None) -> autocast:
    return autocast(enabled=recipe is not None, recipe=recipe)


def layers() -> list[nn.Module]:
    torch.manual_seed(1)
    return [LayerNorm(WIDTH), Linear(WIDTH, 12), GELU(), Linear(12, WIDTH)]


def run(model: nn.Module, x: Tensor, recipe: Recipe | None = None) -> tuple[Tensor, Tensor, list[Tensor]]:
    leaf = x.clone().requires_grad_()
    with under(recipe):
        y = model(leaf)
    grads = torch.autograd.grad(y.square().sum(), [leaf, *model.parameters()])
    return y.detach(), grads[0], list(grads[1:])


def same(a: tuple[Tensor, Tensor, list[Tensor]], b: tuple[Tensor, Tensor, list[Tensor]]) -> bool:
    return torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) and all(torch.equal(g, h) for g, h in zip(a[2], b[2], strict=True))


def pipelines(model: nn.Module) -> list[int]:
    """The lengths of the pipelines that the modules have as they stand."""
    return [len(runner.pipeline.ops) for module in model.modules() for runner in getattr(module, "_runners", {}).values()]


@pytest.mark.parametrize("recipe", RECIPES)
def test_nested_sequentials_are_one_pipeline(recipe: Recipe | None) -> None:
    x = torch.randn(5, WIDTH)
    flat = Sequential(*layers())
    a, b, c, d = layers()
    nested = Sequential(Sequential(a, Sequential(b)), Sequential(), Sequential(Sequential(Sequential(c)), d))
    for _ in range(3):
        assert same(run(flat, x, recipe), run(nested, x, recipe))
    assert pipelines(nested) == pipelines(flat) == [6]
    with under(recipe):
        assert nested.explain(x) == flat.explain(x)


def test_a_dict_names_the_modules() -> None:
    names = ["norm", "up", "act", "down"]
    x = torch.randn(5, WIDTH)
    for make in (dict, OrderedDict):
        model = Sequential(make(zip(names, layers(), strict=True)))
        assert same(run(model, x), run(Sequential(*layers()), x))
        assert [name for name, _ in model.named_children()] == names
        assert list(model.state_dict()) == ["norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias"]
        assert model.up is model[1] and len(model) == 4 and [type(m) for m in model] == [LayerNorm, Linear, GELU, Linear]
        assert [name for name, _ in model[1:3].named_children()] == ["up", "act"]


def test_append_and_extend() -> None:
    x = torch.randn(5, WIDTH)
    a, b, c, d = layers()
    model = Sequential(a)
    model(x)
    assert model.append(b).extend([c, d]) is model
    assert same(run(model, x), run(Sequential(*layers()), x)) and pipelines(model) == [6]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_foreign_module_is_called_between_two_pipelines(recipe: Recipe | None) -> None:
    x = torch.randn(5, WIDTH)
    a, b, c, d = layers()
    model = Sequential(a, b, nn.Tanh(), c, d)
    y, dx, grads = run(model, x, recipe)
    assert pipelines(model) == [3, 3] and len(grads) == 6
    a, b, c, d = layers()
    first, second = Sequential(a, b), Sequential(c, d)
    chained = nn.Sequential(first, nn.Tanh(), second)
    assert same((y, dx, grads), run(chained, x, recipe))
    inner = Sequential(Sequential(*layers()[:2], nn.Tanh()), *layers()[2:])
    parameters = [parameter.detach() for parameter in chained.parameters()]
    inner.load_state_dict(dict(zip([name for name, _ in inner.named_parameters()], parameters, strict=True)))
    assert torch.equal(run(inner, x)[0], run(chained, x)[0])


def test_a_foreign_module_inside_a_residual() -> None:
    torch.manual_seed(1)
    model = Sequential(Residual(Linear(WIDTH, WIDTH), nn.Tanh()), Linear(WIDTH, WIDTH))
    x = torch.randn(5, WIDTH)
    inner = x + torch.tanh(model[0][0](x) if hasattr(model[0], "__getitem__") else next(model[0].children())(x))
    torch.testing.assert_close(model(x), model[1](inner))


@pytest.mark.parametrize("recipe", RECIPES)
def test_hooks_on_an_inner_module_fire(recipe: Recipe | None) -> None:
    """A hooked module is called on its own; when its hooks are gone, one pipeline runs again, with its own state."""
    x = torch.randn(5, WIDTH)
    model = Sequential(*layers())
    calls: list[str] = []

    def note(name: str) -> Any:
        return lambda *args: calls.append(name)

    before = run(model, x, recipe)
    handles = [
        model[1].register_forward_pre_hook(note("pre")),
        model[1].register_forward_hook(note("forward")),
        model[1].register_full_backward_pre_hook(note("backward pre")),
        model[1].register_full_backward_hook(note("backward")),
    ]
    hooked = run(model, x, recipe)
    assert calls == ["pre", "forward", "backward pre", "backward"]
    if recipe is None:
        torch.testing.assert_close(hooked[0], before[0])
    for handle in handles:
        handle.remove()
    run(model, x, recipe)
    assert len(calls) == 4


def test_a_hook_may_change_the_output() -> None:
    model = Sequential(*layers())
    x = torch.randn(5, WIDTH)
    model[3].register_forward_hook(lambda module, args, output: output + 1)
    torch.testing.assert_close(model(x), Sequential(*layers())(x) + 1)
    nested = Sequential(Sequential(*layers()), GELU())
    nested[0].register_forward_hook(lambda module, args, output: 0 * output)
    assert not nested(x).any()
    residual = Sequential(Residual(*layers()))
    next(residual.children()).register_forward_hook(lambda module, args, output: 0 * output)
    assert not residual(x).any()


def test_hooks_inside_a_residual_fire() -> None:
    torch.manual_seed(1)
    inner = Linear(WIDTH, WIDTH)
    model, x = Sequential(Residual(inner), GELU()), torch.randn(5, WIDTH)
    before = model(x)
    seen: list[Any] = []
    inner.register_forward_hook(lambda module, args, output: seen.append(output))
    torch.testing.assert_close(model(x), before)
    assert len(seen) == 1


def attention_model(*, causal: bool = True, rope_base: float | None = 10000.0) -> Sequential:
    torch.manual_seed(1)
    attention = MultiHeadedSelfAttention(WIDTH, 2, causal=causal, rope_base=rope_base)
    return Sequential(
        Residual(LayerNorm(WIDTH), Linear(WIDTH, 3 * WIDTH), attention, Linear(WIDTH, WIDTH)),
        Residual(RMSNorm(WIDTH), Linear(WIDTH, 12), GELU(), Linear(12, WIDTH)),
    )


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
def test_the_three_forms_of_the_input_are_equal(causal: bool, recipe: Recipe | None) -> None:
    """``[batch, seq, hidden]``, and the same tokens with ``seq_lens``; each with its output and gradients in its own form."""
    model = attention_model(causal=causal)
    x = torch.randn(3, 5, WIDTH)
    results = []
    for tokens, lens in ((x, None), (x.view(15, WIDTH), torch.full((3,), 5, dtype=torch.int32))):
        leaf = tokens.clone().requires_grad_()
        fresh = attention_model(causal=causal)
        with under(recipe):
            y = fresh(leaf, lens)
        grads = torch.autograd.grad(y.square().sum(), [leaf, *fresh.parameters()])
        assert y.shape == tokens.shape and grads[0].shape == tokens.shape
        results.append((y.detach().view(15, WIDTH), grads[0].view(15, WIDTH), list(grads[1:])))
    # Two layouts of attention: sums in another order, in fp32; 8-bit operands may fall to the other side of a tie.
    bound = 1e-5 if recipe is None else 0.02
    for a, b in zip((results[0][0], results[0][1], *results[0][2]), (results[1][0], results[1][1], *results[1][2]), strict=True):
        assert (a - b).norm() <= bound * b.norm()
    if recipe is None:
        single = torch.cat([model(part) for part in x])  # two dimensions are one sequence
        torch.testing.assert_close(single, results[0][0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
@pytest.mark.parametrize("lengths", [[5, 1, 7], [0, 4, 0, 9], [13], [0], []], ids=str)
def test_concatenated_sequences_do_not_see_each_other(lengths: list[int], causal: bool) -> None:
    model = attention_model(causal=causal)
    parts = [torch.randn(n, WIDTH) for n in lengths]
    together = torch.cat([torch.zeros(0, WIDTH), *parts]).requires_grad_()
    y = model(together, torch.tensor(lengths, dtype=torch.int32))
    alone = [part.clone().requires_grad_() for part in parts]
    ys = [model(part) for part in alone]
    torch.testing.assert_close(y, torch.cat([torch.zeros(0, WIDTH), *ys]), rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad(y.square().sum(), [together, *model.parameters()])
    total = sum((y.square().sum() for y in ys), model(torch.zeros(0, WIDTH)).sum())
    wanted = torch.autograd.grad(total, [*alone, *model.parameters()], allow_unused=True)
    torch.testing.assert_close(grads[0], torch.cat([torch.zeros(0, WIDTH), *wanted[: len(alone)]]), rtol=1e-4, atol=1e-5)
    for a, b in zip(grads[1:], wanted[len(alone) :], strict=True):
        torch.testing.assert_close(a, b if b is not None else torch.zeros_like(a), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_empty_batch_changes_no_state(recipe: Recipe | None) -> None:
    model = attention_model()
    with under(recipe):
        model(torch.randn(2, 4, WIDTH)).sum().backward()
        before = [p.grad.clone() for p in model.parameters()]
        for shape in ((0, WIDTH), (0, 4, WIDTH), (2, 0, WIDTH)):
            x = torch.zeros(shape, requires_grad=True)
            y = model(x)
            assert y.shape == shape
            y.sum().backward()
            assert x.grad.shape == shape
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))
    if isinstance(recipe, DelayedScaling):
        (runner,) = model._runners.values()
        assert runner.scaling.current.forward.scale.isfinite().all() and runner.scaling.current.backward.scale.isfinite().all()


def test_an_empty_sequential_is_the_identity() -> None:
    x = torch.randn(3, WIDTH)
    assert torch.equal(Sequential()(x), x) and torch.equal(Sequential(Dropout(0.5).eval())(x), x)
