"""``GroupedLinear`` is a ``Linear`` for each group of rows, in every precision, whatever the sizes of the groups; a bias is added to its result."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

import pytest
import torch
from torch import Tensor

import fusible
from fusible import tex
from fusible.errors import ArgumentError, DTypeError, ShapeError
from fusible.pytorch.ops import GroupedLinear, Linear

RECIPES = {
    "none": None,
    "delayed": fusible.DelayedScaling(amax_history_len=2),
    "current": fusible.Float8CurrentScaling(),
    "block": fusible.Float8BlockScaling(),
    "mxfp8": fusible.MXFP8BlockScaling(),
    "nvfp4": fusible.NVFP4BlockScaling(),
}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPSILON = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SPLITS = [(64, 0, 32, 32), (0, 0, 128, 0), (32, 32, 32, 32), (0, 96, 0, 32)]
"""Sums of 128, in whole blocks of every format."""
GROUPS, K, N = 4, 64, 32


@pytest.fixture
def reference_backend() -> Iterator[None]:
    """Both sides by one backend: others sum single products in another order."""
    with tex.set_backend("torch", strict=True):
        yield


def quantized(recipe: str) -> fusible.autocast:
    return fusible.autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe])


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer(dtype: torch.dtype = torch.float32, **options) -> GroupedLinear:
    made = GroupedLinear(GROUPS, K, N, dtype=dtype, **options)
    with torch.no_grad():
        for i, (name, parameter) in enumerate(made.named_parameters()):
            parameter.copy_(random(100 + i, *parameter.shape) / (8 if "weight" in name else 1))
    return made


def weights_of(made: GroupedLinear) -> list[Tensor]:
    return list(made.weight) if made.single_grouped_weight else [getattr(made, f"weight{i}") for i in range(GROUPS)]


def biases_of(made: GroupedLinear) -> list[Tensor]:
    return list(made.bias) if made.single_grouped_bias else [getattr(made, f"bias{i}") for i in range(GROUPS)]


def linears_of(made: GroupedLinear, bias: bool) -> list[Linear]:
    linears = [Linear(K, N, bias=bias, dtype=weights_of(made)[0].dtype) for _ in range(GROUPS)]
    with torch.no_grad():
        for i, linear in enumerate(linears):
            linear.weight.copy_(weights_of(made)[i])
            if linear.bias is not None:
                linear.bias.copy_(biases_of(made)[i])
    return linears


def by_group(made: GroupedLinear, linears: Sequence[Linear], pieces: Sequence[Tensor]) -> Tensor:
    """The results of ``linears`` without a bias, each rounded, and the biases of ``made`` added."""
    products = [linear(piece) for linear, piece in zip(linears, pieces, strict=True)]
    return torch.cat([y + bias for y, bias in zip(products, biases_of(made), strict=True)] if made.use_bias else products)


def changed(*modules: torch.nn.Module) -> None:
    """Negate the parameters, as an optimizer may."""
    with torch.no_grad():
        for module in modules:
            for parameter in module.parameters():
                parameter.neg_()


def stacked_grads(made: GroupedLinear, name: str) -> Tensor:
    one = made._parameters.get(name)
    found = one.grad if one is not None else torch.stack([getattr(made, f"{name}{i}").grad for i in range(GROUPS)])
    assert found is not None
    return found


SINGLE = {"single_grouped_weight": True, "single_grouped_bias": True}
CASES = {"many": (torch.bfloat16, {}), "in fp32": (torch.float32, {}), "single": (torch.bfloat16, SINGLE), "bare": (torch.bfloat16, {"bias": False})}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_it_is_a_linear_for_each_group_to_the_bit(recipe: str, case: str, reference_backend: None) -> None:
    """Over several calls of one shape with other sizes: the later ones are replays of the second. Weights change between all calls."""
    dtype, options = CASES[case]
    grouped = layer(dtype, **options)
    linears, without_bias = linears_of(grouped, grouped.use_bias), linears_of(grouped, False)
    for step, splits in enumerate(SPLITS):
        x, dy = random(step, sum(splits), K, dtype=dtype).requires_grad_(), random(50 + step, sum(splits), N, dtype=dtype)
        with quantized(recipe):
            y = grouped(x, torch.tensor(splits))
        torch.manual_seed(step)  # of stochastic rounding
        y.backward(dy)
        pieces = [piece.detach().clone().requires_grad_() for piece in x.split(splits)]
        with quantized(recipe):
            ys = [linear(piece) for linear, piece in zip(linears, pieces, strict=True)]
            wanted = by_group(grouped, without_bias, pieces)
        torch.manual_seed(step)
        for one, part in zip(ys, dy.split(splits), strict=True):
            one.backward(part)
        assert torch.equal(y, wanted) and y.dtype is dtype
        assert torch.equal(x.grad, torch.cat([piece.grad for piece in pieces]))  # type: ignore[arg-type]
        assert torch.equal(stacked_grads(grouped, "weight"), torch.stack([linear.weight.grad for linear in linears]))  # type: ignore[arg-type]
        if grouped.use_bias:
            assert torch.equal(stacked_grads(grouped, "bias"), torch.stack([linear.bias.grad for linear in linears]))  # type: ignore[union-attr]
        changed(grouped, *linears, *without_bias)
        with torch.no_grad(), quantized(recipe):
            assert torch.equal(grouped(x, torch.tensor(splits)), by_group(grouped, without_bias, pieces))
        changed(grouped, *linears, *without_bias)
    replays = grouped._fuser().executor._replays
    passes = {part for (key, *_), replay in replays.items() if replay is not None for part in key if isinstance(part, str)}
    assert passes >= {"forward", "backward", "inference"}, "a pass was not replayed: it looked at its sizes"


def expected_values(x: Tensor, splits: Sequence[int], made: GroupedLinear, scales: Tensor | None = None) -> Tensor:
    """In float64, by autograd."""
    rows = [*accumulate(splits, initial=0)]
    ys = []
    for i, (weight, bias) in enumerate(zip(weights_of(made), biases_of(made), strict=True)):
        part = slice(rows[i], rows[i + 1])
        b = bias.double() if scales is None else scales.double()[part, None] * bias.double()
        ys.append(x.double()[part] @ weight.double().T + b)
    return torch.cat(ys)


UNIT = {"none": 0.0, "delayed": 2.0**-4, "current": 2.0**-4, "block": 2.0**-4, "mxfp8": 2.0**-4}
"""Half a unit in the last place of E4M3, by which each factor of a product may be off."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", UNIT)
def test_it_is_near_the_float64_values(recipe: str, dtype: torch.dtype) -> None:
    made = layer(dtype)
    for step, splits in enumerate(SPLITS):
        x = random(step, sum(splits), K, dtype=dtype)
        with quantized(recipe):
            y = made(x, torch.tensor(splits, dtype=torch.int32))
        wanted = expected_values(x, splits, made)
        magnitudes = torch.cat([p.double().abs() @ w.double().abs().T for p, w in zip(x.split(splits), weights_of(made), strict=True)])
        unit, rounding = UNIT[recipe], EPSILON[dtype]
        # Both factors off by a unit, and 2^-12 of a sum for values below E4M3's normal ones; fp32 sums of K terms; the product and its sum with the
        # bias rounded once each.
        products = wanted - torch.cat([b.double().expand(rows, N) for b, rows in zip(biases_of(made), splits, strict=True)])
        rounded = rounding * (products.abs() + wanted.abs() + 1)
        bound = ((2 * unit + unit**2 + (2.0**-12 if unit else 0) + K * 2.0**-24) * magnitudes + rounded).double()
        assert ((y.double() - wanted).abs() <= bound).all()


