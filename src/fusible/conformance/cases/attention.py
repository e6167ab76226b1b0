"""Records of attention. Scores and sums are computed in float64 from the arguments; for the backward these include O and Stats of the forward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusible.conformance.cases.attention_drawn import BACKWARD, CALL, FORWARD, drawn_backward, drawn_forward
from fusible.conformance.cases.attention_eight_bits import quantized_backward, quantized_forward
from fusible.conformance.table import Output, Sample, random, record
from fusible.tex.enums import NVTE_Bias_Type, NVTE_Mask_Type, NVTE_QKV_Format, NVTE_QKV_Layout, NVTE_Softmax_Type

__all__ = []

_SCALE = 0.3
_HEADS = 4
_B, _F, _L, _S = NVTE_Bias_Type, NVTE_QKV_Format, NVTE_QKV_Layout, NVTE_Softmax_Type
_ORDERS = {"BSHD": (0, 1, 2, 3), "SBHD": (1, 0, 2, 3), "BHSD": (0, 2, 1, 3)}


@dataclass(frozen=True)
class Problem:
    """Sequences of equal lengths in ``[b, s, h, d]`` or ``[s, b, h, d]``, or of any lengths in ``[t, h, d]``, ``gap`` unused tokens after each.

    ``keys``: the lengths of K and V, where they differ from those of Q. ``end``: masks are aligned to the last key. ``form``: the format of O and dO,
    where it differs.
    """

    label: str
    layout: NVTE_QKV_Layout = _L.NVTE_BSHD_BSHD_BSHD
    causal: bool = False
    groups: int = _HEADS
    lengths: tuple[int, ...] = (8, 8)
    keys: tuple[int, ...] = ()
    scale: float = _SCALE
    window: tuple[int, int] = (-1, -1)
    end: bool = False
    softmax: NVTE_Softmax_Type = _S.NVTE_VANILLA_SOFTMAX
    bias: NVTE_Bias_Type = _B.NVTE_NO_BIAS
    gap: int = 0
    form: str = ""
    width: int = 16

    @property
    def packed(self) -> bool:
        return self.layout == _L.NVTE_THD_THD_THD

    @property
    def hides(self) -> bool:
        """Whether some query does not see some key. What NaN becomes there is not defined."""
        return self.causal or self.packed or self.window != (-1, -1)

    @property
    def name(self) -> str:
        return "THD" if self.packed else "SBHD" if self.layout == _L.NVTE_SBHD_SBHD_SBHD else "BSHD"

    @property
    def mask(self) -> NVTE_Mask_Type:
        parts = ["PADDING"] * self.packed + ["CAUSAL"] * self.causal + ["BOTTOM_RIGHT"] * (self.causal and self.end)
        return NVTE_Mask_Type[f"NVTE_{'_'.join(parts) or 'NO'}_MASK"]

    @property
    def of_keys(self) -> tuple[int, ...]:
        return self.keys or self.lengths

    def join(self, sequences: list[Tensor], name: str = "", between: float = 77.0) -> Tensor:
        """Sequences ``[s, h, d]`` in the problem's layout, or in the one named. ``between`` fills unused tokens."""
        if self.packed:
            return torch.cat([torch.nn.functional.pad(x, (0, 0, 0, 0, 0, self.gap), value=between) for x in sequences])
        longest = max(len(x) for x in sequences)
        whole = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, longest - len(x)), value=between) for x in sequences]
        return torch.stack(whole).permute(_ORDERS[name or self.name]).contiguous()

    def statistics(self, sequences: list[Tensor], between: float = 0.0) -> Tensor:
        """One value per head and query, each ``[h, s]``, in the layout of the interface: ``[b, h, s, 1]`` or ``[t, h, 1]``."""
        return self.join([x.T[..., None] for x in sequences], "BHSD", between)


