"""The router against itself token by token in float64: choice, weights, gradients, ties, histograms, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tex_backends import Runner, on_backends
from torch import Tensor

from fusible.conformance.cases.routing import SCORES, Router, bit_map, byte_map
from fusible.conformance.table import FLOATS, close
from fusible.errors import ArgumentError, DTypeError, ShapeError

FORWARD = "fused_topk_with_score_function_fwd"
BACKWARD = "fused_topk_with_score_function_bwd"
ROUTERS = on_backends(FORWARD, BACKWARD)
TOKENS, EXPERTS = 12, 20

CASES = {
    "softmax": Router("softmax", 3),
    "softmax top 1": Router("softmax", 1, scaling=0.5),
    "pre-softmax": Router("softmax", 4, pre_softmax=True, scaling=2.5),
    "pre-softmax groups": Router("softmax", 4, pre_softmax=True, groups=5, group_topk=2),
    "sigmoid": Router("sigmoid", 5),
    "sigmoid top 1": Router("sigmoid", 1, scaling=3.0),
    "sigmoid all": Router("sigmoid", EXPERTS),
    "sigmoid groups bias": Router("sigmoid", 6, groups=4, group_topk=2, scaling=2.5, bias=torch.linspace(-0.5, 0.5, EXPERTS)),
    "sigmoid no group": Router("sigmoid", 2, groups=3, group_topk=0),
    "sqrtsoftplus": Router("sqrtsoftplus", 4, bias=torch.linspace(0.3, -0.3, EXPERTS)),
    "sqrtsoftplus top 1": Router("sqrtsoftplus", 1),
}
EACH = pytest.mark.parametrize("router", [pytest.param(router, id=name) for name, router in CASES.items()])
TYPES = pytest.mark.parametrize("dtype", FLOATS)


def logits_of(dtype: torch.dtype, seed: int = 3, shape: tuple[int, ...] = (TOKENS, EXPERTS), spread: float = 3.0) -> Tensor:
    """Logits without ties: every row a permutation of well separated values, so that rounding moves none past another."""
    generator = torch.Generator().manual_seed(seed)
    rows = math.prod(shape[:-1])
    levels = torch.linspace(-spread, spread, shape[-1]).to(dtype)
    return torch.stack([levels[torch.randperm(shape[-1], generator=generator)] for _ in range(rows)]).view(shape)


@ROUTERS
@EACH
@TYPES
def test_probs_map_and_intermediate_are_those_of_the_reference(runner: Runner, router: Router, dtype: torch.dtype) -> None:
    logits = logits_of(dtype)
    probs, experts = router(logits.double())
    got, routing_map, intermediate = runner(FORWARD, logits=logits, **router.arguments)
    close(got, probs, dtype, EXPERTS)
    assert got.dtype is dtype and routing_map.dtype is torch.bool and intermediate.dtype is torch.float32
    mask = byte_map(experts, EXPERTS)
    assert torch.equal(routing_map, mask)
    assert not got[~mask].any()
    if router.score == "sqrtsoftplus":
        assert torch.equal(intermediate, logits.float())
        assert intermediate.data_ptr() != logits.data_ptr()
    elif router.score == "softmax" and not router.pre_softmax:
        unscaled = probs / (router.scaling or 1.0)
        close(intermediate[mask], unscaled[mask], torch.float32, EXPERTS)
        assert (intermediate[~mask] == -math.inf).all()
    else:
        close(intermediate, router.scores(logits.double()), torch.float32, EXPERTS)


@ROUTERS
@EACH
def test_the_map_as_bits_and_as_indices_says_the_same(runner: Runner, router: Router) -> None:
    logits = logits_of(torch.float32)
    _, experts = router(logits.double())
    probs, bits, _ = runner(FORWARD, logits=logits, **router.arguments, routing_map_format=1)
    assert torch.equal(bits, bit_map(experts, EXPERTS))
    for dtype in (torch.int32, torch.int64):
        indices = torch.full((TOKENS, router.topk), -1, dtype=dtype)
        dense, returned, _ = runner(FORWARD, logits=logits, **router.arguments, topk_indices=indices)
        assert returned is indices and torch.equal(dense, probs)
        assert indices.tolist() == experts


@ROUTERS
@EACH
@TYPES
def test_the_gradient_is_that_of_autograd(runner: Runner, router: Router, dtype: torch.dtype) -> None:
    logits = logits_of(dtype)
    point = logits.double().requires_grad_()
    probs, experts = router(point)
    g = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(5)).to(dtype)
    (expected,) = torch.autograd.grad(probs, point, g.double())
    indices = torch.tensor(experts, dtype=torch.int32)
    forms = [(byte_map(experts, EXPERTS), 0, False), (bit_map(experts, EXPERTS), 1, False), (indices, 0, True)]
    intermediate = runner(FORWARD, logits=logits, **router.arguments)[2]
    for routing_map, map_format, dense in forms:
        grad_logits = torch.full((TOKENS, EXPERTS), math.nan, dtype=dtype)
        wanted = {"topk": router.topk, "use_pre_softmax": router.pre_softmax, "scaling_factor": router.scaling, "score_function": router.score}
        call = {"routing_map": routing_map, "intermediate_output": intermediate, "grad_probs": g, "grad_logits": grad_logits, **wanted}
        assert runner(BACKWARD, **call, use_dense_indices=dense, routing_map_format=map_format) is None
        # The terms that cancel are at most the gradient times the scaling times 1 / (the sum of at least one score above 0.2).
        close(grad_logits, expected, dtype, EXPERTS, 5 * (router.scaling or 1.0) * g.abs().max().item())


@ROUTERS
@pytest.mark.parametrize("score", SCORES)
def test_of_equal_scores_the_lowest_index_comes_first(runner: Runner, score: str) -> None:
    logits = torch.tensor([[1.0] * 9, [0.0, -0.0, 1.0, -0.0, 0.0, -1.0, -1.0, -1.0, 1.0], [2.0, 3.0, 3.0, 3.0, 2.0, 3.0, 1.0, 0.0, 3.0]])
    indices = torch.zeros(3, 4, dtype=torch.int32)
    runner(FORWARD, logits=logits, **Router(score, 4).arguments, topk_indices=indices)
    assert indices.tolist() == [[0, 1, 2, 3], [2, 8, 0, 1], [1, 2, 3, 5]]
    grouped = Router(score, 2, groups=3, group_topk=1)
    indices = torch.zeros(3, 2, dtype=torch.int32)
    runner(FORWARD, logits=torch.ones(3, 9), **grouped.arguments, topk_indices=indices)
    assert indices.tolist() == [[0, 1]] * 3
    across = torch.zeros(1, 4, dtype=torch.int32)  # the last group is the stronger one, and its best equals the first group's
    logits = torch.tensor([[1.0, 0.0, -5.0, -5.0, 1.0, 0.5]])
    runner(FORWARD, logits=logits, **Router(score, 4, groups=3, group_topk=2).arguments, topk_indices=across)
    assert across.tolist() == [[0, 4, 5, 1]]


@ROUTERS
def test_negative_scores_and_infinities_keep_their_order(runner: Runner) -> None:
    logits = torch.tensor([[-math.inf, -3.0, -1e-40, 0.0, 1e-40, 5.0, math.inf, -7.0]])
    indices = torch.zeros(1, 8, dtype=torch.int64)
    runner(FORWARD, logits=logits, **Router("softmax", 8).arguments, topk_indices=indices)
    assert indices.tolist() == [[6, 5, 4, 3, 2, 1, 7, 0]]


@ROUTERS
def test_leading_dimensions_and_strides_are_kept(runner: Runner) -> None:
    logits = logits_of(torch.float32, shape=(2, 3, EXPERTS))
    router = CASES["sigmoid groups bias"]
    flat = runner(FORWARD, logits=logits.view(6, EXPERTS), **router.arguments, routing_map_format=1)
    strided = logits.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    for whole in (logits, strided):
        for got, expected in zip(runner(FORWARD, logits=whole, **router.arguments, routing_map_format=1), flat, strict=True):
            assert got.shape[:2] == (2, 3) and torch.equal(got.reshape(6, -1), expected)
    none = runner(FORWARD, logits=logits[:0], **router.arguments)
    assert [list(result.shape) for result in none] == [[0, 3, EXPERTS]] * 3


@ROUTERS
def test_the_gradient_of_sqrtsoftplus_vanishes_far_below_zero(runner: Runner) -> None:
    """There the score and the sigmoid underflow; their quotient is the derivative, exp(x / 2) / 2, below anything that fp32 holds."""
    logits = torch.tensor([[-400.0, 1.0, 40.0, -120.0]])
    grad_logits = torch.zeros(1, 4)
    call = {"routing_map": torch.ones(1, 4, dtype=torch.bool), "intermediate_output": logits, "grad_probs": torch.ones(1, 4)}
    options = {"topk": 1, "use_pre_softmax": False, "scaling_factor": None, "score_function": "sqrtsoftplus"}
    runner(BACKWARD, **call, grad_logits=grad_logits, **options)
    x = logits.double()
    close(grad_logits, torch.sigmoid(x) / (2 * torch.log1p(torch.exp(x)).sqrt()), torch.float32)
    assert grad_logits[0, 0] == 0


AUX = on_backends("fused_score_for_moe_aux_loss_fwd", "fused_score_for_moe_aux_loss_bwd")


@AUX
@TYPES
@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("score", SCORES)
def test_scores_for_the_balancing_loss_and_their_gradient(runner: Runner, score: str, topk: int, dtype: torch.dtype) -> None:
    logits = logits_of(dtype)
    point = logits.double().requires_grad_()
    scores = Router(score, topk, pre_softmax=True).scores(point)
    scores = scores if score == "softmax" else scores / (scores.sum(-1, keepdim=True) + 1e-20)
    got, routing_map, intermediate = runner("fused_score_for_moe_aux_loss_fwd", logits=logits, topk=topk, score_function=score)
    assert got.dtype is intermediate.dtype is torch.float32
    close(got, scores.detach(), torch.float32, EXPERTS)
    best = [sorted(range(EXPERTS), key=lambda e: -row[e].item())[:topk] for row in logits.double()]
    assert torch.equal(routing_map, byte_map(best, EXPERTS))
    bits = runner("fused_score_for_moe_aux_loss_fwd", logits=logits, topk=topk, score_function=score, routing_map_format=1)[1]
    assert torch.equal(bits, bit_map(best, EXPERTS))
    got.zero_()  # the three results, and the logits, share no memory
    g = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(6))
    (expected,) = torch.autograd.grad(scores, point, g.double())
    grad_logits = torch.full_like(logits, math.nan)
    call = {"intermediate_output": intermediate, "grad_scores": g, "grad_logits": grad_logits, "topk": topk, "score_function": score}
    assert runner("fused_score_for_moe_aux_loss_bwd", **call) is None
    close(grad_logits, expected, dtype, EXPERTS, 2.0)


def refused(runner: Runner, kind: type[Exception], function: str, **arguments: Any) -> None:
    with pytest.raises(kind, match=": expected .*; "):
        runner(function, **arguments)


@ROUTERS
def test_what_does_not_fit_is_refused_before_anything_is_written(runner: Runner) -> None:
    logits, good = torch.zeros(2, 8), Router("sigmoid", 2).arguments
    for changes in (
        {"topk": 0},
        {"topk": 9},
        {"score_function": "tanh"},
        {"num_groups": 3, "group_topk": 1},
        {"num_groups": None, "group_topk": 1},
        {"num_groups": 4, "group_topk": 5},
        {"topk": 3, "num_groups": 4, "group_topk": 2},
        {"topk": 8, "num_groups": 4, "group_topk": 2},
        {"score_function": "softmax", "expert_bias": torch.zeros(8)},
    ):
        refused(runner, ArgumentError, FORWARD, logits=logits, **{**good, **changes})
    refused(runner, ArgumentError, FORWARD, logits=logits, **good, routing_map_format=2)
    refused(runner, ShapeError, FORWARD, logits=logits, **{**good, "expert_bias": torch.zeros(7)})
    refused(runner, DTypeError, FORWARD, logits=logits.double(), **good)
    refused(runner, ShapeError, FORWARD, logits=logits, **good, topk_indices=torch.zeros(2, 3, dtype=torch.int32))
    refused(runner, DTypeError, FORWARD, logits=logits, **good, topk_indices=torch.zeros(2, 2))
    written = torch.full((2, 8), 7.0)
    call = {"routing_map": torch.ones(2, 8, dtype=torch.bool), "intermediate_output": torch.zeros(2, 8), "grad_probs": torch.zeros(2, 8)}
    options = {"topk": 2, "use_pre_softmax": False, "scaling_factor": None, "score_function": "sigmoid"}
    for changes in ({"routing_map": torch.ones(2, 1, dtype=torch.bool)}, {"intermediate_output": torch.zeros(2, 7)}, {"grad_logits": torch.zeros(8)}):
        refused(runner, ShapeError, BACKWARD, **{**call, "grad_logits": written, **changes}, **options)
    refused(runner, DTypeError, BACKWARD, **{**call, "routing_map": torch.ones(2, 8)}, grad_logits=written, **options)
    refused(runner, ShapeError, BACKWARD, **call, grad_logits=written, **options, routing_map_format=1)
    assert (written == 7).all()
