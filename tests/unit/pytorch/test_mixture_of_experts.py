"""``MixtureOfExperts`` against float64, in every recipe and form of batch."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fusible
from fusible.errors import ArgumentError, NotServedError, ShapeError
from fusible.pytorch.quantized_init import quantized_model_init
from fusible.quantized import GroupedTensor
from fusible.quantized.saving import flatten_state_dict, unflatten_state_dict

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


ROUTERS: dict[str, dict[str, Any]] = {
    "sigmoid": {"top_k": 3},
    "not normalized": {"top_k": 3, "normalized": False, "scaling_factor": 2.5},
    "one of them": {"top_k": 1, "normalized": False},
    "bias": {"top_k": 3, "expert_bias": True},
    "groups": {"top_k": 4, "groups": 4, "top_groups": 2, "expert_bias": True, "scaling_factor": 2.5},
    "three groups": {"top_k": 3, "groups": 4, "top_groups": 3},
    "softmax in groups": {"top_k": 4, "groups": 4, "top_groups": 2, "score_function": "softmax", "scaling_factor": 0.5},
    "softmax over all in groups": {"top_k": 2, "groups": 2, "top_groups": 1, "score_function": "softmax", "normalized": False},
}


def experts(top_k: int = 2, activation: str = "swiglu", dtype: torch.dtype | None = None, count: int = EXPERTS, **options: Any) -> Any:
    torch.manual_seed(0)
    return fusible.MixtureOfExperts(FEATURES, INNER, count, top_k, activation=activation, param_dtype=dtype, **options)


def routed(dtype: torch.dtype | None = None, **options: Any) -> Any:
    """Eight experts, chosen by sigmoids unless the options say otherwise."""
    module = experts(dtype=dtype, count=8, **{"score_function": "sigmoid", **options})
    for buffer in module.buffers():
        buffer.copy_(torch.linspace(-0.3, 0.3, 8))
    return module


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, FEATURES, generator=torch.Generator().manual_seed(seed))


def reference(module: fusible.MixtureOfExperts, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Every expert of every token in float64, of which those are added that the token goes to."""
    x = x.detach().double().requires_grad_()
    router, up, down = (p.detach().double().requires_grad_() for p in module.parameters())
    probs, chosen = choice(module, x @ router.T)
    each = torch.einsum("...eh,enh->...en", ACTIVATIONS[module.activation](torch.einsum("...h,enh->...en", x, up)), down)
    y = (probs[..., None] * each.gather(-2, chosen[..., None].expand(*chosen.shape, FEATURES))).sum(-2)
    y.backward(dy.double())
    grads = {"x": x.grad, "router_weight": router.grad, "up_weight": up.grad, "down_weight": down.grad}
    return {"y": y.detach(), **{name: grad for name, grad in grads.items() if grad is not None}}


