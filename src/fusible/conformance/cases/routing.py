"""Records of the router of a mixture of experts, token by token in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusible.conformance.table import Output, Sample, random, record
from fusible.tex.enums import NVTEQBHistogramMode

__all__ = ["Router", "SCORES", "bit_map", "byte_map"]

SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
_EXPERTS = 20


@dataclass(frozen=True)
class Router:
    """A way of choosing experts; calling it routes float64 logits."""

    score: str
    topk: int
    pre_softmax: bool = False
    groups: int | None = None
    group_topk: int | None = None
    scaling: float | None = None
    bias: Tensor | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """The call's arguments beside the logits."""
        return {
            "topk": self.topk,
            "use_pre_softmax": self.pre_softmax,
            "num_groups": self.groups,
            "group_topk": self.group_topk,
            "scaling_factor": self.scaling,
            "score_function": self.score,
            "expert_bias": self.bias,
        }

    def scores(self, logits: Tensor) -> Tensor:
        """float64 scores, differentiable; the logits themselves where the softmax comes last."""
        if self.score == "sigmoid":
            return torch.sigmoid(logits)
        if self.score == "sqrtsoftplus":
            return torch.sqrt(torch.log1p(torch.exp(logits)))
        return torch.softmax(logits, -1) if self.pre_softmax else logits

    def chosen(self, scores: list[float]) -> list[int]:
        """The experts of one token, the best first."""
        biased = [score + (self.bias[e].item() if self.bias is not None else 0.0) for e, score in enumerate(scores)]
        allowed = range(len(biased))
        if self.groups and self.group_topk:
            size, each = len(biased) // self.groups, self.topk // self.group_topk
            strength = [sum(sorted(biased[i * size : (i + 1) * size], reverse=True)[:each]) for i in range(self.groups)]
            best = sorted(range(self.groups), key=lambda i: (-strength[i], i))[: self.group_topk]
            allowed = sorted(e for i in best for e in range(i * size, (i + 1) * size))
        return sorted(allowed, key=lambda e: (-biased[e], e))[: self.topk]

    def weights(self, scores: Tensor, experts: list[int]) -> Tensor:
        """The weights of one token's ``experts``, differentiable."""
        values = scores[experts]
        if self.score == "softmax":
            values = values if self.pre_softmax else torch.softmax(values, -1)
        elif self.topk > 1:
            values = values / (values.sum() + 1e-20)
        return values * (1.0 if self.scaling is None else self.scaling)

    def __call__(self, logits: Tensor) -> tuple[Tensor, list[list[int]]]:
        """``(probs, experts)`` of float64 ``logits [T, E]``, differentiable."""
        rows, experts = [], []
        for row in logits:
            scores = self.scores(row)
            experts.append(self.chosen(scores.tolist()))
            rows.append(torch.zeros_like(row).index_put((torch.tensor(experts[-1]),), self.weights(scores, experts[-1])))
        return torch.stack(rows), experts

    def intermediate(self, logits: Tensor, probs: Tensor) -> Tensor:
        """What the backward reads, float64."""
        if self.score == "sqrtsoftplus":
            return logits
        if self.score == "softmax" and not self.pre_softmax:
            return torch.where(probs > 0, probs / (self.scaling or 1.0), -torch.inf)
        return self.scores(logits)


def byte_map(experts: list[list[int]], count: int) -> Tensor:
    """bool ``[tokens, count]``: whether a token goes to an expert."""
    return torch.tensor([[e in row for e in range(count)] for row in experts])


