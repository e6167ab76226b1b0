"""Groups that do not consist of whole blocks, under formats that want them: the results are those of groups that the caller has filled up with zeros.
And a weight that is one parameter is quantized when it has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fusible
from fusible.errors import ShapeError
from fusible.pytorch.ops import GroupedLinear, Sequential
from fusible.quantized import CustomRecipe, Float8CurrentScalingQuantizer, MXFP8Quantizer
from fusible.tex import DType

GROUPS, K, N, ROWS = 4, 64, 32, 70


def _mixed(role: Any) -> Any:
    """Whole blocks for forward operands alone: the gradients' rows must be filled up with them."""
    if role is not None and role.tensor_type == "grad_output":
        return Float8CurrentScalingQuantizer(DType.kFloat8E5M2)
    return MXFP8Quantizer(DType.kFloat8E4M3)


RECIPES: dict[str, tuple[fusible.Recipe, int]] = {
    "mxfp8": (fusible.MXFP8BlockScaling(), 32),
    "nvfp4": (fusible.NVFP4BlockScaling(disable_stochastic_rounding=True), 16),
    "mixed": (CustomRecipe(_mixed), 32),
}
SPLITS = [(1, 0, 33, 30), (31, 17, 5, 9), (0, 0, 0, 0), (0, 0, 70, 0), (32, 0, 0, 32)]
OPTIONS: dict[str, dict[str, Any]] = {
    "bias": {},
    "bare": {"bias": False},
    "scaled": {"scale_bias": True},
    "single": {"single_grouped_weight": True, "single_grouped_bias": True},
}


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer(dtype: torch.dtype = torch.bfloat16, **options: Any) -> GroupedLinear:
    made = GroupedLinear(GROUPS, K, N, dtype=dtype, **options)
    with torch.no_grad():
        for i, parameter in enumerate(made.parameters()):
            parameter.copy_(random(100 + i, *parameter.shape) / 8)
    return made


