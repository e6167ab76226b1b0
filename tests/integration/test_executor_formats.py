"""Both executors give the same numbers under every recipe: products of quantized operands, attention, experts, and what is rounded at random.

Tolerances are those of ``test_executors``: where fp32 sums differ by their order, a value may be rounded to the other side.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

import fusible.pytorch as fp
import fusible.pytorch.ops as te
from fusible.quantized import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    QuantizedTensor,
    QuantizerRole,
)
from fusible.tex import DType

pytest.importorskip("jaxlib")

H, TOKENS, GROUPS, STEPS = 32, 64, 3, 2
WORK = math.sqrt(2 * H) * torch.finfo(torch.float32).eps
ROUNDINGS = 8
BOUND = ROUNDINGS * (WORK + math.sqrt(WORK * 0.5))
"""For a step of half the value, FP4's, which is the coarsest."""
BF16 = BOUND + ROUNDINGS * math.sqrt(WORK * 2.0**-8) + 2.0**-8

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2


def mixed(role: QuantizerRole) -> Any:
    """A format of its own for each direction and operand."""
    if role.tensor_type == "weight":
        return HybridQuantizer(rowwise_quantizer=MXFP8Quantizer(E4M3), columnwise_quantizer=Float8CurrentScalingQuantizer(E4M3, "cpu"))
    if role.tensor_type == "input":
        return HybridQuantizer(rowwise_quantizer=MXFP8Quantizer(E4M3), columnwise_quantizer=IdentityQuantizer())
    parts = {"rowwise_quantizer": MXFP8Quantizer(E5M2), "columnwise_quantizer": Float8BlockQuantizer(E4M3, block_scaling_dim=1)}
    return HybridQuantizer(**parts, columnwise_source="rowwise_dequantized")


RECIPES: dict[str, Any] = {
    "plain": None,
    "delayed": fp.DelayedScaling(),
    "current": fp.Float8CurrentScaling(),
    "mxfp8": fp.MXFP8BlockScaling(),
    "mxfp8-2d": fp.MXFP8BlockScaling(enable_2d_quantization=True),
    "block": fp.Float8BlockScaling(),
    "nvfp4": fp.NVFP4BlockScaling(),
    "nvfp4-over6": fp.NVFP4BlockScaling(nvfp4_4over6="all", disable_rht=True, disable_stochastic_rounding=True),
    "hybrid": fp.CustomRecipe(qfactory=mixed),
    "identity": fp.CustomRecipe(qfactory=lambda role: IdentityQuantizer()),
}


def mlp() -> Any:
    return fp.Sequential(fp.Residual(fp.LayerNorm(H), fp.Linear(H, 2 * H), fp.GELU(), fp.Linear(2 * H, H)))


def gated() -> Any:
    return te.Sequential(te.RMSNorm(H), te.Linear(H, 4 * H, bias=False), te.SwiGLU(), te.Linear(2 * H, H, bias=False))


def attention() -> Any:
    return fp.Sequential(fp.Residual(fp.RMSNorm(H), fp.Linear(H, 3 * H), fp.MultiHeadedSelfAttention(H, 4), fp.Linear(H, H)))


def reshaped() -> Any:
    return te.Sequential(te.Reshape((-1, 8, H)), te.Linear(H, H), te.Reshape((-1, H)), te.Linear(H, H))


def experts() -> Any:
    return te.Sequential(te.GroupedLinear(GROUPS, H, H), te.GroupedLinear(GROUPS, H, H, single_grouped_weight=True))


MODELS: dict[str, Any] = {"mlp": mlp, "gated": gated, "attention": attention, "reshaped": reshaped, "experts": experts}
SIZES = ((32, 0, 32), (0, 64, 0), (32, 32, 0))


