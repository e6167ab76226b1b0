"""The load-balancing loss, and the router that counts for quantile balancing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tex_backends import Runner, on_backends
from torch import Tensor

from fusible.conformance.cases.routing import Router, bit_map
from fusible.conformance.table import FLOATS, close
from fusible.errors import ArgumentError, DTypeError, ShapeError
from fusible.tex import NVTEQBHistogramMode

LOSSES = on_backends("fused_moe_aux_loss_fwd", "fused_moe_aux_loss_fwd_graph_safe", "fused_moe_aux_loss_bwd")
QB = "fused_topk_with_score_function_qb_fwd"
BALANCING = on_backends(QB)
ROWS, EXPERTS, TOPK, COEFF, TOTAL = 14, 10, 3, 0.01, 1000


@LOSSES
@pytest.mark.parametrize("counts", [torch.int32, torch.int64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_balancing_loss_and_its_gradient(runner: Runner, dtype: torch.dtype, counts: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    probs = torch.rand(ROWS, EXPERTS, generator=generator).to(dtype)
    tokens = torch.randint(0, 200, (EXPERTS,), generator=generator).to(counts)
    sizes = {"num_experts": EXPERTS, "num_rows": ROWS, "num_cols": EXPERTS, "topk": TOPK, "coeff": COEFF}
    call = {"probs": probs, "tokens_per_expert": tokens, **sizes}
    loss, constants = runner("fused_moe_aux_loss_fwd", **call, total_num_tokens=TOTAL)
    c = EXPERTS * COEFF / TOPK / TOTAL**2
    expected = c * (probs.double() * tokens.double()).sum()
    assert loss.shape == () and loss.dtype is dtype and constants.shape == (2,)
    close(loss, expected, dtype, ROWS * EXPERTS)
    close(constants, torch.stack((torch.tensor(c, dtype=torch.float64), expected)), torch.float32, ROWS * EXPERTS)
    for total in (torch.tensor(TOTAL), torch.tensor([TOTAL], dtype=torch.int32)):
        safe = runner("fused_moe_aux_loss_fwd_graph_safe", **call, total_num_tokens=total)
        assert torch.equal(safe[0], loss) and torch.equal(safe[1], constants)
    grad = torch.tensor(3.0, dtype=dtype)
    of_probs = runner("fused_moe_aux_loss_bwd", Const_buf=constants, tokens_per_expert=tokens, num_rows=ROWS, num_cols=EXPERTS, grad_aux_loss=grad)
    assert of_probs.dtype is dtype and of_probs.is_contiguous()
    close(of_probs, (3 * c * tokens.double()).expand(ROWS, EXPERTS), dtype)


@LOSSES
def test_the_loss_refuses_shapes_that_do_not_fit(runner: Runner) -> None:
    sizes = {"num_experts": 4, "num_rows": 2, "num_cols": 4, "topk": 1, "coeff": 1.0}
    for probs, tokens in ((torch.ones(3, 4), torch.ones(4)), (torch.ones(2, 4), torch.ones(3))):
        with pytest.raises(ShapeError):
            runner("fused_moe_aux_loss_fwd", probs=probs, tokens_per_expert=tokens, total_num_tokens=5, **sizes)
    with pytest.raises(ShapeError):
        total = torch.ones(2, dtype=torch.int64)
        runner("fused_moe_aux_loss_fwd_graph_safe", probs=torch.ones(2, 4), tokens_per_expert=torch.ones(4), total_num_tokens=total, **sizes)


def counted(scores: Tensor, cutoff: Tensor, bins: int, lower: float, upper: float) -> Tensor:
    """The histogram of ``cutoff - score``, one pair of token and expert at a time."""
    counts = torch.zeros(scores.shape[1], bins, dtype=torch.int32)
    for t, row in enumerate(scores):
        for e, score in enumerate(row):
            margin = cutoff[t] - score  # fp32, as the function has it, so that a margin next to a bound falls on the same side
            counts[e, min(max(math.floor((margin.item() - lower) * bins / (upper - lower)), 0), bins - 1)] += 1
    return counts


@BALANCING
@pytest.mark.parametrize("mode", list(NVTEQBHistogramMode))
@pytest.mark.parametrize("dense", [False, True])
def test_the_balancing_router_is_the_sigmoid_router_and_counts_margins(runner: Runner, mode: int, dense: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(17, EXPERTS, generator=generator)
    bias = torch.randn(EXPERTS, generator=generator) * 0.1
    router = Router("sigmoid", TOPK, scaling=2.0, bias=bias)
    plain = runner("fused_topk_with_score_function_fwd", logits=logits, **router.arguments, routing_map_format=1)
    histogram = torch.full((EXPERTS, 8), 100, dtype=torch.int32)
    indices = torch.zeros(17, TOPK, dtype=torch.int32) if dense else None
    probs, routed, intermediate, cutoff, returned = runner(
        QB,
        logits=logits,
        topk=TOPK,
        scaling_factor=2.0,
        expert_bias=bias,
        routing_map_format=1,
        topk_indices=indices,
        histogram=histogram,
        bin_bounds=torch.tensor([-0.5, 0.5]),
        histogram_mode=mode,
    )
    assert torch.equal(probs, plain[0]) and torch.equal(intermediate, plain[2]) and returned is histogram
    assert routed is indices if indices is not None else torch.equal(routed, plain[1])
    if indices is not None:
        assert torch.equal(bit_map(indices.tolist(), EXPERTS), plain[1])
    passed_over = (intermediate + bias).sort(-1, descending=True).values[:, TOPK]
    assert cutoff.shape == (17,) and torch.equal(cutoff, passed_over)
    expected = counted(intermediate, cutoff, 8, -0.5, 0.5)
    assert torch.equal(histogram - 100, expected)
    assert expected.sum() == 17 * EXPERTS and expected[:, 0].any() and expected[:, -1].any()


@BALANCING
def test_the_balancing_router_refuses_before_it_writes(runner: Runner) -> None:
    histogram, indices = torch.zeros(4, 8, dtype=torch.int32), torch.full((3, 2), 9, dtype=torch.int32)
    good: dict[str, Any] = {
        "logits": torch.zeros(3, 4),
        "topk": 2,
        "scaling_factor": None,
        "expert_bias": torch.zeros(4),
        "routing_map_format": 0,
        "topk_indices": indices,
        "histogram": histogram,
        "bin_bounds": torch.tensor([-1.0, 1.0]),
        "histogram_mode": 0,
    }
    for name, value in (
        ("expert_bias", torch.zeros(0)),
        ("expert_bias", torch.zeros(3)),
        ("histogram", torch.zeros(3, 8, dtype=torch.int32)),
        ("histogram", torch.zeros(4, 8)),
        ("histogram", torch.zeros(8, 4, dtype=torch.int32).t()),
        ("bin_bounds", torch.tensor([1.0, -1.0])),
        ("bin_bounds", torch.tensor([0.0, math.inf])),
        ("bin_bounds", torch.tensor([0.0, math.nan])),
        ("bin_bounds", torch.zeros(3)),
        ("topk", 5),
        ("topk", 4),
        ("topk_indices", torch.zeros(3, 3, dtype=torch.int32)),
    ):
        with pytest.raises((ArgumentError, DTypeError), match=": expected .*; "):
            runner(QB, **{**good, name: value})
    assert not histogram.any() and (indices == 9).all()
    runner(QB, **good)
    assert histogram.sum() == 12
