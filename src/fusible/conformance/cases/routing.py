"""Records of the router of a mixture of experts, token by token in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
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
        """The arguments of the call, without the logits."""
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
        """Differentiable float64 scores; the logits themselves where the softmax is taken after the choice."""
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
        """The float64 tensor that the forward saves for the backward."""
        if self.score == "sqrtsoftplus":
            return logits
        if self.score == "softmax" and not self.pre_softmax:
            return torch.where(probs > 0, probs / (self.scaling or 1.0), -torch.inf)
        return self.scores(logits)


def byte_map(experts: list[list[int]], count: int) -> Tensor:
    """bool ``[tokens, count]``: whether a token goes to an expert."""
    return torch.tensor([[e in row for e in range(count)] for row in experts], dtype=torch.bool)


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
    "sigmoid three groups": Router("sigmoid", 6, groups=5, group_topk=3),
    "sqrtsoftplus": Router("sqrtsoftplus", 4, bias=torch.linspace(0.3, -0.3, _EXPERTS)),
    "sqrtsoftplus top 1": Router("sqrtsoftplus", 1),
}


def logits_of(generator: torch.Generator, dtype: torch.dtype, tokens: int = 6) -> Tensor:
    """Logits without ties. Every row is a permutation of well separated values, so that rounding does not change their order."""
    levels = torch.linspace(-3.0, 3.0, _EXPERTS).to(dtype)
    return torch.stack([levels[torch.randperm(_EXPERTS, generator=generator)] for _ in range(tokens)])


_MANY = 210
"""A number of tokens with more than 4,096 scores."""


def forward_arguments(router: Router, logits: Tensor) -> dict[str, Any]:
    bias = None if router.bias is None else router.bias.clone()
    return {"logits": logits.clone(), **router.arguments, "expert_bias": bias}


def extreme(dtype: torch.dtype) -> Tensor:
    """Logits of one token, large ones and an infinite one among them."""
    large = 6e4 if dtype is torch.float16 else 3e5
    return torch.cat([torch.tensor([math.inf, large, -large, -math.inf]), torch.linspace(-3.0, 3.0, _EXPERTS - 4)])[None].to(dtype)


def deeper(sample: Sample, tokens: int) -> Sample:
    """The sample with its tokens in two dimensions."""

    def parted(x: Any) -> Any:
        return x.view(tokens // 2, 2, *x.shape[1:]) if isinstance(x, Tensor) and x.dim() and len(x) == tokens else x

    arguments = {name: parted(x.clone() if isinstance(x, Tensor) else x) for name, x in sample.arguments.items()}
    outputs = tuple(replace(output, reference=parted(output.reference)) for output in sample.outputs)
    return Sample(f"{sample.label}, tokens in two dimensions", arguments, outputs)


@record("fused_topk_with_score_function_fwd")
def topk_forward(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for label, router in _ROUTERS.items():
        logits = logits_of(generator, dtype)
        probs, experts = router(logits.double())
        main = Output(0, probs, dtype, _EXPERTS)
        saved = Output(2, router.intermediate(logits.double(), probs), torch.float32, _EXPERTS)
        arguments = forward_arguments(router, logits)
        sample = Sample(label, arguments, (main, Output(1, byte_map(experts, _EXPERTS)), saved))
        yield sample
        if label == "sigmoid top 1":
            yield deeper(sample, len(logits))
        yield Sample(f"{label} as bits", {**arguments, "routing_map_format": 1}, (main, Output(1, bit_map(experts, _EXPERTS)), saved))
        for integer in (torch.int32, torch.int64):
            dense, indices = torch.tensor(experts, dtype=integer), torch.full((len(experts), router.topk), -1, dtype=integer)
            outputs = (main, Output(1, dense), saved, Output("topk_indices", dense))
            yield Sample(f"{label} as {integer}", {**arguments, "topk_indices": indices}, outputs)
    router, logits = _ROUTERS["sqrtsoftplus"], logits_of(generator, dtype, _MANY)
    probs, experts = router(logits.double())
    outputs = (Output(0, probs, dtype, _EXPERTS), Output(1, byte_map(experts, _EXPERTS)), Output(2, logits.double(), length=_EXPERTS))
    yield Sample("many tokens", forward_arguments(router, logits), outputs)
    lost = torch.full((1, _EXPERTS), math.nan, dtype=torch.float64)  # a softmax with NaN in it is NaN; which experts are chosen is not defined
    logits = lost.clone().to(dtype)
    logits[0, 3:] = 1.0
    yield Sample("NaN", forward_arguments(_ROUTERS["pre-softmax"], logits), (Output(2, lost),))
    large = extreme(dtype)
    router = Router("sqrtsoftplus", 1)
    yield Sample("extreme", forward_arguments(router, large), (Output(2, large.double()),))
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
    for label, router in (*_ROUTERS.items(), ("many tokens", _ROUTERS["sigmoid"])):
        point = logits_of(generator, dtype, _MANY if label == "many tokens" else 6).double().requires_grad_()
        with torch.enable_grad():
            probs, experts = router(point)
        g = random(generator, tuple(point.shape), dtype)
        (wanted,) = torch.autograd.grad(probs, point, g.double())
        # The cancelling terms are at most the gradient times the scaling over the sum of scores, of which at least one is above 0.2.
        size = 5 * (router.scaling or 1.0) * g.abs().max().item()
        options = {"topk": router.topk, "use_pre_softmax": router.pre_softmax, "scaling_factor": router.scaling, "score_function": router.score}
        saved = router.intermediate(point.detach(), probs.detach()).float()
        forms = {
            "map": (byte_map(experts, _EXPERTS), {}),
            "bits": (bit_map(experts, _EXPERTS), {"routing_map_format": 1}),
            "indices": (torch.tensor(experts, dtype=torch.int32), {"use_dense_indices": True}),
        }
        for form, (routed, more) in forms.items() if label != "many tokens" else [("map", forms["map"])]:
            inputs = {"routing_map": routed, "intermediate_output": saved.clone(), "grad_probs": g.clone()}
            arguments = {**inputs, "grad_logits": torch.full(g.shape, math.nan, dtype=dtype), **options, **more}
            sample = Sample(f"{label} by {form}", arguments, (Output("grad_logits", wanted, dtype, _EXPERTS, size), Output(None, None)))
            yield sample
            if label in ("softmax", "sigmoid groups bias", "sqrtsoftplus"):
                yield deeper(sample, 6)


_BINS, _LOWER, _UPPER = 8, -0.5, 0.5


def margins_of(router: Router, row: Tensor) -> tuple[Tensor, float, bool]:
    """One token's ``cutoff - score``; its cutoff, the best score of an expert that it does not choose; and whether rounding can change neither the
    order of its scores nor the bin of a margin."""
    scores = torch.sigmoid(row.double())
    assert router.bias is not None
    biased = (scores + router.bias.double()).sort(descending=True).values
    cutoff = biased[router.topk].item()
    edges = (cutoff - scores - _LOWER) * _BINS / (_UPPER - _LOWER)
    clear = (biased[:-1] - biased[1:]).min() > 1e-4 and (edges - edges.round()).abs().min() > 1e-4
    return cutoff - scores, cutoff, bool(clear)


def balanced(generator: torch.Generator, dtype: torch.dtype, router: Router, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """``(logits [count, E], histogram, cutoffs)`` of random rows that are clear by ``margins_of``."""
    rows, histogram, cutoffs = [], torch.full((_EXPERTS, _BINS), 100, dtype=torch.int32), []
    while len(rows) < count:
        row = random(generator, (_EXPERTS,), dtype)
        margins, cutoff, clear = margins_of(router, row)
        if not clear:
            continue
        rows.append(row)
        cutoffs.append(cutoff)
        bins = ((margins - _LOWER) * _BINS / (_UPPER - _LOWER)).floor().clamp(0, _BINS - 1).long()
        histogram[torch.arange(_EXPERTS), bins] += 1
    return torch.stack(rows) if rows else torch.zeros(0, _EXPERTS, dtype=dtype), histogram, torch.tensor(cutoffs, dtype=torch.float64)


@record("fused_topk_with_score_function_qb_fwd")
def balancing_forward(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    bias = random(generator, (_EXPERTS,), torch.float32, 0.1)
    every = tuple(NVTEQBHistogramMode)
    for topk, scaling, count in ((3, 2.0, 8), (4, -1e6, 2), (2, 3e38, 1), (3, 2.0, _MANY), (3, 2.0, 0)):
        router = Router("sigmoid", topk, scaling=scaling, bias=bias)
        logits, histogram, cutoffs = balanced(generator, dtype, router, count)
        probs, experts = router(logits.double()) if count else (logits.double(), [])
        indices = torch.tensor(experts, dtype=torch.int64).view(count, topk)
        outputs = (
            Output(0, probs, dtype, _EXPERTS), Output(2, torch.sigmoid(logits.double()), length=_EXPERTS),
            Output(3, cutoffs, length=2, magnitude=2.0), Output(4, histogram), Output("histogram", histogram),
        )  # fmt: skip
        forms = {
            "bytes": (byte_map(experts, _EXPERTS).view(count, _EXPERTS), {"routing_map_format": 0, "topk_indices": None}),
            "bits": (bit_map(experts, _EXPERTS).view(count, -(-_EXPERTS // 8)), {"routing_map_format": 1, "bin_bounds_validated": True}),
            "indices": (indices, {"routing_map_format": 0, "topk_indices": torch.zeros_like(indices)}),
        }  # fmt: skip
        for mode in every if count == 8 else every[:1]:
            for form, (routed, more) in forms.items() if count == 8 else list(forms.items())[:1]:
                arguments = {
                    "logits": logits.clone(), "topk": topk, "scaling_factor": scaling, "expert_bias": bias.clone(), "topk_indices": None,
                    "histogram": torch.full_like(histogram, 100), "bin_bounds": torch.tensor([_LOWER, _UPPER]), "histogram_mode": mode, **more,
                }  # fmt: skip
                indices_output = (Output("topk_indices", indices),) if form == "indices" else ()
                sample = Sample(f"{mode.name} {form}, {count} tokens, top {topk}", arguments, (*outputs, Output(1, routed), *indices_output))
                yield sample
                if count == 8 and mode == every[0]:
                    yield deeper(sample, count)
    arguments = {
        **arguments,
        "logits": torch.full((1, _EXPERTS), math.nan, dtype=dtype),
        "histogram": torch.zeros(_EXPERTS, _BINS, dtype=torch.int32),
    }
    yield Sample("NaN", arguments, (Output(2, torch.full((1, _EXPERTS), math.nan, dtype=torch.float64)),), ("histogram",))


def normalised(score: str, logits: Tensor) -> Tensor:
    """The scores of all experts, differentiable."""
    scores = Router(score, 1, pre_softmax=True).scores(logits)
    return scores if score == "softmax" else scores / (scores.sum(-1, keepdim=True) + 1e-20)


@record("fused_score_for_moe_aux_loss_fwd")
def scores_forward(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for score, topk in itertools.product(SCORES, (1, 3)):
        logits = logits_of(generator, dtype, _MANY if (score, topk) == ("sigmoid", 3) else 6)
        wide = logits.double()
        best = [sorted(range(_EXPERTS), key=lambda e, row=row: -row[e].item())[:topk] for row in wide]
        saved = Output(2, Router(score, topk, pre_softmax=True).intermediate(wide, wide), length=_EXPERTS)
        for form, routed in enumerate((byte_map(best, _EXPERTS), bit_map(best, _EXPERTS))):
            arguments = {"logits": logits.clone(), "topk": topk, "score_function": score, "routing_map_format": form}
            outputs = (Output(0, normalised(score, wide), length=_EXPERTS), Output(1, routed), saved)
            sample = Sample(f"{score} {topk} {form}", arguments, outputs)
            yield sample
            if topk == 3:
                yield deeper(sample, len(logits))
    lost = torch.full((1, _EXPERTS), math.nan, dtype=dtype)
    for score, logits in (("softmax", lost), ("sqrtsoftplus", extreme(dtype))):
        arguments = {"logits": logits.clone(), "topk": 1, "score_function": score, "routing_map_format": 0}
        outputs = (Output(2, logits.double(), length=_EXPERTS), *([Output(0, lost.double())] if score == "softmax" else []))
        yield Sample(f"{score} of extreme logits", arguments, outputs)


@record("fused_score_for_moe_aux_loss_bwd")
def scores_backward(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for score, topk, count in (("softmax", 2, 6), ("sigmoid", 2, _MANY), ("sqrtsoftplus", 2, 6), ("sigmoid", 1, 6), ("sqrtsoftplus", 1, 6)):
        logits = logits_of(generator, dtype, count).double()
        scores, pullback, *_ = torch.func.vjp(partial(normalised, score), logits)
        g = random(generator, tuple(logits.shape), torch.float32)
        (wanted,) = pullback(g.double())
        saved = Router(score, topk, pre_softmax=True).intermediate(logits, scores).float()
        arguments = {
            "intermediate_output": saved, "grad_scores": g, "grad_logits": torch.full(g.shape, math.nan, dtype=dtype), "topk": topk,
            "score_function": score,
        }  # fmt: skip
        sample = Sample(f"{score} {topk}, {count} tokens", arguments, (Output("grad_logits", wanted, dtype, _EXPERTS, 2.0), Output(None, None)))
        yield sample
        if topk == 2:
            yield deeper(sample, count)


@dataclass(frozen=True)
class Loss:
    """An auxiliary loss: ``coeff * experts / (topk * total^2)`` of the sum of probabilities times counts. ``last`` is the last probability."""

    rows: int = 14
    columns: int = 10
    experts: int = 10
    topk: int = 3
    total: int = 1000
    coeff: float = 0.01
    last: float = 0.5

    @property
    def constant(self) -> float:
        return self.experts * self.coeff / self.topk / self.total**2


_LOSSES = {
    torch.int32: Loss(), torch.int64: Loss(5, 12, 24, 2, 700, -0.02), torch.float32: Loss(coeff=1e9), torch.bfloat16: Loss(3, 4, last=math.nan),
    torch.float64: Loss(last=math.inf),
}  # fmt: skip
"""By the dtype of the counts. float64 stands for a second loss with float32 counts."""


def counted(generator: torch.Generator, loss: Loss, of: torch.dtype) -> Tensor:
    """Counts of tokens, none of them 0."""
    return torch.randint(1, 200, (loss.columns,), generator=generator).to(torch.float32 if of is torch.float64 else of)


def loss_forward(generator: torch.Generator, dtype: torch.dtype, tensors: tuple[Any, ...]) -> Iterator[Sample]:
    for counts, each in _LOSSES.items():
        probs = torch.rand(each.rows, each.columns, generator=generator).to(dtype)
        probs[-1, -1] = each.last
        tokens = counted(generator, each, counts)
        loss = each.constant * (probs.double() * tokens.double()).sum()
        length = probs.numel()
        outputs = (Output(0, loss, dtype, length), Output(1, torch.stack((loss.new_tensor(each.constant), loss)), length=length))
        for make in tensors:
            arguments = {
                "probs": probs.clone(), "tokens_per_expert": tokens.clone(), "num_experts": each.experts, "num_rows": each.rows,
                "num_cols": each.columns, "topk": each.topk, "coeff": each.coeff, "total_num_tokens": make(each.total),
            }  # fmt: skip
            yield Sample(f"counts {counts}, total {arguments['total_num_tokens']}", arguments, outputs)


record("fused_moe_aux_loss_fwd")(partial(loss_forward, tensors=(int,)))
_TOTALS = (torch.tensor, lambda total: torch.tensor([total], dtype=torch.int32))
record("fused_moe_aux_loss_fwd_graph_safe")(partial(loss_forward, tensors=_TOTALS))


@record("fused_moe_aux_loss_bwd")
def loss_backward(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    gradients = {torch.int32: 3.0, torch.int64: -3e14, torch.float32: math.inf, torch.bfloat16: math.nan, torch.float64: -2.0}
    for counts, each in _LOSSES.items():
        each = replace(each, rows=70, columns=64) if counts is torch.float64 else each
        tokens, constants = counted(generator, each, counts), torch.tensor([_LOSSES[torch.int32].constant, 0.5])
        gradient = torch.tensor(gradients[counts], dtype=dtype)
        wanted = (gradient.double() * constants[0].double() * tokens.double()).expand(each.rows, each.columns)
        inputs = {"Const_buf": constants, "tokens_per_expert": tokens, "num_rows": each.rows, "num_cols": each.columns}
        yield Sample(f"counts {counts}", {**inputs, "grad_aux_loss": gradient}, (Output(None, wanted, dtype),))