_PROBLEMS = (
    Problem("bshd"),
    Problem("sbhd causal", _L.NVTE_SBHD_SBHD_SBHD, causal=True),
    Problem("bshd causal, two kv heads", causal=True, groups=2),
    Problem("thd causal", _L.NVTE_THD_THD_THD, causal=True, lengths=(5, 2, 7)),
    Problem("thd", _L.NVTE_THD_THD_THD, lengths=(40, 33)),
    Problem("thd with gaps", _L.NVTE_THD_THD_THD, lengths=(3, 4), gap=2, width=12),
    Problem("bshd window, another scale", scale=-0.2, window=(2, 1)),
    Problem("sbhd off by one", _L.NVTE_SBHD_SBHD_SBHD, causal=True, softmax=_S.NVTE_OFF_BY_ONE_SOFTMAX),
    Problem("learnable offsets, two kv heads", groups=2, softmax=_S.NVTE_LEARNABLE_SOFTMAX),
    Problem("off by one, nothing hidden", softmax=_S.NVTE_OFF_BY_ONE_SOFTMAX),
    Problem("more keys, from their end", lengths=(3, 3), keys=(7, 7), window=(2, 1), end=True),
    Problem("more keys, from their beginning", lengths=(3, 3), keys=(7, 7), window=(2, 1)),
    Problem("more keys, causal from their end", lengths=(3, 3), keys=(7, 7), causal=True, end=True),
    Problem("bias before scaling", bias=_B.NVTE_PRE_SCALE_BIAS, lengths=(5, 5)),
    Problem("bias after scaling", bias=_B.NVTE_POST_SCALE_BIAS, lengths=(5, 5)),
    Problem("another format of O", lengths=(5, 5), form="SBHD", width=12),
)


def hidden(problem: Problem, queries: int, keys: int) -> Tensor:
    """Which keys a query does not see, ``[i, j]``."""
    ahead = torch.arange(keys)[None] - torch.arange(queries)[:, None] - (keys - queries if problem.end else 0)
    left, right = (n if n >= 0 else keys + queries for n in problem.window)
    return (ahead > (0 if problem.causal else right)) | (ahead < -left)