def check_against_autograd(made: GroupedLinear, dtype: torch.dtype, splits: Sequence[int], scaled: bool, rows: int) -> None:
    x, dy = random(1, rows, K, dtype=dtype).requires_grad_(), random(2, rows, N, dtype=dtype)
    scales = random(3, rows).to(dtype).requires_grad_() if scaled else None
    inputs = [x, *made.parameters(), *([scales] if scales is not None else [])]
    wanted = expected_values(x, splits, made, scales)
    wanted_grads = torch.autograd.grad(wanted, inputs, dy.double()[: len(wanted)])
    y = made(x, torch.tensor(splits), *([scales] if scales is not None else []))
    got_grads = torch.autograd.grad(y, inputs, dy)
    whole = torch.zeros(rows, N, dtype=torch.float64)
    whole[: len(wanted)] = wanted
    for got, want in zip((y, *got_grads), (whole, *wanted_grads), strict=True):
        # Sums of at most 128 products of numbers of unit variance in fp32, of root 128 size; gradients are rounded once or twice.
        assert got.dtype in (dtype, torch.float32) and got.shape == want.shape
        torch.testing.assert_close(got.double(), want.double(), rtol=2 * EPSILON[dtype], atol=2 * EPSILON[dtype] * math.sqrt(128))


@pytest.mark.parametrize("options", [{}, SINGLE, {"single_grouped_bias": True}], ids=["many", "single", "bias"])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_gradient_is_near_the_float64_one(dtype: torch.dtype, scaled: bool, options: dict) -> None:
    made = layer(dtype, scale_bias=scaled, **options)
    for splits in ((5, 0, 1, 13), (0, 0, 0, 0), (0, 0, 0, 19), (19, 0, 0, 0)):
        check_against_autograd(made, dtype, splits, scaled, sum(splits))