def twins(build: Any, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    torch.manual_seed(7)
    eager, compiled = build().to(dtype), build().to(dtype)
    compiled.load_state_dict(eager.state_dict())
    compiled.compile("xla")
    return eager, compiled


def results(model: Any, x: Tensor, dy: Tensor, recipe: Any, *extra: Any) -> list[Tensor]:
    """``y``, ``dx`` and the gradients of the parameters; random numbers begin anew."""
    torch.manual_seed(11)
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    with fp.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(leaf, *extra)
    (y.dequantize() * dy if isinstance(y, QuantizedTensor) else y * dy).sum().backward()
    return [y.detach(), leaf.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]


def check(both: Iterable[list[Tensor]], bound: float) -> None:
    eager, compiled = both
    for a, b in zip(eager, compiled, strict=True):
        assert a.dtype is b.dtype and a.shape == b.shape
        assert (b.double() - a.double()).norm() <= bound * a.double().norm() + 1e-30


def executables(model: Any) -> int:
    """Of all pipelines of a model."""
    return sum(runner.executor.compiled for runner in (model._runners.values() if hasattr(model, "_runners") else model._arranged()))


def cases() -> list[Any]:
    of_experts = {"delayed", "current", "mxfp8", "block", "nvfp4"}
    found = [(model, recipe) for model in MODELS for recipe in RECIPES if model != "experts" or recipe in of_experts]
    whole = "mlp", "reshaped", "experts"
    return [(model, recipe) for model, recipe in found if model in whole or recipe == ("mxfp8" if model == "gated" else "hybrid")]


@pytest.mark.parametrize(("model", "recipe"), cases())
def test_forward_and_backward_agree_and_are_one_program_each(model: str, recipe: str) -> None:
    eager, compiled = twins(MODELS[model])
    generator = torch.Generator().manual_seed(3)
    x, dy = (torch.randn(TOKENS, H, generator=generator) for _ in range(2))
    for sizes in SIZES[:STEPS] if model == "experts" else [None] * STEPS:
        extra = [torch.tensor(sizes)] * 2 if sizes is not None else []
        check([results(each, x, dy, RECIPES[recipe], *extra) for each in (eager, compiled)], BOUND)
    assert executables(compiled) == 2 + (recipe not in ("plain", "identity")), "forward, backward, and the quantization of the weights"


@pytest.mark.parametrize("recipe", ["mxfp8", "block", "nvfp4", "nvfp4-over6"])
def test_models_in_bfloat16_agree(recipe: str) -> None:
    x, dy = (torch.randn(TOKENS, H, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in (1, 2))
    check([results(model, x, dy, RECIPES[recipe]) for model in twins(mlp, torch.bfloat16)], BF16)


def test_rounding_at_random_draws_anew_at_every_run_what_the_eager_pass_draws() -> None:
    eager, compiled = twins(lambda: fp.Sequential(fp.Linear(H, H), fp.Linear(H, H)))
    x, dy = (torch.randn(TOKENS, H, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    drawn: list[list[Tensor]] = []
    for model in (eager, compiled):
        torch.manual_seed(9)
        with fp.autocast(recipe=RECIPES["nvfp4"]):
            drawn.append([torch.autograd.grad((model(x) * dy).sum(), [model[0].weight])[0] for _ in range(3)])
    check(drawn, BOUND)
    assert not torch.equal(drawn[1][0], drawn[1][1])


def test_rows_of_nobody_are_zero_and_groups_need_no_whole_blocks() -> None:
    _, compiled = twins(lambda: te.Sequential(te.GroupedLinear(GROUPS, H, H)))
    x = torch.randn(TOKENS, H, generator=torch.Generator().manual_seed(3))
    bias = torch.randn(GROUPS, H)
    with torch.no_grad():
        for i in range(GROUPS):
            getattr(compiled[0], f"bias{i}").copy_(bias[i])
        with fp.autocast(recipe=RECIPES["mxfp8"]):
            y = compiled(x, torch.tensor([5, 0, 40]))
            alone = te.Sequential(te.Linear(H, H))
            alone[0].weight.copy_(compiled[0].weight2)
            alone[0].bias.copy_(bias[2])
            expected = alone(torch.cat([x[5:45], torch.zeros(24, H)]))[:40]
    assert not y[45:].any()
    assert (y[5:45] - expected).norm() <= BOUND * expected.norm()


@pytest.mark.parametrize("recipe", ["delayed", "current", "mxfp8", "block", "hybrid"])
def test_a_last_op_that_quantizes_gives_a_quantized_tensor(recipe: str) -> None:
    eager, compiled = twins(lambda: te.Sequential(te.Linear(H, H), te.Quantize(forward=True, backward=True)))
    x, dy = (torch.randn(TOKENS, H, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    first, second = (results(model, x, dy, RECIPES[recipe]) for model in (eager, compiled))
    assert type(first[0]) is type(second[0]) and isinstance(second[0], QuantizedTensor)
    check([first, second], BOUND)
    with torch.no_grad(), fp.autocast(recipe=RECIPES[recipe]):
        assert isinstance(compiled(x), QuantizedTensor)