@dataclass
class Inputs:
    """The operands of a problem, a tensor per sequence."""

    problem: Problem
    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    bias: Tensor | None
    offset: Tensor | None
    arguments: dict[str, Any]

    def steepness(self) -> float:
        """The largest score, at least 1. The relative error of ``exp(x)`` is ``x`` times that of ``x``."""
        return max(1.0, largest_of([self.scores(q, k) for q, k in zip(self.q, self.k, strict=True)]))

    @property
    def logits(self) -> Tensor | None:
        """The logit of the softmax's extra term per head, ``[h, 1, 1]``; None where it has none."""
        if self.problem.softmax == _S.NVTE_OFF_BY_ONE_SOFTMAX:
            return torch.zeros(_HEADS, 1, 1, dtype=torch.float64)
        return None if self.offset is None else self.offset.double().view(_HEADS, 1, 1)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """The scores ``[h, i, j]`` of one sequence; masked ones are -inf."""
        problem = self.problem
        s = torch.einsum("ihd,jhd->hij", q.double(), k.double().repeat_interleave(_HEADS // problem.groups, 1))
        before = problem.bias == _B.NVTE_PRE_SCALE_BIAS
        s = problem.scale * (s + self.bias[0].double() if self.bias is not None and before else s)
        s = s + self.bias[0].double() if self.bias is not None and not before else s
        return s.masked_fill(hidden(problem, *s.shape[1:]), -torch.inf)


def inputs_of(problem: Problem, generator: torch.Generator, dtype: torch.dtype) -> Inputs:
    def drawn(shape: tuple[int, ...], of: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(of) if problem.hides else random(generator, shape, of)

    lengths, keys = problem.lengths, problem.of_keys
    shapes = (lengths, _HEADS), (keys, problem.groups), (keys, problem.groups)
    q, k, v = ([drawn((n, heads, problem.width)) for n in of] for of, heads in shapes)
    bias = drawn((1, _HEADS, max(lengths), max(keys))) if problem.bias != _B.NVTE_NO_BIAS else None
    offset = drawn((1, _HEADS, 1, 1), torch.float32) if problem.softmax == _S.NVTE_LEARNABLE_SOFTMAX else None
    counts, padded = (
        torch.tensor([0, *(n + gap for n in lengths)]).cumsum(0).to(torch.int32) if problem.packed and (gap or not also) else None
        for gap, also in ((0, False), (problem.gap, True))
    )
    arguments = {
        **CALL, "max_seqlen_q": max(lengths), "max_seqlen_kv": max(keys), "attn_scale": problem.scale, "qkv_layout": problem.layout,
        "o_format": _F[f"NVTE_{problem.form}"] if problem.form else _F.NVTE_QKV_Format_NOT_SET, "bias_type": problem.bias,
        "attn_mask_type": problem.mask, "window_size": [*problem.window], "softmax_type": problem.softmax, "bottom_right_diagonal": problem.end,
        "cu_seqlens_q": counts, "cu_seqlens_kv": counts, "cu_seqlens_q_padded": padded, "cu_seqlens_kv_padded": padded,
        "Q": problem.join(q), "K": problem.join(k), "V": problem.join(v), "fake_dtype": dtype,
    }  # fmt: skip
    return Inputs(problem, q, k, v, bias, offset, arguments)


def log_sum_exp(scores: Tensor) -> Tensor:
    """``log(sum(exp(scores)))`` over the last dimension; NaN, which is left open, where a score is infinite: a formula that takes the largest score
    away first has NaN there, another one infinity."""
    stats = torch.logsumexp(scores, -1)
    return torch.where(stats == torch.inf, torch.nan, stats)


def forward(x: Inputs) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """``(O [s, h, d], Stats [h, s], largest score [h, s])`` of each sequence."""
    for q, k, v in zip(x.q, x.k, x.v, strict=True):
        s = x.scores(q, k)
        logits = s if x.logits is None else torch.cat([s, x.logits.expand(-1, s.shape[1], 1)], -1)
        stats = log_sum_exp(logits)
        values = v.double().repeat_interleave(_HEADS // x.problem.groups, 1)
        yield torch.einsum("hij,jhe->ihe", torch.exp(s - stats[..., None]), values), stats, s.amax(-1)


def rounding(dtype: torch.dtype, largest: float, length: int) -> float:
    """The magnitude that allows a backend to round probabilities, which are at most 1, to the operands' dtype."""
    return 8.0 + 0.5 * torch.finfo(dtype).eps * largest / torch.finfo(torch.float32).eps / (length + 16)


def largest_of(tensors: list[Tensor]) -> float:
    return max(x.double().nan_to_num(0, 0, 0).abs().max().item() for x in tensors)


@record("fused_attn_fwd")
def fused_attn_fwd(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for problem in _PROBLEMS:
        x = inputs_of(problem, generator, dtype)
        outputs, statistics, largest = (list(part) for part in zip(*forward(x), strict=True))
        most = problem.width == 12
        more = {**FORWARD, "Bias": x.bias, "SoftmaxOffset": x.offset, "return_max_logit": most}
        length = problem.width + max(problem.of_keys)
        size = rounding(dtype, largest_of(x.v), length) * x.steepness()
        found = [
            Output(0, problem.join(outputs, problem.form, 0.0), dtype, length, size),
            Output(1, problem.statistics(statistics), torch.float32, length, 8.0 * x.steepness()),
            *([Output(2, problem.statistics(largest, -torch.inf), torch.float32, length, 8.0 * x.steepness())] if most else []),
        ]
        found.append(Output(f"result.{len(found)}.shape", torch.Size([2])))
        for side in (x.bias, x.offset):
            found += [] if side is None else [Output(len(found), side.clone())]
        yield Sample(problem.label, {**x.arguments, **more}, tuple(found))
        if problem.label == "bshd":
            # Nothing is dropped outside of training.
            other = {"is_training": False, "p_dropout": 0.5}
            yield Sample("bshd, not in training", {**x.arguments, **more, **other}, tuple(found[:1]))
    yield from drawn_forward(generator, dtype)
    yield from quantized_forward(generator, dtype)
    yield pages(generator, dtype, Problem("pages", lengths=(3, 3), keys=(6, 9)), 4, 3)
    yield pages(generator, dtype, Problem("a page for each token", lengths=(2, 2), keys=(3, 4)), 1, 4)


def pages(generator: torch.Generator, dtype: torch.dtype, problem: Problem, page: int, each: int, *, one_table: bool = False) -> Sample:
    """Keys and values in a paged cache: ``each`` pages of ``page`` tokens per sequence, which the tables of K and of V list in random orders, or
    ``one_table`` of both. As lengths differ, the mask is a padding mask."""
    x = inputs_of(problem, generator, dtype)
    outputs, _, _ = (list(part) for part in zip(*forward(x), strict=True))
    arguments, b = {**x.arguments, **FORWARD}, len(problem.lengths)
    for name, sequences in (("k", x.k), ("v", x.v)):
        if not (one_table and "K" in arguments and name == "v"):
            table = torch.randperm(b * each + 2, generator=generator)[: b * each].view(b, each).int()
        cache = torch.full((b * each + 2, page, _HEADS, problem.width), 77.0, dtype=dtype)
        for i, tokens in enumerate(sequences):
            for j, token in enumerate(tokens):
                cache[table[i, j // page], j % page] = token
        arguments |= {name.upper(): cache, f"page_table_{name}": table}
    arguments |= {f"cu_seqlens_{side}": torch.tensor([0, *of]).cumsum(0).int() for side, of in (("q", problem.lengths), ("kv", problem.of_keys))}
    arguments |= {
        "is_training": False, "qkv_layout": _L.NVTE_Paged_KV_BSHD_BSHD_BSHD, "attn_mask_type": NVTE_Mask_Type.NVTE_PADDING_MASK,
        "max_seqlen_kv": page * each,
    }  # fmt: skip
    length = problem.width + max(problem.of_keys)
    return Sample(problem.label, arguments, (Output(0, problem.join(outputs), dtype, length, rounding(dtype, largest_of(x.v), length)),))


@dataclass
class Gradients:
    """The gradients of one sequence: of Q, K, V, of the scaled scores ``[h, i, j]``, and of the softmax's extra logit ``[h]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    scores: Tensor
    logit: Tensor | None


def gradients(x: Inputs, operands: tuple[Tensor, ...], o: Tensor, stats: Tensor, do: Tensor) -> Gradients:
    """The gradients of one sequence, from its rounded O and Stats."""
    q, k, v = (t.double() for t in operands)
    problem, delta = x.problem, (do.double() * o.double()).sum(-1).T
    share = _HEADS // problem.groups
    p = torch.exp(x.scores(q, k) - stats.double()[..., None])
    ds = p * (torch.einsum("ihe,jhe->hij", do.double(), v.repeat_interleave(share, 1)) - delta[..., None])

    def grouped(t: Tensor) -> Tensor:
        return t.unflatten(1, (problem.groups, share)).sum(2)

    dq = problem.scale * torch.einsum("hij,jhd->ihd", ds, k.repeat_interleave(share, 1))
    dk, dv = problem.scale * torch.einsum("hij,ihd->jhd", ds, q), torch.einsum("hij,ihe->jhe", p, do.double())
    logit = None if x.logits is None else -(torch.exp(x.logits[..., 0] - stats.double()) * delta).sum(-1)
    return Gradients(dq, grouped(dk), grouped(dv), ds, logit)


@record("fused_attn_bwd")
def fused_attn_bwd(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for problem in _PROBLEMS:
        x = inputs_of(problem, generator, dtype)
        wide, statistics, _ = (list(part) for part in zip(*forward(x), strict=True))
        o, stats = [t.to(dtype) for t in wide], [t.float() for t in statistics]
        do = [(torch.randn(t.shape, generator=generator).to(dtype) if problem.hides else random(generator, tuple(t.shape), dtype)) for t in o]
        each = [gradients(x, t, *rest) for *rest, t in zip(o, stats, do, zip(x.q, x.k, x.v, strict=True), strict=True)]
        # A softmax off by one may be given the offsets, which it reads as 0.
        off_by_one = torch.zeros(1, _HEADS, 1, 1) if problem.label.startswith("off by one") else None
        sides = [side for side in (x.bias, x.offset, off_by_one) if side is not None]
        more = {
            **BACKWARD, "do_format": x.arguments["o_format"], "dqkv_layout": problem.layout, "O": problem.join(o, problem.form),
            "dO": problem.join(do, problem.form), "Aux_CTX_Tensors": [problem.statistics(stats), torch.zeros(2, dtype=torch.int64), *sides],
        }  # fmt: skip
        length = problem.width + max(*problem.lengths, *problem.of_keys) * (_HEADS // problem.groups)
        # Probabilities and their gradients may be rounded to the operands' type before they are multiplied.
        largest = largest_of([t for g in each for t in (g.q, g.k, g.v)])
        size = (8.0 + rounding(dtype, largest * max(problem.lengths), length)) * x.steepness()
        parts = [Output(i, problem.join([getattr(g, name) for g in each], between=0.0), dtype, length, size) for i, name in enumerate("qkv")]
        biased, scaled = x.bias is not None, problem.scale if problem.bias == _B.NVTE_PRE_SCALE_BIAS else 1.0
        parts.append(Output(3, scaled * torch.stack([g.scores for g in each]).sum(0)[None] if biased else None, dtype, length, size))
        logits = [g.logit for g in each if g.logit is not None]
        offset = torch.stack(logits).sum(0).view(1, _HEADS, 1, 1) if sides and logits else None
        parts.append(Output(4, offset, torch.float32, length * max(problem.lengths), size))
        yield Sample(problem.label, {**x.arguments, **more}, tuple(parts))
    yield from drawn_backward(generator, dtype)
    yield from quantized_backward(generator, dtype)