def test_rows_beyond_the_last_group_belong_to_nobody() -> None:
    check_against_autograd(layer(), torch.float32, (3, 0, 2, 4), False, 15)
    check_against_autograd(layer(scale_bias=True), torch.float32, (3, 0, 2, 4), True, 15)
    x = torch.full((10, K), math.nan)
    y = layer()(x, torch.tensor([0, 0, 0, 0]))
    assert not y.any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_empty_group_has_a_gradient_of_zeros(recipe: str) -> None:
    made = layer()
    with quantized(recipe):
        made(random(0, 64, K), torch.tensor([32, 0, 32, 0])).sum().backward()
    empty = [not getattr(made, f"{name}{i}").grad.any() for name in ("weight", "bias") for i in range(GROUPS)]
    assert empty == [False, True, False, True] * 2


def test_leading_dimensions_are_rows() -> None:
    made, x = layer(scale_bias=True), random(0, 2, 3, 4, K)
    scales = random(1, 2, 3, 4).requires_grad_()
    sizes = torch.tensor([3, 1, 0, 20])
    y = made(x, sizes, scales)
    y.sum().backward()
    flat = scales.detach().reshape(-1).requires_grad_()
    z = made(x.reshape(24, K), sizes, flat)
    z.sum().backward()
    assert y.shape == (2, 3, 4, N) and torch.equal(y.view(24, N), z)
    assert scales.grad is not None and flat.grad is not None and torch.equal(scales.grad.view(-1), flat.grad)


@pytest.mark.parametrize("recipe", ["none", "current", "mxfp8"])
def test_what_needs_no_gradient_gets_none_and_changes_nothing_else(recipe: str) -> None:
    x, dy, sizes = random(0, 128, K), random(1, 128, N), torch.tensor([32, 32, 0, 64])

    def grads(made: GroupedLinear, x: Tensor) -> dict[str, Tensor | None]:
        with quantized(recipe):
            made(x, sizes).backward(dy)
        return {"x": x.grad, **{name: parameter.grad for name, parameter in made.named_parameters()}}

    every = grads(layer(), x.clone().requires_grad_())
    assert all(grad is not None for grad in every.values())
    for frozen in ({"x"}, {"weight1", "bias2"}, {f"weight{i}" for i in range(GROUPS)}, every.keys() - {"bias0"}, every.keys() - {"x"}):
        made = layer()
        for name, parameter in made.named_parameters():
            parameter.requires_grad_(name not in frozen)
        some = grads(made, x.clone().requires_grad_("x" not in frozen))
        assert {name for name, grad in some.items() if grad is None} == frozen
        # A row-wise read alone gives the very bytes of the one with both copies.
        assert all(torch.equal(grad, every[name]) for name, grad in some.items() if grad is not None)  # type: ignore[arg-type]


def test_only_the_copies_that_products_read_are_made() -> None:
    made, x, sizes = layer(), random(0, 128, K), torch.tensor([32, 32, 0, 64])
    with quantized("mxfp8"):
        for x_grad, weight_grad in ((True, True), (True, False), (False, True)):
            for i in range(GROUPS):
                getattr(made, f"weight{i}").requires_grad_(weight_grad)
            runner = made._fuser()
            made(x.clone().requires_grad_(x_grad), sizes)
            (op,) = list(runner._plans.values())[-1].ops
            ways = [(getattr(op, f"{name}3_dtype").rowwise, getattr(op, f"{name}3_dtype").columnwise) for name in ("x", "weight", "dy")]
            assert ways == [(True, weight_grad), (True, x_grad), (x_grad, weight_grad)]


