"""What a compiler cannot take splits a compiled pipeline: what is before and behind it is compiled, and all is as with the eager executor.

Bounds are those of ``test_executors``, for fp32: a sum of ``LENGTH`` terms is off by ``WORK``, ``ROUNDINGS`` values are rounded on the longest way,
and a value that is off by ``WORK`` before it is rounded to 8 bits is off by ``sqrt(WORK * eps)`` behind it, root mean square.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusible
import fusible.pytorch as fp
from fusible.lazy.evaluation.program_cache import CACHE
from fusible.pytorch import ops
from fusible.pytorch.export import export
from fusible.pytorch.ops import BasicOperation, maybe_dequantize
from fusible.quantized import QuantizedTensor, Recipe

pytest.importorskip("jaxlib")

H, TOKENS = 32, 64
LENGTH, ROUNDINGS = 64, 8
WORK = math.sqrt(LENGTH) * torch.finfo(torch.float32).eps
FP8 = torch.finfo(torch.float8_e5m2).eps

RECIPES: dict[str, Recipe | None] = {
    "none": None,
    "delayed": fp.DelayedScaling(amax_history_len=3),
    "current": fp.Float8CurrentScaling(),
    "mxfp8": fusible.MXFP8BlockScaling(),
}


class Square(BasicOperation):
    """``y = x * x``, in plain torch."""

    def op_forward(self, ctx: Any, input_: Tensor, **_: Any) -> Tensor:
        ctx.save_for_backward(input_)
        return input_ * input_

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * grad_output, ()


class Weighted(BasicOperation):
    """``y = x * weight``, with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, H))

    def op_forward(self, ctx: Any, input_: Tensor, **_: Any) -> Tensor:
        ctx.save_for_backward(input_)
        return input_ * self.weight.detach()

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad_output * self.weight.detach(), (((grad_output * x).sum(0)),)


class InPlace(BasicOperation):
    def op_forward(self, ctx: Any, input_: Tensor, **_: Any) -> Tensor:
        return input_.mul_(2)

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        return grad_output * 2, ()


class View(BasicOperation):
    """Reverses the two halves of the rows: a strided view, forward and backward."""

    def op_forward(self, ctx: Any, input_: Tensor, **_: Any) -> Tensor:
        return input_.view(2, -1, H).flip(0).transpose(1, 2).contiguous().transpose(1, 2).reshape(-1, H)

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        return grad_output.reshape(2, -1, H).flip(0).reshape(-1, H), ()


class HandsOver(BasicOperation):
    """Takes 8 bits where its neighbour can write them, and hands on what its own neighbour would quantize."""

    came: ClassVar[list[bool]] = []

    def num_quantizers(self, mode: Any) -> int:
        return 1 if mode == "forward" else 0

    def op_forward(self, ctx: Any, input_: Any, *, next_op_input_quantizer: Any, **_: Any) -> Any:
        self.came.append(not isinstance(input_, Tensor) or isinstance(input_, QuantizedTensor))
        y = maybe_dequantize(input_, torch.float32)
        return y if next_op_input_quantizer is None else next_op_input_quantizer(y)

    def op_backward(self, ctx: Any, grad_output: Any) -> Any:
        return maybe_dequantize(grad_output, torch.float32), ()


class Dropped(BasicOperation):
    """Draws from torch's generator."""

    def op_forward(self, ctx: Any, input_: Tensor, **_: Any) -> Tensor:
        mask = (torch.rand_like(input_) > 0.5).float()
        ctx.save_for_backward(mask)
        return input_ * mask

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        (mask,) = ctx.saved_tensors
        return grad_output * mask, ()


KINDS: dict[str, Callable[[], nn.Module]] = {
    "an operation": Square,
    "one with a parameter": Weighted,
    "one in place": InPlace,
    "one that gives a view": View,
    "one that hands over 8 bits": HandsOver,
    "one that draws": Dropped,
    "a module": nn.Tanh,
    "a module with a state": lambda: nn.BatchNorm1d(H),
    "a module in place": lambda: nn.ReLU(inplace=True),
    "a module that draws": lambda: nn.Dropout(0.5),
}
PLACES: dict[str, Callable[[Callable[[], nn.Module]], list[nn.Module]]] = {
    "at the beginning": lambda user: [user(), fp.Linear(H, H), fp.GELU()],
    "in the middle": lambda user: [fp.LayerNorm(H), fp.GELU(), user(), fp.Linear(H, H), fp.Dropout(0.25)],
    "at the end": lambda user: [fp.Linear(H, H), fp.GELU(), user()],
    "alone": lambda user: [user()],
    "twice in a row": lambda user: [fp.Linear(H, H), user(), user(), fp.Linear(H, H)],
    "in a residual": lambda user: [fp.Residual(fp.LayerNorm(H), fp.Linear(H, H), user(), fp.Linear(H, H)), fp.GELU()],
    "in a nested Sequential": lambda user: [fp.Linear(H, H), fp.Sequential(user(), fp.Linear(H, H)), fp.GELU()],
}