def bit_map(experts: list[list[int]], count: int) -> Tensor:
    """uint8 ``[tokens, count / 8]``: the same, a bit for each expert, the lowest first."""
    rows = [[sum(1 << e % 8 for e in row if e // 8 == byte) for byte in range(math.ceil(count / 8))] for row in experts]
    return torch.tensor(rows, dtype=torch.uint8)


_ROUTERS = {
    "softmax": Router("softmax", 3),
    "softmax top 1": Router("softmax", 1, scaling=0.5),
    "pre-softmax": Router("softmax", 4, pre_softmax=True, scaling=2.5),
    "pre-softmax groups": Router("softmax", 4, pre_softmax=True, groups=5, group_topk=2),
    "sigmoid": Router("sigmoid", 5),
    "sigmoid top 1": Router("sigmoid", 1, scaling=3.0),
    "sigmoid all": Router("sigmoid", _EXPERTS),
    "sigmoid groups bias": Router("sigmoid", 6, groups=4, group_topk=2, scaling=2.5, bias=torch.linspace(-0.5, 0.5, _EXPERTS)),
    "sqrtsoftplus": Router("sqrtsoftplus", 4, bias=torch.linspace(0.3, -0.3, _EXPERTS)),
    "sqrtsoftplus top 1": Router("sqrtsoftplus", 1),
}


def logits_of(generator: torch.Generator, dtype: torch.dtype, tokens: int = 6) -> Tensor:
    """Logits without ties: every row a permutation of well separated values, so that rounding moves none past another."""
    levels = torch.linspace(-3.0, 3.0, _EXPERTS).to(dtype)
    return torch.stack([levels[torch.randperm(_EXPERTS, generator=generator)] for _ in range(tokens)])


def forward_arguments(router: Router, logits: Tensor) -> dict[str, Any]:
    bias = None if router.bias is None else router.bias.clone()
    return {"logits": logits.clone(), **router.arguments, "expert_bias": bias}


@record("fused_topk_with_score_function_fwd")
def topk_forward(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for label, router in _ROUTERS.items():
        logits = logits_of(generator, dtype)
        probs, experts = router(logits.double())
        main = Output(0, probs, dtype, _EXPERTS)
        saved = Output(2, router.intermediate(logits.double(), probs), torch.float32, _EXPERTS)
        arguments = forward_arguments(router, logits)
        yield Sample(label, arguments, (main, Output(1, byte_map(experts, _EXPERTS)), saved))
        yield Sample(f"{label} as bits", {**arguments, "routing_map_format": 1}, (main, Output(1, bit_map(experts, _EXPERTS)), saved))
        for integer in (torch.int32, torch.int64):
            dense, given = torch.tensor(experts, dtype=integer), torch.full((len(experts), router.topk), -1, dtype=integer)
            outputs = (main, Output(1, dense), saved, Output("topk_indices", dense))
            yield Sample(f"{label} as {integer}", {**arguments, "topk_indices": given}, outputs)
    router, logits = _ROUTERS["sigmoid groups bias"], logits_of(generator, dtype)
    probs, experts = router(logits.double())
    outputs = (Output(0, probs.view(2, 3, -1), dtype, _EXPERTS), Output(1, byte_map(experts, _EXPERTS).view(2, 3, -1)))
    strided = logits.view(2, 3, -1).permute(2, 1, 0).contiguous().permute(2, 1, 0)
    yield Sample("[2, 3, E] strided", {**forward_arguments(router, logits), "logits": strided}, outputs)
    equal = torch.tensor([[1.0] * 9, [0.0, -0.0, 1.0, -0.0, 0.0, -1.0, -1.0, -1.0, 1.0], [2.0, 3.0, 3.0, 3.0, 2.0, 3.0, 1.0, 0.0, 3.0]])
    for score in SCORES:
        arguments = {**Router(score, 4).arguments, "logits": equal.to(dtype), "topk_indices": torch.zeros(3, 4, dtype=torch.int32)}
        lowest = torch.tensor([[0, 1, 2, 3], [2, 8, 0, 1], [1, 2, 3, 5]], dtype=torch.int32)
        yield Sample(f"{score} of equal scores", arguments, (Output("topk_indices", lowest),))


@record("fused_topk_with_score_function_bwd")
def topk_backward(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for label, router in _ROUTERS.items():
        point = logits_of(generator, dtype).double().requires_grad_()
        with torch.enable_grad():
            probs, experts = router(point)
        g = random(generator, tuple(point.shape), dtype)
        (wanted,) = torch.autograd.grad(probs, point, g.double())
        # The terms that cancel are at most the gradient times the scaling times 1 / (the sum of at least one score above 0.2).
        size = 5 * (router.scaling or 1.0) * g.abs().max().item()
        options = {"topk": router.topk, "use_pre_softmax": router.pre_softmax, "scaling_factor": router.scaling, "score_function": router.score}
        saved = router.intermediate(point.detach(), probs.detach()).float()
        forms = {
            "map": (byte_map(experts, _EXPERTS), {}),
            "bits": (bit_map(experts, _EXPERTS), {"routing_map_format": 1}),
            "indices": (torch.tensor(experts, dtype=torch.int32), {"use_dense_indices": True}),
        }
        for form, (routed, more) in forms.items():
            given = {"routing_map": routed, "intermediate_output": saved.clone(), "grad_probs": g.clone()}
            arguments = {**given, "grad_logits": torch.full(g.shape, math.nan, dtype=dtype), **options, **more}
            yield Sample(f"{label} by {form}", arguments, (Output("grad_logits", wanted, dtype, _EXPERTS, size), Output(None, None)))


_BINS, _LOWER, _UPPER = 8, -0.5, 0.5


def margins_of(router: Router, row: Tensor) -> tuple[Tensor, float, bool]:
    """One token's ``cutoff - score``, its cutoff (the best score that it does not choose), and whether rounding can move none of its scores past
    another nor past the bound of a bin."""
    scores = torch.sigmoid(row.double())
    assert router.bias is not None
    biased = (scores + router.bias.double()).sort(descending=True).values
    cutoff = biased[router.topk].item()
    edges = (cutoff - scores - _LOWER) * _BINS / (_UPPER - _LOWER)
    clear = (biased[:-1] - biased[1:]).min() > 1e-4 and (edges - edges.round()).abs().min() > 1e-4
    return cutoff - scores, cutoff, bool(clear)


@record("fused_topk_with_score_function_qb_fwd")
def balancing_forward(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    bias = random(generator, (_EXPERTS,), torch.float32, 0.1)
    router = Router("sigmoid", 3, scaling=2.0, bias=bias)
    rows, histogram, cutoffs = [], torch.full((_EXPERTS, _BINS), 100, dtype=torch.int32), []
    while len(rows) < 8:
        row = random(generator, (_EXPERTS,), dtype)
        margins, cutoff, clear = margins_of(router, row)
        if not clear:
            continue
        rows.append(row)
        cutoffs.append(cutoff)
        for e, margin in enumerate(margins.tolist()):
            histogram[e, min(max(math.floor((margin - _LOWER) * _BINS / (_UPPER - _LOWER)), 0), _BINS - 1)] += 1
    logits = torch.stack(rows)
    probs, experts = router(logits.double())
    indices = torch.tensor(experts)
    outputs = (
        Output(0, probs, dtype, _EXPERTS), Output(2, torch.sigmoid(logits.double()), length=_EXPERTS),
        Output(3, torch.tensor(cutoffs, dtype=torch.float64), length=2, magnitude=2.0), Output(4, histogram), Output("histogram", histogram),
    )  # fmt: skip
    for mode in NVTEQBHistogramMode:
        for form, (routed, more) in {
            "bytes": (byte_map(experts, _EXPERTS), {"routing_map_format": 0, "topk_indices": None}),
            "bits": (bit_map(experts, _EXPERTS), {"routing_map_format": 1, "topk_indices": None, "bin_bounds_validated": True}),
            "indices": (indices, {"routing_map_format": 0, "topk_indices": torch.zeros_like(indices)}),
        }.items():
            arguments = {
                "logits": logits.clone(), "topk": router.topk, "scaling_factor": router.scaling, "expert_bias": bias.clone(),
                "histogram": torch.full_like(histogram, 100), "bin_bounds": torch.tensor([_LOWER, _UPPER]), "histogram_mode": mode, **more,
            }  # fmt: skip
            given = (Output("topk_indices", indices),) if form == "indices" else ()
            yield Sample(f"{mode.name} {form}", arguments, (*outputs, Output(1, routed), *given))


def normalised(score: str, logits: Tensor) -> Tensor:
    """The scores of all experts, differentiable."""
    scores = Router(score, 1, pre_softmax=True).scores(logits)
    return scores if score == "softmax" else scores / (scores.sum(-1, keepdim=True) + 1e-20)


@record("fused_score_for_moe_aux_loss_fwd")
def scores_forward(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for score in SCORES:
        for topk in (1, 3):
            logits = logits_of(generator, dtype)
            wide = logits.double()
            best = [sorted(range(_EXPERTS), key=lambda e, row=row: -row[e].item())[:topk] for row in wide]
            saved = Output(2, Router(score, topk, pre_softmax=True).intermediate(wide, wide), length=_EXPERTS)
            for form, routed in enumerate((byte_map(best, _EXPERTS), bit_map(best, _EXPERTS))):
                arguments = {"logits": logits.clone(), "topk": topk, "score_function": score, "routing_map_format": form}
                yield Sample(f"{score} {topk} {form}", arguments, (Output(0, normalised(score, wide), length=_EXPERTS), Output(1, routed), saved))


@record("fused_score_for_moe_aux_loss_bwd")
def scores_backward(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for score in SCORES:
        point = logits_of(generator, dtype).double().requires_grad_()
        with torch.enable_grad():
            scores = normalised(score, point)
        g = random(generator, tuple(point.shape), torch.float32)
        (wanted,) = torch.autograd.grad(scores, point, g.double())
        saved = Router(score, 2, pre_softmax=True).intermediate(point.detach(), scores.detach()).float()
        arguments = {
            "intermediate_output": saved, "grad_scores": g, "grad_logits": torch.full(g.shape, math.nan, dtype=dtype), "topk": 2,
            "score_function": score,
        }  # fmt: skip
        yield Sample(score, arguments, (Output("grad_logits", wanted, dtype, _EXPERTS, 2.0), Output(None, None)))


_ROWS, _COLUMNS, _TOTAL, _COEFF = 14, 10, 1000, 0.01
_COUNTS = (torch.int32, torch.int64, torch.float32, torch.bfloat16)
_C = _COLUMNS * _COEFF / 3 / _TOTAL**2


def loss_forward(name: str, totals: tuple[Any, ...]) -> None:
    def sample(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
        for counts in _COUNTS:
            probs = torch.rand(_ROWS, _COLUMNS, generator=generator).to(dtype)
            tokens = torch.randint(0, 200, (_COLUMNS,), generator=generator).to(counts)
            loss = _C * (probs.double() * tokens.double()).sum()
            length = _ROWS * _COLUMNS
            outputs = (Output(0, loss, dtype, length), Output(1, torch.stack((loss.new_tensor(_C), loss)), length=length))
            for total in totals:
                arguments = {
                    "probs": probs.clone(), "tokens_per_expert": tokens.clone(), "num_experts": _COLUMNS, "num_rows": _ROWS, "num_cols": _COLUMNS,
                    "topk": 3, "coeff": _COEFF, "total_num_tokens": total.clone() if isinstance(total, Tensor) else total,
                }  # fmt: skip
                yield Sample(f"counts {counts}, total {total}", arguments, outputs)

    record(name)(sample)


loss_forward("fused_moe_aux_loss_fwd", (_TOTAL,))
loss_forward("fused_moe_aux_loss_fwd_graph_safe", (torch.tensor(_TOTAL), torch.tensor([_TOTAL], dtype=torch.int32)))


@record("fused_moe_aux_loss_bwd")
def loss_backward(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for counts in _COUNTS:
        tokens, constants = torch.randint(0, 200, (_COLUMNS,), generator=generator).to(counts), torch.tensor([_C, 0.5])
        wanted = (3 * constants[0].double() * tokens.double()).expand(_ROWS, _COLUMNS)
        given = {"Const_buf": constants, "tokens_per_expert": tokens, "num_rows": _ROWS, "num_cols": _COLUMNS}
        yield Sample(f"counts {counts}", {**given, "grad_aux_loss": torch.tensor(3.0, dtype=dtype)}, (Output(None, wanted, dtype),))