def test_the_gradient_of_a_wider_bias_is_rounded_once() -> None:
    made, x, dy = layer(torch.float32), random(0, 128, K, dtype=torch.bfloat16), random(1, 128, N, dtype=torch.bfloat16)
    made(x, torch.tensor([32, 32, 0, 64])).backward(dy)
    assert made.bias0.grad is not None and torch.equal(made.bias0.grad, dy[:32].float().sum(0))


def test_delayed_scaling_has_a_slot_for_each_group_and_tensor() -> None:
    made = layer(torch.bfloat16)
    assert (made.num_quantizers("forward"), made.num_quantizers("backward")) == (2 * GROUPS, GROUPS)
    roles = [(role.module_type, role.tensor_type) for mode in ("forward", "backward") for role in made.get_quantizer_roles(mode)]
    assert roles == [("grouped_linear", "input"), ("grouped_linear", "weight")] * GROUPS + [("grouped_linear", "grad_output")] * GROUPS
    x = random(0, 4, K, dtype=torch.bfloat16) * torch.tensor([[1.0], [2.0], [4.0], [8.0]], dtype=torch.bfloat16)
    with quantized("delayed"):
        for _ in range(2):
            made(x, torch.tensor([1, 1, 1, 1])).sum().backward()
    layout = made._fuser().scaling
    assert len(made._fuser().pipeline.state.forward) == 2 * GROUPS and len(made._fuser().pipeline.state.backward) == GROUPS
    snapshot = layout.snapshot(RECIPES["delayed"], torch.device("cpu"), None, inference=True)
    scales = [snapshot.scales[f"0.x{i}"].item() for i in range(GROUPS)]
    amaxes = x.float().abs().amax(1)
    assert scales == (torch.full_like(amaxes, 448.0) / amaxes).tolist()


def test_mistakes_are_told_before_anything_is_done() -> None:
    made, x = layer(scale_bias=True), random(0, 8, K)
    sizes, scales = torch.tensor([2, 2, 2, 2]), torch.ones(8)
    for _ in range(3):  # so that a call of this kind is replayed
        made(x, sizes, scales)
    for wrong, error, words in (
        ((sizes,), ArgumentError, "2 extra inputs"),
        ((sizes.float(), scales), DTypeError, "int32 or int64"),
        ((sizes[:3], scales), ShapeError, ": expected shape [4], got "),
        ((torch.tensor([2, 2, 2, 2, 2]), scales), ShapeError, ": expected shape [4], got "),
        ((torch.tensor([2, 2, 2, 3]), scales), ShapeError, "members within"),
        ((sizes, scales[:7]), ShapeError, "one number for each of 8 rows"),
    ):
        with pytest.raises(error) as caught:
            made(x, *wrong)
        assert words in str(caught.value)
    for options, error in (((0, 1, 1), ArgumentError), ((1, 0, 1), ArgumentError), ((1, 1, -1), ArgumentError)):
        with pytest.raises(error):
            GroupedLinear(*options)
    with pytest.raises(DTypeError):
        GroupedLinear(1, 1, 1, dtype=torch.int32)
    with pytest.raises(ShapeError, match="64 columns"):
        made(random(0, 8, 63), sizes, scales)


@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_groups_may_be_of_any_size(recipe: str) -> None:
    made, splits = layer(torch.bfloat16), (1, 0, 7, 30)
    x = random(0, 38, K, dtype=torch.bfloat16)
    with quantized(recipe):
        y = made(x, torch.tensor(splits))
        y.sum().backward()
    wanted = expected_values(x, splits, made)
    assert (y.double() - wanted).abs().max() < 0.05 * wanted.abs().max()


def test_sizes_may_change_their_type_between_calls() -> None:
    made, x = layer(), random(0, 12, K)
    wanted = [made(x, torch.tensor(s)) for s in ((3, 3, 3, 3), (0, 6, 5, 1))]
    for _ in range(3):
        for splits, want in zip(((3, 3, 3, 3), (0, 6, 5, 1)), wanted, strict=True):
            for dtype in (torch.int32, torch.int64):
                assert torch.equal(made(x, torch.tensor(splits, dtype=dtype)), want)