def choice(module: Any, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The probabilities of each token's experts, and which these are, one token after another."""
    by = module._ops[0]
    scores = logits.sigmoid() if by.score_function == "sigmoid" else logits if by.normalized else logits.softmax(-1)
    biased = scores.detach() + (0 if by.expert_bias is None else module.expert_bias.double())
    chosen = torch.empty(*logits.shape[:-1], by.top_k, dtype=torch.int64)
    for row, place in zip(biased.view(-1, biased.shape[-1]), chosen.view(-1, by.top_k), strict=True):
        allowed = torch.arange(len(row))
        if by.groups:
            of_group = row.view(by.groups, -1).sort(descending=True).values[:, : by.top_k // by.top_groups].sum(1)
            best = of_group.argsort(descending=True)[: by.top_groups]
            allowed = allowed[torch.isin(allowed // (len(row) // by.groups), best)]
        place.copy_(allowed[row[allowed].argsort(descending=True)[: by.top_k]])
    probs = scores.gather(-1, chosen)
    if by.normalized:
        probs = probs / probs.sum(-1, keepdim=True) if by.score_function == "sigmoid" else probs.softmax(-1)
    return probs * (by.scaling_factor or 1.0), chosen


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


@pytest.mark.parametrize("router", ROUTERS)
def test_other_routers_choose_and_weigh_as_their_options_say(router: str) -> None:
    module, dy = routed(**ROUTERS[router]), drawn(9, 40)
    for seed in range(3):
        ours, wanted = found(module, drawn(seed, 40), dy), reference(module, drawn(seed, 40), dy)
        assert ours["router_weight"].any()
        assert apart(ours, wanted) < 16 * 2.0**-24 * 64**0.5


def test_a_bias_of_experts_chooses_and_weighs_nothing() -> None:
    """It is no parameter, is saved, and what is written to it counts from the next call on."""
    module, x = routed(top_k=2, expert_bias=True), drawn(0, 40)
    assert [name for name, _ in module.named_buffers()] == ["expert_bias"] and module.expert_bias.dtype is torch.float32
    assert "expert_bias" in module.state_dict() and "expert_bias" not in dict(module.named_parameters())
    before = module(x)
    module.expert_bias.add_(3.0)
    assert torch.equal(module(x), before)
    module.expert_bias[5] += 10.0
    assert not torch.equal(module(x), before)
    assert apart({"y": module(x).detach()}, {"y": reference(module, x, drawn(9, 40))["y"].float()}) < 2.0**-18
    copied = copy.deepcopy(module)
    copied.expert_bias.zero_()
    assert not torch.equal(copied(x), module(x))
    copied.load_state_dict(module.state_dict())
    assert torch.equal(copied(x), module(x))


def test_a_router_in_fp32_chooses_among_logits_that_bf16_cannot_tell_apart() -> None:
    """Two experts' rows differ by less than bf16 has, which a router in fp32 sees."""
    module = routed(torch.bfloat16, top_k=2, router_dtype=torch.float32)
    assert [p.dtype for p in module.parameters()] == [torch.float32, torch.bfloat16, torch.bfloat16]
    with torch.no_grad():
        module.router_weight[:] = module.router_weight[0] * (1 + 2.0**-14 * torch.arange(8)[:, None])
    x = drawn(0, 40).to(torch.bfloat16)
    logits = x.double() @ module.router_weight.detach().double().T
    router = module._ops[0].with_(weight=fusible.nvte.make_nvte_tensor(module.router_weight), x_dtype=None, y_dtype=fusible.nvte.DType.BFloat16)
    _, _, sides = router.forward(fusible.nvte.make_nvte_tensor(x))
    wanted = logits.topk(2, -1).indices
    assert (sides["experts"].data.long() == wanted).float().mean() > 0.95 and wanted.unique().numel() > 2
    ours = found(module, x, drawn(9, 40).to(torch.bfloat16))
    assert ours["y"].dtype is torch.bfloat16 and ours["router_weight"].dtype is torch.float32


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_router_of_sigmoids_is_not_quantized(recipe: str) -> None:
    module, x, dy = routed(**ROUTERS["groups"]), drawn(0, 64), drawn(9, 64)
    with fusible.autocast(recipe=RECIPES[recipe]):
        for _ in range(2):
            ours = found(module, x, dy)
    wanted = reference(module, x, dy)
    assert apart({"y": ours["y"]}, {"y": wanted["y"]}) < 3 * 2.0**-4 and apart(ours, wanted) < 6 * 2.0**-4


WRONG_ROUTERS = [
    ({"score_function": "tanh"}, "score_function of RouteTokens: expected softmax or sigmoid, got 'tanh'; name one of these"),
    ({"top_k": 1}, "top_k of RouteTokens: expected at least 2 with normalized sigmoids, got 1; pass normalized=False"),
    ({"score_function": "softmax", "expert_bias": True}, r"expert_bias of RouteTokens: expected score_function='sigmoid', and \[8\], got softmax"),
    ({"groups": 4}, "groups and top_groups of RouteTokens: expected groups that divide the 8 experts, .*, got 4 and None"),
    ({"groups": 3, "top_groups": 1}, "groups and top_groups of RouteTokens: expected groups .*, got 3 and 1; change"),
    ({"groups": 4, "top_groups": 3}, "a number of them that divides top_k 2 into no more than a group has, got 4 and 3"),
    ({"groups": 8, "top_groups": 1}, "that divides top_k 2 into no more than a group has, got 8 and 1"),
    ({"scaling_factor": float("nan")}, "scaling_factor of RouteTokens: expected .*, got nan"),
    ({"router_dtype": torch.float16}, "router_dtype of MixtureOfExperts: expected torch.float32 or None, got torch.float16"),
]


@pytest.mark.parametrize(("options", "message"), WRONG_ROUTERS)
def test_a_router_that_cannot_be_is_one_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message) as caught:
        routed(**options)
    assert "\n" not in str(caught.value)


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


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_expert_is_a_layer_for_all_tokens(recipe: str) -> None:
    module, dy, x = experts(1, count=1), drawn(9, 64), drawn(0, 64)
    with fusible.autocast(recipe=RECIPES[recipe]):
        found(module, x, dy)
        ours = found(module, x, dy)
    assert apart({"y": ours["y"]}, {"y": reference(module, x, dy)["y"]}) < 3 * 2.0**-4


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


HELD: dict[str, Any] = {**RECIPES, "nvfp4": fusible.NVFP4BlockScaling(disable_stochastic_rounding=True)}


def held(recipe: str) -> fusible.Sequential:
    """A mixture whose experts are held as ``recipe`` quantizes them, and get gradients."""
    with quantized_model_init(recipe=HELD[recipe]):
        return fusible.Sequential(fusible.Residual(fusible.RMSNorm(FEATURES), experts()))


def step(model: nn.Module, recipe: str, seed: int, call: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    x = drawn(seed, 64).requires_grad_()
    model.zero_grad()
    with fusible.autocast(recipe=HELD[recipe]):
        y = (call or model)(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("recipe", HELD)
def test_experts_are_held_in_8_bits_as_one_and_train(recipe: str) -> None:
    """Made within ``quantized_model_init`` they are what each becomes by itself; gradients are those of weights in high precision that hold these
    values, and steps write to them."""
    model, plain = held(recipe), fusible.Sequential(fusible.Residual(fusible.RMSNorm(FEATURES), experts()))
    pairs = [(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True) if p.dim() == 3]
    wanted: Any = fusible.quantize_parameters(copy.deepcopy(plain), recipe=HELD[recipe]).get_submodule("0.1")
    for weight, (p, _) in zip(("up_weight", "down_weight"), pairs, strict=True):
        assert type(p) is GroupedTensor and p.requires_grad
        assert torch.equal(p.dequantize(), torch.stack([wanted.get_parameter(f"{weight}{i}").dequantize() for i in range(EXPERTS)]))
    assert torch.equal(model(drawn(3, 64)), fusible.quantize_parameters(copy.deepcopy(plain), recipe=HELD[recipe])(drawn(3, 64)))
    with torch.no_grad():
        for p, q in pairs:
            q.copy_(p.dequantize())  # type: ignore[operator]
    if recipe not in ("delayed", "current"):  # weights are scaled by what was seen before, or by another rounding of the same largest magnitude
        assert all(map(torch.equal, step(model, recipe, 0), step(plain, recipe, 0)))
    before = [p.dequantize().clone() for p, _ in pairs]
    optimizer = fusible.FusedAdam(model.parameters(), lr=0.01)
    losses = []
    for seed in range(8):
        losses.append(step(model, recipe, seed % 2)[0].square().sum().item())
        optimizer.step()
    assert losses[-1] < losses[0] and not any(torch.equal(p.dequantize(), b) for (p, _), b in zip(pairs, before, strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's, of what goes from piece to piece
@pytest.mark.parametrize("recipe", HELD)
def test_experts_held_in_8_bits_go_where_others_go(recipe: str) -> None:
    """By whoever runs the passes, into copies and files, and out of them."""
    model, file = held(recipe), io.BytesIO()
    step(model, recipe, 5)
    state = copy.deepcopy(model.state_dict())
    torch.save(model.state_dict(), file)
    tensors = flatten_state_dict(model.state_dict())
    wanted = step(model, recipe, 0)
    file.seek(0)
    ways: dict[str, Callable[[nn.Module], Any]] = {
        "torch.compile": lambda other: torch.compile(other, backend="aot_eager"),
        "checkpoint": lambda other: lambda x: checkpoint(other, x, use_reentrant=False),
        "functional_call": lambda other: lambda x: torch.func.functional_call(other, dict(other.named_parameters()), (x,)),
    }
    others = {"saved": torch.load(file, weights_only=True), "flattened": unflatten_state_dict(*tensors)}
    for name in (*ways, *others, "deepcopy", "pickle"):
        torch._dynamo.reset()
        other = held(recipe)
        with torch.no_grad():
            other.get_submodule("0.1").up_weight.mul_(0.5)
        other.load_state_dict(others.get(name, state))
        other = {"deepcopy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model))}.get(name, lambda model: model)(other)
        assert all(map(torch.equal, step(other, recipe, 0, ways[name](other) if name in ways else None), wanted)), name
    torch._dynamo.reset()


def test_what_experts_were_before_they_were_held_in_8_bits_is_kept_where_that_is_asked_for() -> None:
    with quantized_model_init(recipe=HELD["mxfp8"], preserve_high_precision_init_val=True):
        module = experts()
    assert torch.equal(module.up_weight.get_high_precision_init_val(), experts().up_weight)
    module.reset_parameters()
    assert type(module.up_weight) is GroupedTensor


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
