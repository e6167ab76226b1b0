"""Records of ``prim.attention`` with the options that NVIDIA's functions lack, in float64. Dropout follows the documented random numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusible.conformance.cases.attention import Inputs, Problem, hidden, inputs_of, largest_of, log_sum_exp, pages, rounding
from fusible.conformance.cases.dropout import drawn
from fusible.conformance.table import Output, Sample, random, record
from fusible.tex.enums import NVTE_Bias_Type, NVTE_QKV_Layout

__all__ = []

_SEED = 42
_BIASED = NVTE_Bias_Type.NVTE_POST_SCALE_BIAS
_THD = NVTE_QKV_Layout.NVTE_THD_THD_THD


@dataclass(frozen=True)
class Beyond:
    """A problem with a soft cap, ALiBi slopes, and dropout of a share of the probabilities, whose random numbers begin at an offset."""

    problem: Problem
    cap: float | None = None
    slopes: tuple[float, ...] | None = None
    dropped: float = 0.0
    offset: int = 0

    @property
    def label(self) -> str:
        return self.problem.label


_CASES = (
    Beyond(Problem("a cap", lengths=(5, 5)), cap=0.7),
    Beyond(Problem("a cap, causal, two kv heads, a window", causal=True, groups=2, lengths=(7, 7), window=(3, -1), scale=-0.2), cap=1.5),
    Beyond(Problem("a cap and a bias", bias=_BIASED, lengths=(5, 5)), cap=0.5),
    Beyond(Problem("slopes", lengths=(6, 6)), slopes=(0.5, 0.25, 0.3, 0.0)),
    Beyond(Problem("slopes from the end, causal", lengths=(3, 3), keys=(5, 5), causal=True, end=True), slopes=(0.5, 0.25, 0.3, 0.1)),
    Beyond(Problem("thd, a cap and slopes", _THD, causal=True, lengths=(5, 2, 7)), cap=2.0, slopes=(1.0, 0.25, 0.3, 0.125)),
    Beyond(Problem("dropped", lengths=(5, 5), scale=0.45), dropped=0.4, offset=3),
    Beyond(Problem("dropped, thd, causal, two kv heads", _THD, causal=True, groups=2, lengths=(4, 6)), dropped=0.25),
    Beyond(Problem("dropped, more keys", lengths=(3, 3), keys=(7, 7)), dropped=0.5, offset=1),
    Beyond(Problem("dropped, a cap, a bias and slopes", bias=_BIASED, lengths=(5, 5)), 0.9, (0.1, 0.2, 0.3, 0.4), 0.3, 2),
)


@dataclass
class Worked:
    """One sequence in float64: operands with K and V repeated for each head, scores, the derivative of the cap, and the factors of dropout."""

    q: Tensor
    k: Tensor
    v: Tensor
    scores: Tensor
    slope: Tensor
    kept: Tensor


def worked(case: Beyond, x: Inputs) -> list[Worked]:
    problem, found = case.problem, []
    most, heads = (max(problem.lengths), max(problem.of_keys)), x.q[0].shape[1]
    for b, (q, k, v) in enumerate(zip(x.q, x.k, x.v, strict=True)):
        q, (k, v) = q.double(), (t.double().repeat_interleave(heads // problem.groups, 1) for t in (k, v))
        raw = problem.scale * torch.einsum("ihd,jhd->hij", q, k)
        share = torch.zeros_like(raw) if case.cap is None else torch.tanh(raw / case.cap)
        scores = raw if case.cap is None else case.cap * share
        queries, keys = scores.shape[1:]
        if x.bias is not None:
            scores = scores + x.bias[0].double()
        if case.slopes is not None:
            ahead = keys - queries if problem.end else 0
            distance = (torch.arange(queries)[:, None] + ahead - torch.arange(keys)).abs()
            scores = scores - torch.tensor(case.slopes, dtype=torch.float64)[:, None, None] * distance
        scores = scores.masked_fill(hidden(problem, queries, keys), -torch.inf)
        kept = torch.ones_like(scores)
        if case.dropped:
            every = torch.tensor(drawn(_SEED, case.offset * 2**40, (b + 1) * heads * math.prod(most), case.dropped))
            kept = every.view(b + 1, heads, *most)[b, :, :queries, :keys] / (1 - case.dropped)
        found.append(Worked(q, k, v, scores, 1 - share.square(), kept.double()))
    return found


def arguments(case: Beyond, x: Inputs) -> dict[str, Any]:
    common, problem = x.arguments, case.problem
    return {
        "q": common["Q"], "k": common["K"], "v": common["V"], "bias": x.bias, "seed": torch.tensor([_SEED]) if case.dropped else None,
        **{name: common[name] for name in ("cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv", "qkv_layout", "attn_mask_type")},
        "window_size": common["window_size"], "scale": problem.scale, "soft_cap": case.cap, "alibi_slopes": case.slopes,
        "probability": case.dropped, "offset": case.offset,
    }  # fmt: skip


def steepness(found: list[Worked]) -> float:
    """The largest score, at least 1. The relative error of ``exp(x)`` is ``x`` times that of ``x``."""
    return max(1.0, largest_of([each.scores for each in found]))


@record("prim_attention")
def prim_attention(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for case in _CASES:
        x = inputs_of(case.problem, generator, dtype)
        found, problem = worked(case, x), case.problem
        stats = [log_sum_exp(each.scores) for each in found]
        o = [torch.einsum("hij,jhe->ihe", torch.exp(e.scores - s[..., None]) * e.kept, e.v) for e, s in zip(found, stats, strict=True)]
        length, size = problem.width + max(problem.of_keys), steepness(found)
        outputs = (
            Output(0, problem.join(o, between=0.0), dtype, length, rounding(dtype, largest_of(x.v) / (1 - case.dropped), length) * size),
            Output(1, problem.statistics(stats), torch.float32, length, 8.0 * size),
        )
        yield Sample(case.label, {**arguments(case, x), "page_table": None}, outputs)
    yield paged(generator, dtype)


def paged(generator: torch.Generator, dtype: torch.dtype) -> Sample:
    """Keys and values in a paged cache, whose one table is that of both."""
    case = Beyond(Problem("pages", lengths=(3, 3), keys=(6, 9)))
    sample = pages(generator, dtype, case.problem, 4, 3, one_table=True)
    own = {**sample.arguments, "scale": sample.arguments["attn_scale"], "page_table": sample.arguments["page_table_k"]}
    own |= {name.lower(): sample.arguments[name] for name in ("Q", "K", "V")}
    others = arguments(case, inputs_of(case.problem, generator, dtype))
    return Sample(sample.label, {**{name: own.get(name, value) for name, value in others.items()}, "page_table": own["page_table"]}, sample.outputs)


@record("prim_attention_backward")
def prim_attention_backward(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for case in _CASES:
        x = inputs_of(case.problem, generator, dtype)
        found, problem = worked(case, x), case.problem
        stats = [log_sum_exp(each.scores).float() for each in found]
        p = [torch.exp(each.scores - s.double()[..., None]) for each, s in zip(found, stats, strict=True)]
        o = [torch.einsum("hij,jhe->ihe", share * each.kept, each.v).to(dtype) for share, each in zip(p, found, strict=True)]
        do = [torch.randn(t.shape, generator=generator).to(dtype) for t in o]
        sums: dict[str, list[Tensor]] = {name: [] for name in ("q", "k", "v", "scores")}
        for each, share, result, d in zip(found, p, o, do, strict=True):
            groups, delta = problem.groups, (d.double() * result.double()).sum(-1).T
            ds = share * (torch.einsum("ihe,jhe->hij", d.double(), each.v) * each.kept - delta[..., None])
            inner = problem.scale * ds * each.slope
            dk, dv = torch.einsum("hij,ihd->jhd", inner, each.q), torch.einsum("hij,ihe->jhe", share * each.kept, d.double())
            both = (t.unflatten(1, (groups, t.shape[1] // groups)).sum(2) for t in (dk, dv))
            for name, value in zip(sums, (torch.einsum("hij,jhd->ihd", inner, each.k), *both, ds), strict=True):
                sums[name].append(value)
        length = problem.width + max(*problem.lengths, *problem.of_keys) * (4 // problem.groups)
        largest = largest_of([t for name in "qkv" for t in sums[name]])
        size = (8.0 + rounding(dtype, largest * max(problem.lengths) / (1 - case.dropped), length)) * steepness(found)
        parts = [Output(i, problem.join(sums[name], between=0.0), dtype, length, size) for i, name in enumerate("qkv")]
        parts.append(Output(3, torch.stack(sums["scores"]).sum(0)[None] if x.bias is not None else None, dtype, length, size))
        more = {"do": problem.join(do), "o": problem.join(o), "stats": problem.statistics([s.double() for s in stats]).float()}
        yield Sample(case.label, {**more, **arguments(case, x)}, tuple(parts))


@record("prim_attention_merge")
def prim_attention_merge(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    """Of two sets of keys of equal weight, of very unequal ones, of one query and of none."""
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    for shape, spread in (((2, 7, 3, 5), 1.0), ((1, 64, 4, 32), 30.0), ((3, 1, 1, 1), 4.0), ((2, 0, 3, 4), 1.0)):
        o, o_step = random(generator, shape, dtype), random(generator, shape, dtype)
        lse, lse_step = (spread * random(generator, (shape[0], shape[2], shape[1], 1), wide) for _ in range(2))
        lse[:, :, ::3], lse_step[:, :, ::2] = -math.inf, -math.inf  # queries that have seen no key in one, or in neither
        both = torch.stack([lse.double(), lse_step.double()])
        total = both.logsumexp(0)
        first, second = ((part - total).exp().masked_fill(total == -math.inf, 0.0).transpose(1, 2) for part in both)
        merged = first * o.double() + second * o_step.double()
        outputs = Output(0, merged, dtype, 8, spread * 8), Output(1, total, wide, 8, spread * 8)
        yield Sample(f"{list(shape)}", {"o": o, "lse": lse, "o_step": o_step, "lse_step": lse_step}, outputs)