NOTHING = 2.0**-12

BY_TORCHS_RULE = "modified by an inplace operation"
UNREPEATABLE = {("at the beginning", "one in place"), ("at the beginning", "a module in place"), ("alone", "a module in place")}
"""What writes over the caller's input, which a checkpoint keeps: torch refuses to repeat it."""
UNTRAINABLE = {("twice in a row", "a module in place")}
"""What writes over what its neighbour keeps for its backward: torch refuses that."""


def bound(recipe: Recipe | None) -> float:
    return ROUNDINGS * WORK + (0.0 if recipe is None else ROUNDINGS * math.sqrt(WORK * FP8))


def error(got: Tensor, wanted: Tensor) -> float:
    assert got.shape == wanted.shape and got.dtype is wanted.dtype and bool(got.isfinite().all())
    return ((got.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30)).item()


def tokens(seed: int) -> Tensor:
    return torch.randn(TOKENS, H, generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module, recipe: Recipe | None, seed: int, *extra: Tensor, repeated: bool = False) -> list[Tensor]:
    """The output, and the gradients, of one training call; ``repeated``: its forward is repeated in backward."""
    torch.manual_seed(seed)
    x = tokens(seed).requires_grad_()
    model.zero_grad()
    with fp.autocast(enabled=recipe is not None, recipe=recipe):
        result: Any = checkpoint(model, x.clone(), *extra, use_reentrant=False) if repeated else model(x.clone(), *extra)
        outputs = result if isinstance(result, tuple) else (result,)
        sum((y * y).mean() for y in outputs).backward()  # type: ignore[union-attr]
    assert x.grad is not None
    return [*(y.detach() for y in outputs), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def inferred(model: nn.Module, recipe: Recipe | None) -> Tensor:
    torch.manual_seed(9)
    with torch.no_grad(), fp.autocast(enabled=recipe is not None, recipe=recipe):
        return model(tokens(9))


def errors(got: list[Tensor], wanted: list[Tensor]) -> list[float]:
    """The error of each; of what is zero but for roundings (a gradient that the normalization behind it cancels) beside the largest."""
    least = NOTHING * max(t.double().norm().item() for t in wanted)
    return [NOTHING * (a.norm().item() > least) if b.norm().item() < least else error(a, b) for a, b in zip(got, wanted, strict=True)]


def check(model: nn.Module, recipe: Recipe | None, repeatable: bool = True) -> nn.Module:
    """Whether a copy that is compiled computes what ``model`` does, training, repeated (where torch can) and inferring, and has its state: that
    copy."""
    compiled = copy.deepcopy(model)
    compiled.compile("xla")
    for seed, repeated in ((0, False), (1, False), (2, repeatable)):
        wanted, got = (step(each, recipe, seed, repeated=repeated) for each in (model, compiled))
        assert max(errors(got, wanted)) <= bound(recipe)
    assert error(inferred(compiled, recipe), inferred(model, recipe)) <= bound(recipe)
    check_states(compiled, model, bound(recipe))
    return compiled


def check_states(got: nn.Module, wanted: nn.Module, tolerance: float) -> None:
    mine, theirs = got.state_dict(), wanted.state_dict()
    assert list(mine) == list(theirs)
    for name, value in theirs.items():
        if "scaling_state" not in name:
            torch.testing.assert_close(mine[name], value, rtol=tolerance, atol=tolerance)
    runners = [[runner for m in model.modules() for runner in getattr(m, "_runners", {}).values()] for model in (got, wanted)]
    for a, b in zip(*runners, strict=True):
        assert (a.scaling.current is None) is (b.scaling.current is None)
        for part in ("forward", "backward") if b.scaling.current is not None else ():
            one, other = getattr(a.scaling.current, part), getattr(b.scaling.current, part)
            assert one.slots == other.slots
            torch.testing.assert_close(one.amax_history, other.amax_history, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(one.scale, other.scale, rtol=tolerance, atol=0)


@pytest.mark.parametrize(
    ("place", "recipe"),
    [
        pytest.param(place, recipe, marks=() if recipe == "delayed" or place == "in the middle" else pytest.mark.slow)
        for place in PLACES
        for recipe in RECIPES
    ],
)
def test_wherever_it_stands(place: str, recipe: str) -> None:
    torch.manual_seed(0)
    check(fp.Sequential(*PLACES[place](Square)), RECIPES[recipe])


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [pytest.param(kind, recipe, marks=() if recipe == "delayed" else pytest.mark.slow) for kind in KINDS for recipe in RECIPES],
)
def test_whatever_it_is(kind: str, recipe: str) -> None:
    torch.manual_seed(0)
    HandsOver.came.clear()
    check(fp.Sequential(*PLACES["in the middle"](KINDS[kind])), RECIPES[recipe])
    if kind == "one that hands over 8 bits":
        assert HandsOver.came and all(HandsOver.came) is (recipe != "none")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_whatever_it_is_wherever_it_stands(kind: str, place: str) -> None:
    torch.manual_seed(0)
    model = fp.Sequential(*PLACES[place](KINDS[kind]))
    for refused, repeated in ((UNTRAINABLE, False), (UNREPEATABLE, True)):
        if (place, kind) in refused:
            for each in (model, copy.deepcopy(model).compile("xla")):
                with pytest.raises(RuntimeError, match=BY_TORCHS_RULE):
                    step(each, None, 0, repeated=repeated)
    if (place, kind) not in UNTRAINABLE:
        check(model, None, (place, kind) not in UNREPEATABLE)


def runner_of(model: nn.Module) -> Any:
    (runner,) = model._runners.values()  # type: ignore[operator, union-attr]
    return runner


def regions(model: nn.Module) -> list[list[tuple[int, int, bool]]]:
    """Of each pass of the model's only plan the regions: their ops, and whether they are programs."""
    (plan,) = [plan for plan in runner_of(model)._plans.values() if plan.backward]
    passes = (plan.segments[0].forward, plan.segments[0].backward, plan.inferred)
    return [[(region.start, region.stop, region.called is None) for region in each] for each in passes]


def test_what_is_around_it_is_compiled() -> None:
    model = fp.Sequential(fp.Linear(H, H), Square(), fp.Linear(H, H)).compile("xla")
    step(model, None, 0)
    assert regions(model) == [[(0, 2, True), (2, 3, False), (3, 5, True)]] * 3
    assert runner_of(model).executor.compiled == 4


def test_an_executor_that_compiles_nothing_splits_nothing() -> None:
    model = fp.Sequential(fp.Linear(H, H), Square(), fp.Linear(H, H))
    step(model, None, 0)
    assert regions(model) == [[(0, 5, False)]] * 3


def test_equal_stretches_are_one_program() -> None:
    model = fp.Sequential(*[layer for _ in range(4) for layer in (fp.Linear(H, H, bias=False), fp.GELU(), Square())]).compile("xla")
    before = CACHE.compiled
    inferred(model, None)
    assert runner_of(model).executor.compiled == 4 and CACHE.compiled == before + 1


def test_extra_tensors_cross_the_borders() -> None:
    torch.manual_seed(0)
    model = ops.Sequential(ops.Linear(H, H), ops.MakeExtraOutput(), Square(), ops.Linear(H, H), ops.AddExtraInput(), Weighted(), ops.Linear(H, H))
    compiled = copy.deepcopy(model).compile("xla")
    results = []
    for each in (model, compiled):
        extra = tokens(5).requires_grad_()
        found = step(each, RECIPES["delayed"], 0, extra)
        assert extra.grad is not None
        results.append([*found, extra.grad])
    assert len(results[0]) == len(results[1]) and max(map(error, results[1], results[0])) <= bound(RECIPES["delayed"])


def test_a_cache_of_keys_and_values_crosses_the_borders() -> None:
    torch.manual_seed(0)
    attention = fp.DotProductAttention(2, H // 2)
    model = fp.Sequential(fp.Residual(fp.LayerNorm(H), fp.Linear(H, 3 * H), Square(), attention, Square(), fp.Linear(H, H)), fp.GELU(), Square())
    model = fp.Sequential(model, fp.Linear(H, 3 * H), Square(), fp.DotProductAttention(2, H // 2))
    compiled = copy.deepcopy(model).compile("xla")
    x = tokens(3)[:12].view(2, 6, H)
    results = []
    for each in (model, compiled):
        cache, found = fp.KVCache(2, 16, dtype=torch.float32), []
        with torch.no_grad():
            for start, stop in ((0, 4), (4, 5), (5, 6)):
                found.append(each(x[:, start:stop], cache=cache))
                cache.advance([stop - start] * 2)
            whole = each(x)
        results.append(torch.cat(found, 1))
        assert error(results[-1], whole) <= bound(None)
    assert error(results[1], results[0]) <= bound(None)


@pytest.mark.parametrize("recipe", [None, pytest.param("delayed", marks=pytest.mark.slow)])
def test_lengths_of_sequences_cross_the_borders(recipe: str | None) -> None:
    """Attention behind a border and before one, its rotation and its mask too; each program serves other lengths of as many sequences. What makes
    the queries and keys does not square them: a softmax of large scores is nearly one key's, and its gradient the small difference of large
    numbers, of which two algorithms keep other digits."""
    torch.manual_seed(0)
    heads = fp.DotProductAttention(2, H // 2, rope_base=1e4)
    masked = fp.DotProductAttention(2, H // 2, mask=True)
    front, between = [fp.LayerNorm(H), fp.Linear(H, 3 * H), InPlace()], [fp.Linear(H, 3 * H), InPlace()]
    model = fp.Sequential(*front, heads, Square(), *between, masked, Square(), fp.Linear(H, H))
    compiled, recipe_ = copy.deepcopy(model).compile("xla"), RECIPES[recipe or "none"]
    for lengths in ([40, 3, 21], [21, 22, 21]):
        mask, results = torch.randn(3, 1, 40, 40, generator=torch.Generator().manual_seed(3)), []
        for each in (model, compiled):
            each.zero_grad()
            leaves = [tokens(1).requires_grad_(), mask.clone().requires_grad_()]
            with fp.autocast(enabled=recipe_ is not None, recipe=recipe_):
                y = each(leaves[0].clone(), torch.tensor(lengths), extra_inputs=[leaves[1]])
                y.square().mean().backward()
            results.append([y.detach(), *(leaf.grad for leaf in leaves), *(p.grad.clone() for p in each.parameters() if p.grad is not None)])
        assert len(results[0]) == len(results[1]) and max(map(error, results[1], results[0])) <= bound(recipe_)
        other = model(tokens(1), torch.tensor([TOKENS - 2, 1, 1]), extra_inputs=[torch.zeros(3, 1, 1, 1)])
        assert error(results[0][0], other.detach()) > 100 * bound(None)  # the lengths do count
    programs = [[program for *_, program in each] for each in regions(compiled)]
    assert programs[:2] == [[True, False] * 4 + [True]] * 2


class Doubled(ops.FusedOperation):
    """``Linear -> GELU`` as the caller fuses them, in plain torch, forward alone; what it computes differs from the two, so that it can be seen."""

    factor = 2.0

    def fuser_forward(self, basic_op_ctxs: Any, input_: Tensor, **_: Any) -> Any:
        linear = self.basic_ops[0]
        x = maybe_dequantize(input_, torch.float32)
        between = torch.nn.functional.linear(x, linear.weight.detach())  # type: ignore[arg-type]
        for ctx, saved in zip(basic_op_ctxs, (x, between), strict=True):
            ctx.save_for_backward(saved)
        return self.factor * torch.nn.functional.gelu(between, approximate="tanh"), [(), ()]

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Tensor, **_: Any) -> Any:
        ((x,), (between,)), linear = (ctx.saved_tensors for ctx in basic_op_ctxs), self.basic_ops[0]
        dy = self.factor * torch.ops.aten.gelu_backward(maybe_dequantize(grad_output, torch.float32), between, approximate="tanh")
        return dy @ linear.weight.detach(), [(dy.T @ x,), ()], [(), ()]  # type: ignore[operator, union-attr]


def _fuse(operations: list[Any], **_: Any) -> list[Any]:
    """``Doubled`` wherever a BasicLinear and a GELU of this module's are neighbours."""
    found: list[Any] = []
    for each in operations:
        if found and isinstance(each, ops.GELU) and isinstance(found[-1], ops.BasicLinear):
            found[-1] = Doubled([found[-1], each])
        else:
            found.append(each)
    return found


@pytest.mark.parametrize("recipe", ["none", "delayed"])
def test_a_fused_operation_of_the_callers_is_called_between_programs(recipe: str) -> None:
    torch.manual_seed(0)
    model = ops.Sequential(ops.LayerNorm(H), ops.BasicLinear(H, H), ops.GELU(), ops.Linear(H, H), ops.SiLU())
    compiled, given = copy.deepcopy(model).compile("xla"), RECIPES[recipe]
    with ops.register_forward_backward_fusion(_fuse):
        for seed in range(3):
            wanted, got = (step(each, given, seed) for each in (model, compiled))
            assert len(got) == len(wanted) == 7 and max(map(error, got, wanted)) <= bound(given)
        fused = inferred(compiled, given)
        assert error(fused, inferred(model, given)) <= bound(given)
        lines = [line for line in compiled.explain(tokens(0)).splitlines() if "called, not compiled" in line]
        assert lines == [" called, not compiled: Doubled is the caller's own code"] * 3
    assert error(inferred(compiled, given), fused) > 100 * bound(None)  # by the two of ours again, compiled


def test_gradients_are_summed_up_where_they_are_asked_for() -> None:
    torch.manual_seed(0)
    model = fp.Sequential(fp.Linear(H, H, accumulate_into_main_grad=True), Square(), fp.Linear(H, H, accumulate_into_main_grad=True))
    compiled = copy.deepcopy(model).compile("xla")
    for each in (model, compiled):
        for layer in (each[0], each[2]):
            layer.weight.main_grad = torch.ones(H, H)
        for seed in range(2):
            step(each, None, seed)
    for place in (0, 2):
        wanted = model[place].weight.main_grad
        assert error(compiled[place].weight.main_grad, wanted) <= bound(None) and not torch.equal(wanted, torch.ones(H, H))


def test_executors_change_in_the_middle_of_a_training() -> None:
    recipe = RECIPES["delayed"]
    torch.manual_seed(0)
    model = fp.Sequential(*PLACES["in a residual"](Weighted))
    other = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, other)]
    for seed, executor in enumerate(("eager", "xla", "xla", "eager", "xla")):
        other.compile(executor)
        wanted, got = (step(each, recipe, seed) for each in (model, other))
        assert max(map(error, got, wanted)) <= (seed + 1) * bound(recipe)
        for optimizer in optimizers:
            optimizer.step()
    check_states(other, model, 5 * bound(recipe))
    fresh = copy.deepcopy(model).compile("xla")
    fresh.load_state_dict(other.state_dict())
    assert error(inferred(fresh, recipe), inferred(other, recipe)) == 0


@pytest.mark.parametrize("kept", ["pickle", "state"])
def test_what_is_kept_of_a_split_model_goes_on_as_it_would(kept: str) -> None:
    recipe = RECIPES["delayed"]
    torch.manual_seed(0)
    model = fp.Sequential(fp.Linear(H, H), Weighted(), fp.Linear(H, H), fp.GELU()).compile("xla")
    for seed in range(3):
        step(model, recipe, seed)
    if kept == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        other = fp.Sequential(fp.Linear(H, H), Weighted(), fp.Linear(H, H), fp.GELU()).compile("xla")
        other.load_state_dict(model.state_dict())
    assert all(map(torch.equal, step(other, recipe, 3), step(model, recipe, 3)))
    assert runner_of(other).executor.name == "xla" and regions(other)[0] == [(0, 2, True), (2, 3, False), (3, 6, True)]


def test_a_pass_that_fails_behind_a_border_changes_nothing() -> None:
    class Fails(Square):
        fail = False

        def op_forward(self, ctx: Any, input_: Tensor, **kwargs: Any) -> Tensor:
            if self.fail:
                raise RuntimeError("on purpose")
            return super().op_forward(ctx, input_, **kwargs)

    model = fp.Sequential(fp.Linear(H, H), Fails(), fp.Linear(H, H)).compile("xla")
    step(model, RECIPES["delayed"], 0)
    before = runner_of(model).scaling.current
    Fails.fail = True
    with pytest.raises(RuntimeError, match="on purpose"):
        step(model, RECIPES["delayed"], 1)
    assert runner_of(model).scaling.current is before


def test_an_explanation_shows_the_programs_and_why_others_are_called() -> None:
    model = fp.Sequential(fp.Linear(H, H), Square(), fp.Linear(H, H))
    assert "program" not in model.explain(tokens(0)) and "called" not in model.explain(tokens(0))
    lines = [line for line in model.compile("xla").explain(tokens(0)).splitlines() if line.startswith(" ") and not line.startswith("  ")]
    assert lines == [" program 1", " called, not compiled: Square is written in plain torch", " program 2"] * 3


def test_what_is_called_is_not_exported(tmp_path: Any) -> None:
    with pytest.raises(fusible.errors.ArgumentError, match="the module Sequential to export: expected operations of ours alone, got Square"):
        export(fp.Sequential(fp.Linear(H, H), Square()), tmp_path / "program", tokens(0))
