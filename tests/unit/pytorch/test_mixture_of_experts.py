"""``MixtureOfExperts`` against float64, in every recipe and form of batch."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusible
from fusible.errors import ArgumentError, NotServedError, ShapeError

FEATURES, INNER, EXPERTS = 32, 64, 4
RECIPES = {
    "delayed": fusible.DelayedScaling(),
    "current": fusible.Float8CurrentScaling(),
    "mxfp8": fusible.MXFP8BlockScaling(),
    "block": fusible.Float8BlockScaling(),
}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda z: F.gelu(z, approximate="tanh"),
    "swiglu": lambda z: F.silu(z.chunk(2, -1)[0]) * z.chunk(2, -1)[1],
}


def experts(top_k: int = 2, activation: str = "swiglu", dtype: torch.dtype | None = None, normalized: bool = True) -> fusible.MixtureOfExperts:
    torch.manual_seed(0)
    return fusible.MixtureOfExperts(FEATURES, INNER, EXPERTS, top_k, activation=activation, normalized=normalized, param_dtype=dtype)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, FEATURES, generator=torch.Generator().manual_seed(seed))


def reference(module: fusible.MixtureOfExperts, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Every expert of every token in float64, of which those are added that the token goes to."""
    x = x.detach().double().requires_grad_()
    router, up, down = (p.detach().double().requires_grad_() for p in module.parameters())
    logits, chosen = (x @ router.T).topk(module.top_k, -1)
    probs = logits.softmax(-1) if module.normalized else (x @ router.T).softmax(-1).gather(-1, chosen)
    each = torch.einsum("...eh,enh->...en", ACTIVATIONS[module.activation](torch.einsum("...h,enh->...en", x, up)), down)
    y = (probs[..., None] * each.gather(-2, chosen[..., None].expand(*chosen.shape, FEATURES))).sum(-2)
    y.backward(dy.double())
    grads = {"x": x.grad, "router_weight": router.grad, "up_weight": up.grad, "down_weight": down.grad}
    return {"y": y.detach(), **{name: grad for name, grad in grads.items() if grad is not None}}