def filled(x: Tensor, splits: tuple[int, ...], multiple: int) -> tuple[Tensor, list[int]]:
    """``x`` with zeros after each group, and the groups' sizes then."""
    sizes = [-(-size // multiple) * multiple for size in splits]
    parts = x[: sum(splits)].split(list(splits))
    return torch.cat([torch.cat([part, part.new_zeros(size - len(part), *x.shape[1:])]) for part, size in zip(parts, sizes, strict=True)]), sizes


def emptied(x: Tensor, splits: tuple[int, ...], sizes: list[int], rows: int) -> Tensor:
    """The inverse, with zeros in rows of nobody."""
    found = torch.cat([part[:size] for part, size in zip(x.split(sizes), splits, strict=True)])
    return torch.cat([found, found.new_zeros(rows - len(found), *x.shape[1:])])


def step(made: GroupedLinear, recipe: fusible.Recipe, x: Tensor, dy: Tensor, sizes: Any, scales: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
    """``(what has the rows of x, the gradients of the parameters)``."""
    x = x.clone().requires_grad_()
    extra = [] if scales is None else [scales.clone().requires_grad_()]
    with fusible.autocast(recipe=recipe):
        y = made(x, torch.tensor(sizes, dtype=torch.int32), *extra)
    grads = torch.autograd.grad(y, [x, *extra, *made.parameters()], dy)
    return [y.detach(), *grads[: 1 + len(extra)]], list(grads[1 + len(extra) :])


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", RECIPES)
def test_ragged_groups_are_those_that_the_caller_would_fill_up(name: str, options: str, splits: tuple[int, ...]) -> None:
    recipe, multiple = RECIPES[name]
    made, dtype = layer(**OPTIONS[options]), torch.bfloat16
    x, dy = random(0, ROWS, K, dtype=dtype), random(1, ROWS, N, dtype=dtype)
    scales = random(2, ROWS) if options == "scaled" else None
    rows, grads = step(made, recipe, x, dy, splits, scales)
    (whole_x, sizes), (whole_dy, _) = filled(x, splits, multiple), filled(dy, splits, multiple)
    whole_scales = None if scales is None else filled(scales, splits, multiple)[0]
    wanted_rows, wanted_grads = step(made, recipe, whole_x, whole_dy, sizes, whole_scales)
    assert [len(value) for value in rows] == [ROWS] * len(rows)
    wanted_rows = [emptied(value, splits, sizes, ROWS) for value in wanted_rows]
    assert all(map(torch.equal, rows[:2], wanted_rows))
    if scales is not None:  # its gradient is unquantized: sums of N terms in fp32, whose order follows the number of rows
        assert torch.allclose(rows[2], wanted_rows[2], rtol=0, atol=N * 2.0**-24 * dy.abs().max().item())
    for got, wanted in zip(grads, wanted_grads, strict=True):
        if got.shape[-1:] == (N,) and got.dim() < 3 and got.shape[0] != N:  # a bias: the same numbers and zeros, summed in fp32 in another order
            assert torch.allclose(got.float(), wanted.float(), rtol=2.0**-7, atol=2.0**-16)
        else:
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", RECIPES)
def test_one_call_after_another_may_divide_anew_and_be_replayed(name: str) -> None:
    recipe, multiple = RECIPES[name]
    made, x = layer(), random(0, 2, 35, K, dtype=torch.bfloat16)
    for splits in SPLITS * 2:
        with fusible.autocast(recipe=recipe), torch.no_grad():
            y = made(x, torch.tensor(splits))
        whole, sizes = filled(x.flatten(0, 1), splits, multiple)
        with fusible.autocast(recipe=recipe), torch.no_grad():
            wanted = layer()(whole, torch.tensor(sizes))
        assert y.shape == (2, 35, N) and torch.equal(y.flatten(0, 1), emptied(wanted, splits, sizes, ROWS))


@pytest.mark.parametrize("delay", [False, True])
def test_ragged_groups_train_with_main_grad_and_delayed_gradients(delay: bool) -> None:
    recipe = fusible.MXFP8BlockScaling()
    x, sizes = random(0, ROWS, K, dtype=torch.bfloat16), torch.tensor(SPLITS[0])
    plain, made = layer(), layer(accumulate_into_main_grad=True, delay_wgrad_compute=delay)
    for weight in made.parameters():
        weight.main_grad = torch.ones_like(weight, dtype=torch.float32)  # pyright: ignore[reportAttributeAccessIssue]
    for one in (plain, made):
        with fusible.autocast(recipe=recipe):
            y = one(x, sizes)
        y.float().square().sum().backward()
    made.backward_dw()
    for i in range(GROUPS):
        added = getattr(made, f"weight{i}").main_grad - 1
        wanted = getattr(plain, f"weight{i}").grad.float()
        # The one is rounded to bf16; the other was added to 1 in fp32.
        assert torch.allclose(added, wanted, rtol=2.0**-8, atol=2.0**-22 * (1 + wanted.abs().max().item()))


@pytest.mark.parametrize("sizes", [(70, 0, 0, 1), (71, 0, 0, 0), (-1, 40, 0, 0)])
def test_groups_of_more_rows_than_there_are_are_refused(sizes: tuple[int, ...]) -> None:
    with fusible.autocast(recipe=fusible.MXFP8BlockScaling()), pytest.raises(ShapeError, match="members within 70 rows"):
        layer()(random(0, ROWS, K, dtype=torch.bfloat16), torch.tensor(sizes))


ALL: dict[str, fusible.Recipe] = {
    "delayed": fusible.DelayedScaling(amax_history_len=2),
    "current": fusible.Float8CurrentScaling(),
    "block": fusible.Float8BlockScaling(),
    **{name: recipe for name, (recipe, _) in RECIPES.items()},
}


class Counted:
    """An executor that notes which parameters were quantized."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.name, self.whole, self.in_place = inner, inner.name, inner.whole, inner.in_place
        self.quantized: list[tuple[int, ...]] = []

    def __call__(self, key: Any, program: Any, inputs: Any) -> Any:
        if key[1] == "weights":
            self.quantized.append(key[2])
        return self.inner(key, program, inputs)


def _optimizer(made: GroupedLinear) -> None:
    torch.optim.SGD(made.parameters(), lr=0.1).step()


def _in_place(made: GroupedLinear) -> None:
    with torch.no_grad():
        made.weight[1] *= 2


@pytest.mark.parametrize("change", [_optimizer, _in_place])
@pytest.mark.parametrize("name", ALL)
def test_a_weight_that_is_one_parameter_is_quantized_when_it_has_changed(name: str, change: Callable[[GroupedLinear], None]) -> None:
    made = layer(single_grouped_weight=True)
    model = Sequential(made)
    (fuser,) = model._arranged()
    fuser.executor = executor = Counted(fuser.executor)
    x, sizes = random(0, 128, K, dtype=torch.bfloat16), torch.tensor([32, 0, 64, 32])

    def call() -> Tensor:
        with fusible.autocast(recipe=ALL[name]):
            return model(x, sizes)

    for _ in range(3):
        call().float().square().sum().backward()
    with torch.no_grad():
        call()
    # Under delayed scaling it is another copy when the scale has followed the first amax, and again the first time that this one is to be kept.
    before = [(0,)] * (3 if name == "delayed" else 1)
    assert executor.quantized == before
    change(made)
    y = call()
    assert executor.quantized == [*before, (0,)]
    if name != "delayed":  # whose scale depends on the steps before
        fresh = layer(single_grouped_weight=True)
        fresh.load_state_dict({key: value for key, value in made.state_dict().items() if "scaling_state" not in key})
        with fusible.autocast(recipe=ALL[name]):
            assert torch.equal(y, fresh(x, sizes))


def test_each_part_of_one_weight_has_a_scale_of_its_own_under_delayed_scaling() -> None:
    recipe = fusible.DelayedScaling(amax_history_len=1)
    made = layer(single_grouped_weight=True, bias=False)
    with torch.no_grad():
        made.weight.mul_(torch.tensor([1.0, 2.0, 4.0, 8.0])[:, None, None])
    x, sizes = random(0, 64, K, dtype=torch.bfloat16), torch.tensor([16] * 4)
    with fusible.autocast(recipe=recipe):
        made(x, sizes).sum().backward()
    runner = made._fuser()
    state = runner.scaling.current.forward
    amaxes = [state.amax_history[0, state.slots.index(f"0.weight{i}")].item() for i in range(GROUPS)]
    assert amaxes == made.weight.detach().float().abs().amax((1, 2)).tolist()
