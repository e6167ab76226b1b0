"""Plans and state in use: shared modules, several calls in flight, partial gradients, a recipe that changes, steady loops."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusible import (
    GELU,
    DelayedScaling,
    Dropout,
    Float8CurrentScaling,
    Format,
    HighPrecision,
    LayerNorm,
    Linear,
    Recipe,
    Residual,
    Sequential,
    autocast,
)
from fusible.compute_pipeline import ComputePipeline

WIDTH = 8
RECIPES = [
    pytest.param(None, id="none"),
    pytest.param(DelayedScaling(amax_history_len=3), id="delayed"),
    pytest.param(Float8CurrentScaling(), id="current"),
]


def block() -> Sequential:
    torch.manual_seed(1)
    return Sequential(LayerNorm(WIDTH), Linear(WIDTH, 12), GELU(), Linear(12, WIDTH))


def under(recipe: Recipe | None) -> autocast:
    return autocast(enabled=recipe is not None, recipe=recipe)


def inputs(count: int, tokens: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(tokens, WIDTH, generator=generator) for _ in range(count)]


def gradients(model: nn.Module) -> list[Tensor | None]:
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return grads


def plans_built(model: nn.Module) -> int:
    return sum(runner.pipeline.plans_built for module in model.modules() for runner in getattr(module, "_runners", {}).values())


def scales(model: Sequential) -> tuple[Tensor, Tensor]:
    current = model._runner().scaling.current
    assert current is not None
    return current.forward.scale, current.backward.scale


def histories(model: Sequential) -> tuple[Tensor, Tensor]:
    current = model._runner().scaling.current
    assert current is not None
    return current.forward.amax_history, current.backward.amax_history


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_module_at_several_places_gets_the_sum_of_its_gradients(recipe: Recipe | None) -> None:
    torch.manual_seed(1)
    shared = Linear(WIDTH, WIDTH)
    twice = Sequential(shared, shared, GELU(), shared)
    apart = Sequential(Linear(WIDTH, WIDTH), Linear(WIDTH, WIDTH), GELU(), Linear(WIDTH, WIDTH))
    for layer in (apart[0], apart[1], apart[3]):
        layer.load_state_dict(shared.state_dict())
    x = inputs(1)[0]
    with under(recipe):
        for _ in range(3):  # delayed: each place has a scale of its own, which follows its own history
            mine, theirs = twice(x), apart(x)
            assert torch.equal(mine, theirs)
            mine.sum().backward()
            theirs.sum().backward()
            for name in ("weight", "bias"):
                total = sum(getattr(layer, name).grad.double() for layer in (apart[0], apart[1], apart[3]))
                torch.testing.assert_close(getattr(shared, name).grad.double(), total, rtol=1e-6, atol=1e-6)
            twice.zero_grad()
            apart.zero_grad()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_module_may_stand_in_several_models(recipe: Recipe | None) -> None:
    torch.manual_seed(1)
    shared = Linear(WIDTH, WIDTH)
    one, two = Sequential(shared, GELU()), Sequential(GELU(), shared)
    x = inputs(1)[0]
    with under(recipe):
        (one(x).sum() + two(x).sum() + shared(x).sum()).backward()
    weight, bias = shared.weight.detach().clone().requires_grad_(), shared.bias.detach().clone().requires_grad_()
    linear = lambda x: F.linear(x, weight, bias)  # noqa: E731
    (F.gelu(linear(x), approximate="tanh").sum() + linear(F.gelu(x, approximate="tanh")).sum() + linear(x).sum()).backward()
    # Three products of E4M3 with E5M2 operands: relative errors of half a step, 2^-4 and 2^-3, each.
    bound = 1e-6 if recipe is None else 2.0**-4 + 2.0**-3
    assert (shared.weight.grad - weight.grad).norm() <= bound * weight.grad.norm()
    assert (shared.bias.grad - bias.grad).norm() <= bound * bias.grad.norm()


@pytest.mark.parametrize("recipe", RECIPES)
def test_calls_in_flight_do_not_disturb_each_other(recipe: Recipe | None) -> None:
    """Forward three times, then backward in another order; the residual of each call goes around its own."""
    torch.manual_seed(1)
    model = Sequential(Residual(LayerNorm(WIDTH), Residual(Linear(WIDTH, WIDTH)), GELU()), Residual(Linear(WIDTH, WIDTH)))
    xs = inputs(3)
    frozen_scales = DelayedScaling(amax_history_len=3, scaling_factor_compute_algo=lambda amax, scale, fp8_max, recipe: scale)
    with under(frozen_scales if isinstance(recipe, DelayedScaling) else recipe):
        wanted = []
        for x in xs:
            leaf = x.clone().requires_grad_()
            y = model(leaf)
            y.square().sum().backward()
            wanted.append((y.detach(), leaf.grad, gradients(model)))
        leaves = [x.clone().requires_grad_() for x in xs]
        ys = [model(leaf) for leaf in leaves]
        for i in (1, 2, 0):
            ys[i].square().sum().backward()
            assert torch.equal(ys[i], wanted[i][0]) and torch.equal(leaves[i].grad, wanted[i][1])
            assert all(torch.equal(a, b) for a, b in zip(gradients(model), wanted[i][2], strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_accumulate(recipe: Recipe | None) -> None:
    model, xs = block(), inputs(3)
    frozen_scales = DelayedScaling(scaling_factor_compute_algo=lambda amax, scale, fp8_max, recipe: scale)
    with under(frozen_scales if isinstance(recipe, DelayedScaling) else recipe):
        each = []
        for x in xs:
            model(x).square().sum().backward()
            each.append(gradients(model))
        for x in xs:
            model(x).square().sum().backward()
    for parameter, *parts in zip(model.parameters(), *each, strict=True):
        assert torch.equal(parameter.grad, parts[0] + parts[1] + parts[2])


@pytest.mark.parametrize("recipe", RECIPES)
def test_without_grad_nothing_is_recorded(recipe: Recipe | None) -> None:
    model, (x,) = block(), inputs(1)
    with under(recipe):
        trained = model(x)
        trained.sum().backward()
        before = [t.clone() for t in (*scales(model), *histories(model))] if isinstance(recipe, DelayedScaling) else []
        with torch.no_grad():
            y = model(x)
        with torch.inference_mode():
            z = model(x)
        after = [*scales(model), *histories(model)] if isinstance(recipe, DelayedScaling) else []
    assert not y.requires_grad and y.grad_fn is None and torch.equal(y, z)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    if not isinstance(recipe, DelayedScaling):
        assert torch.equal(y, trained)


def test_inference_uses_the_scales_of_the_next_iteration() -> None:
    """After a training step, what was observed in it counts: no call is lost."""
    model, (x,) = block(), inputs(1)
    with autocast(recipe=DelayedScaling(amax_history_len=2)):
        model(x).sum().backward()
        with torch.no_grad():
            inferred = model(x)
        trained = model(x)
    assert torch.equal(inferred, trained)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("frozen", [("weight",), ("bias",), ("weight", "bias")], ids="+".join)
def test_frozen_parameters_get_no_gradient_and_change_no_other(frozen: tuple[str, ...], recipe: Recipe | None) -> None:
    full, part, (x,) = block(), block(), inputs(1)
    for name, parameter in part.named_parameters():
        parameter.requires_grad_(name.rsplit(".", 1)[1] not in frozen)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    with under(recipe):
        for model, leaf in zip((full, part), leaves, strict=True):
            model(leaf).square().sum().backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad, rtol=1e-5, atol=1e-6)
    for (name, parameter), (_, other) in zip(full.named_parameters(), part.named_parameters(), strict=True):
        if name.rsplit(".", 1)[1] in frozen:
            assert other.grad is None
        else:
            torch.testing.assert_close(other.grad, parameter.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_of_the_input_only(recipe: Recipe | None) -> None:
    full, part, (x,) = block(), block().requires_grad_(False), inputs(1)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    with under(recipe):
        for model, leaf in zip((full, part), leaves, strict=True):
            model(leaf).square().sum().backward()
        asked = torch.autograd.grad(block()(again := x.clone().requires_grad_()).square().sum(), again)[0]
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(leaves[0].grad, asked, rtol=1e-5, atol=1e-6)
    assert all(p.grad is None for p in part.parameters())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("wanted", [0, 1, 2, 3, 4, 5])
def test_one_wanted_parameter(wanted: int, recipe: Recipe | None) -> None:
    """Backward runs down to the wanted parameter and gives the same gradient."""
    full, part, (x,) = block(), block().requires_grad_(False), inputs(1)
    list(part.parameters())[wanted].requires_grad_()
    with under(recipe):
        for model in (full, part):
            model(x).square().sum().backward()
    got = [p.grad for p in part.parameters()]
    assert [g is not None for g in got] == [i == wanted for i in range(6)]
    torch.testing.assert_close(got[wanted], list(full.parameters())[wanted].grad, rtol=1e-5, atol=1e-6)


def test_parameters_are_read_at_each_call() -> None:
    model, (x,) = block(), inputs(1)
    first = model(x)
    with torch.no_grad():
        model[1].weight.mul_(2)
    second = model(x)
    model[3].bias = nn.Parameter(model[3].bias.detach() + 1)
    third = model(x)
    assert not torch.equal(first, second)
    torch.testing.assert_close(third, second + 1)
    model.to(torch.bfloat16)
    assert model(x.bfloat16()).dtype is torch.bfloat16


def test_a_weight_that_changes_before_backward_does_not_change_the_gradient() -> None:
    model, (x,) = block().requires_grad_(False), inputs(1)
    for recipe in (DelayedScaling(), Float8CurrentScaling()):
        with autocast(recipe=recipe):
            leaves = [x.clone().requires_grad_() for _ in range(2)]
            twin = block().requires_grad_(False)
            model.load_state_dict({k: v for k, v in twin.state_dict().items() if "scaling" not in k}, strict=False)
            twin(leaves[0]).sum().backward()
            y = model(leaves[1])
            model[1].weight.zero_()
            y.sum().backward()
        assert torch.equal(leaves[0].grad, leaves[1].grad)


def test_an_unquantized_weight_that_changes_before_backward_is_noticed() -> None:
    """As in torch: what backward needs has been written to."""
    model, (x,) = block(), inputs(1)
    y = model(x.requires_grad_())
    with torch.no_grad():
        model[1].weight.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_changed_recipe_of_the_same_class() -> None:
    """Each value of a recipe has its plan and its numbers; the history goes on where the window changes."""
    model, (x,) = block(), inputs(1)
    long, short = DelayedScaling(amax_history_len=8), DelayedScaling(amax_history_len=2)
    with autocast(recipe=long):
        for factor in (4.0, 1.0, 2.0):
            model(factor * x).sum().backward()
    before = histories(model)[0]
    assert before.shape[0] == 8 and plans_built(model) == 1
    with autocast(recipe=short):
        model(x).sum().backward()
    after = histories(model)[0]
    assert after.shape[0] == 2 and plans_built(model) == 2
    assert torch.equal(after[1], before[0])
    with autocast(recipe=DelayedScaling(amax_history_len=2, fp8_format=Format.E4M3)):
        model(x).sum().backward()
    assert plans_built(model) == 3
    with autocast(recipe=DelayedScaling(amax_history_len=2, margin=1)):
        model(x).sum().backward()
        halved = scales(model)[0].clone()
    with autocast(recipe=short):
        model(x).sum().backward()
    assert torch.equal(scales(model)[0], 2 * halved)


def test_equal_recipes_are_one_recipe() -> None:
    model, (x,) = block(), inputs(1)
    for _ in range(3):
        with autocast(recipe=DelayedScaling(amax_history_len=4)):
            model(x).sum().backward()
        with autocast(recipe=Float8CurrentScaling()):
            model(x).sum().backward()
    assert plans_built(model) == 2


@pytest.mark.parametrize("recipe", [*RECIPES, pytest.param(HighPrecision(lowest="float32"), id="high precision")])
def test_a_steady_loop_builds_no_plan(recipe: Recipe | None) -> None:
    torch.manual_seed(1)
    model = Sequential(Residual(LayerNorm(WIDTH), Linear(WIDTH, 12), GELU(), Dropout(0.1), Linear(12, WIDTH)), nn.Identity(), Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    counts, made = [], []
    init = ComputePipeline.__init__

    def counted(self: ComputePipeline, *args: object) -> None:
        made.append(self)
        init(self, *args)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch, under(recipe):
        patch.setattr(ComputePipeline, "__init__", counted)
        for tokens in (5, 5, 3, 7, 5, 0, 5):  # the number of tokens is no part of a plan
            x = torch.randn(tokens, WIDTH)
            model.train()
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                model(x)
            counts.append(plans_built(model))
    assert counts == [4] * 7 and len(made) == 2  # two pipelines, each with a plan for training and one for inference


def test_train_and_eval_with_dropout() -> None:
    torch.manual_seed(1)
    dropout = Dropout(0.5)
    model = Sequential(Linear(WIDTH, WIDTH), dropout)
    (x,) = inputs(1, tokens=64)
    plain = model[0](x)
    trained = model(x)
    share = (trained == 0).double().mean().item()
    assert 0.3 < share < 0.7 and not torch.equal(trained, model(x))
    kept = trained != 0
    torch.testing.assert_close(trained[kept], 2 * plain[kept])
    with torch.no_grad():
        assert (model(x) == 0).any()  # the module's mode decides, not whether gradients are recorded
    model.eval()
    leaf = x.clone().requires_grad_()
    y = model(leaf)
    assert torch.equal(y, plain)
    y.sum().backward()
    assert torch.equal(leaf.grad, torch.autograd.grad(model[0](again := x.clone().requires_grad_()).sum(), again)[0])
    model.train()
    dropout.eval()
    assert torch.equal(model(x), plain)


def test_dropout_follows_torchs_seed_and_its_place() -> None:
    model = Sequential(Dropout(0.5), Dropout(0.5))
    x = torch.ones(64, WIDTH)
    torch.manual_seed(7)
    first = model(x)
    torch.manual_seed(7)
    assert torch.equal(model(x), first)
    # Two masks drawn alike would keep half of the elements, independent ones a quarter: 512 draws, six standard deviations.
    assert abs((first != 0).double().mean().item() - 0.25) < 6 * (0.25 * 0.75 / first.numel()) ** 0.5