def found(module: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    module.zero_grad()
    y = module(x)
    y.backward(dy)
    grads = {"x": x.grad, **{name: p.grad for name, p in module.named_parameters()}}
    return {"y": y.detach(), **{name: grad for name, grad in grads.items() if grad is not None}}


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest distance of two tensors of a name, of the length of one."""
    assert a.keys() == b.keys()
    return max(((a[name] - b[name]).norm() / b[name].norm()).item() for name in b)


@pytest.mark.parametrize("shape", [(24,), (2, 12), (1,)], ids=str)
@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_in_fp32_it_is_the_sum_over_a_tokens_experts(activation: str, top_k: int, shape: tuple[int, ...]) -> None:
    """Three calls, each with other tokens for each expert: what was recorded of one is right for the next. Sums have up to 64 terms, in two
    products."""
    module, dy = experts(top_k, activation), drawn(9, *shape)
    for seed in range(3):
        x = drawn(seed, *shape)
        wanted = reference(module, x, dy)
        if top_k == 1:  # the softmax over one logit is 1, so that the router has no gradient
            assert not found(module, x, dy)["router_weight"].any() and not wanted["router_weight"].any()
        ours, wanted = ({name: t for name, t in of.items() if t.any()} for of in (found(module, x, dy), wanted))
        assert apart(ours, wanted) < 16 * 2.0**-24 * 64**0.5


@pytest.mark.parametrize("top_k", [1, 2, EXPERTS])
def test_probabilities_of_all_experts_need_not_add_up_to_1(top_k: int) -> None:
    """So that the router has a gradient even of a token's only expert."""
    module, x, dy = experts(top_k, normalized=False), drawn(0, 7), drawn(9, 7)
    ours, wanted = found(module, x, dy), reference(module, x, dy)
    assert ours["router_weight"].any()
    assert apart(ours, wanted) < 16 * 2.0**-24 * 64**0.5


@pytest.mark.parametrize("recipe", RECIPES)
def test_in_8_bits_it_is_as_near_as_three_roundings_to_the_format(recipe: str) -> None:
    """E4M3 has a relative step of 2^-3 and rounds by 2^-4 at most; x, weights and the activations between are rounded. E5M2, of gradients, by twice
    as much. The router is in the precision of x, so that tokens go to the experts of the reference."""
    module, dy = experts(), drawn(9, 64)
    with fusible.autocast(recipe=RECIPES[recipe]):
        for seed in range(3):  # delayed scaling begins with a scale of 1
            x = drawn(seed, 64)
            ours = found(module, x, dy)
    wanted = reference(module, x, dy)
    assert apart({"y": ours["y"]}, {"y": wanted["y"]}) < 3 * 2.0**-4
    assert apart(ours, wanted) < 6 * 2.0**-4
    low, high = (fusible.ops.RouteTokens, fusible.ops.GroupedMMT)
    assert [type(b.op) for b in module.bound_ops() if isinstance(b.op, (low, high))] == [low, high, high]


def test_explain_says_in_which_type_experts_multiply() -> None:
    module = experts()
    with fusible.autocast(recipe=fusible.DelayedScaling()):
        text = module.explain(drawn(0, 4))
    assert text.count("GroupedMMT(weight e4m3") == 4 and "RouteTokens(weight fp32)" in text
    assert "GroupedMMT(weight fp32)" in module.explain(drawn(0, 4))


def test_each_expert_is_scaled_by_itself() -> None:
    """One expert's weights are 2^40 times as large as another's: with one scale for all of them the small ones would be 0."""
    module, x, dy = experts(), drawn(0, 64), drawn(9, 64)
    with torch.no_grad():
        module.down_weight[1] *= 2.0**-20
        module.down_weight[2] *= 2.0**20
    with fusible.autocast(recipe=fusible.Float8CurrentScaling()):
        ours = found(module, x, dy)["up_weight"]
    wanted = reference(module, x, dy)["up_weight"]
    for expert in range(EXPERTS):
        assert apart({"": ours[expert]}, {"": wanted[expert]}) < 6 * 2.0**-4, expert


def test_a_padded_batch_is_its_sequences() -> None:
    module, x, lengths = experts(), drawn(0, 3, 8), torch.tensor([8, 3, 1], dtype=torch.int32)
    model = fusible.Sequential(fusible.Residual(fusible.RMSNorm(FEATURES), module))
    y = model(x, lengths)
    for row, length in enumerate(lengths.tolist()):
        assert torch.allclose(y[row, :length], model(x[row, :length]), rtol=1e-5, atol=1e-6) and not y[row, length:].any()


def test_a_saved_model_goes_on_with_the_scales_of_its_experts() -> None:
    first, second = (fusible.Sequential(experts()) for _ in range(2))
    with fusible.autocast(recipe=fusible.DelayedScaling()):
        for seed in range(3):
            found(first, drawn(seed, 64), drawn(9, 64))
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        assert torch.equal(first(drawn(3, 64)), second(drawn(3, 64)))


def test_matrices_are_drawn_one_by_one() -> None:
    shapes: list[tuple[int, ...]] = []

    def drawing(matrix: Tensor) -> Tensor:
        shapes.append(tuple(matrix.shape))
        return nn.init.constant_(matrix, len(shapes))

    module = fusible.MixtureOfExperts(8, 16, 2, 1, activation="gelu", weight_init_method=drawing)
    assert shapes == [(2, 8), *[(16, 8)] * 2, *[(8, 16)] * 2]
    assert [p.flatten()[-1].item() for p in module.parameters()] == [1, 3, 5]


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(ArgumentError, match="the activation of MixtureOfExperts: expected one of gelu, .*, got 'step'; name one of these"):
        fusible.MixtureOfExperts(8, 8, 2, activation="step")
    with pytest.raises(ArgumentError, match="top_k of RouteTokens: expected from 1 to 2, the experts, got 3"):
        fusible.MixtureOfExperts(8, 8, 2, 3)
    with pytest.raises(ShapeError, match="expected 32 columns"):
        experts()(torch.randn(3, 8))
    with pytest.raises(NotServedError, match="this moves rows to where a router's values send them"):
        experts().compile("xla")(torch.randn(3, FEATURES))
