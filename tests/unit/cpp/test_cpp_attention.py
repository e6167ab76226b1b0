"""Native attention against float64 at every level: values, gradients, any strides, threads, non-finite inputs, and refusals.

Bounds: a score is a sum of ``d`` products and an exponential's argument is off by an epsilon of its size, so probabilities are right to
``(d + 16) * 8`` float32 epsilons; sums add one epsilon a term. At the level of bf16 dot products, bf16 probabilities and score gradients are rounded
once more; O, rounded to its dtype, enters the gradients. Each error is carried through the products by magnitudes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fusible import cpp_extensions
from fusible.errors import ArgumentError, DTypeError, ShapeError

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
EPS32 = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Case:
    b: int = 2
    queries: int = 5
    keys: int = 7
    heads: int = 2
    groups: int = 1
    width: int = 8
    value_width: int = 8
    causal: bool = False
    bottom_right: bool = False
    window: tuple[int, int] = (-1, -1)
    extra: bool = False
    scale: float = 0.35

    @property
    def rules(self) -> tuple[Any, ...]:
        return self.scale, self.causal, self.bottom_right, *self.window, self.bottom_right

    def visible(self) -> Tensor:
        i, j = torch.arange(self.queries).view(-1, 1), torch.arange(self.keys)
        i = i + (self.keys - self.queries if self.bottom_right else 0)
        seen = (j <= i) if self.causal else torch.ones(self.queries, self.keys, dtype=torch.bool)
        left, right = self.window
        return seen & ((j >= i - left) if left >= 0 else True) & ((j <= i + right) if right >= 0 else True)


@dataclass
class Tensors:
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    extra: Tensor | None


def draw(case: Case, dtype: torch.dtype, offset: int = 0) -> Tensors:
    """Inputs that begin ``offset`` elements into their storage."""
    generator = torch.Generator().manual_seed(case.queries * 1000 + case.keys)

    def tensor(*shape: int) -> Tensor:
        size = torch.Size(shape).numel()
        return torch.randn(size + offset, generator=generator).to(dtype)[offset:].view(shape)

    q, grad = (tensor(case.b, case.queries, case.heads, width) for width in (case.width, case.value_width))
    k, v = (tensor(case.b, case.keys, case.groups, width) for width in (case.width, case.value_width))
    return Tensors(q, k, v, grad, torch.randn(case.heads, generator=generator) if case.extra else None)


@dataclass
class Results:
    o: Tensor
    stats: Tensor
    largest: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    extra: Tensor


def native(case: Case, t: Tensors, threads: int = 1, **more: Any) -> Results:
    o = torch.full((*t.q.shape[:3], case.value_width), 5.0, dtype=t.q.dtype)
    stats, largest = (torch.full((*t.q.shape[:3], 1), 5.0) for _ in range(2))
    more = {"extra_logits": t.extra, "max_seqlen_q": case.queries, "max_seqlen_kv": case.keys, "num_threads": threads, **more}
    cpp_extensions.attention_forward(t.q, t.k, t.v, o, stats, largest, *case.rules, **more)
    dq, dk, dv = (torch.full(x.shape, 5.0, dtype=x.dtype) for x in (t.q, t.k, t.v))
    extra = torch.zeros(case.heads)
    more["extra_gradient"] = None if t.extra is None else extra
    cpp_extensions.attention_backward(t.q, t.k, t.v, o, t.grad, stats, dq, dk, dv, *case.rules, **more)
    return Results(o, stats, largest, dq, dk, dv, extra)


def heads_first(x: Tensor, repeat: int = 1) -> Tensor:
    return x.double().transpose(1, 2).repeat_interleave(repeat, 1)


def shared(x: Tensor, case: Case) -> Tensor:
    """The sum over the query heads of a kv head, tokens first."""
    return x.unflatten(1, (case.groups, case.heads // case.groups)).sum(2).transpose(1, 2)


def check(case: Case, t: Tensors, got: Results, level: str, kept: Tensor | None = None) -> None:
    repeat = case.heads // case.groups
    q, k, v, grad = heads_first(t.q), heads_first(t.k, repeat), heads_first(t.v, repeat), heads_first(t.grad)
    scores = (q @ k.transpose(-1, -2) * case.scale).masked_fill(~case.visible(), -torch.inf)
    stats = torch.logsumexp(scores, -1, keepdim=True) if case.keys else torch.full_like(scores.sum(-1, keepdim=True), -torch.inf)
    if t.extra is not None:
        stats = torch.logaddexp(stats, t.extra.double().view(1, -1, 1, 1).expand_as(stats))
    p = torch.exp(scores - stats.masked_fill(stats == -torch.inf, 0))
    kept = torch.ones(()) if kept is None else kept
    o = (p * kept) @ v
    delta = (grad * o).sum(-1, keepdim=True)
    ds = p * (grad @ v.transpose(-1, -2) * kept - delta)

    half = 0.5001 * torch.finfo(t.q.dtype).eps
    work = (case.width + case.value_width + 16) * 8 * EPS32
    rounded = half if level in ("avx512bf16", "amx") and t.q.dtype is torch.bfloat16 else 0.0

    def close(found: Tensor, expected: Tensor, error: Tensor | float, eps: float = half) -> None:
        finite = expected.isfinite()
        assert torch.equal(found.double()[~finite], expected[~finite])
        bound = eps * expected.abs() + error + torch.finfo(torch.float16).smallest_normal * (t.q.dtype is torch.float16) * 2**-10
        excess = ((found.double() - expected).abs() - bound)[finite]
        assert not excess.numel() or excess.max().item() <= 1e-30, f"exceeds its bound by {excess.max().item():.2e}"

    weights = p * kept
    close(heads_first(got.o), o, (work + case.keys * EPS32 + rounded) * (weights @ v.abs()))
    close(heads_first(got.stats), stats, work, EPS32)
    if case.keys:
        close(heads_first(got.largest), scores.amax(-1, keepdim=True), work, EPS32)
    spread = (grad.abs() * o.abs()).sum(-1, keepdim=True)
    size = p * (grad.abs() @ v.abs().transpose(-1, -2) * kept + spread)
    each = 2 * work + (case.keys + case.queries) * EPS32 + half + rounded
    close(heads_first(got.dq), ds @ k * case.scale, each * (size @ k.abs()) * abs(case.scale))
    close(got.dk, shared(ds.transpose(-1, -2) @ q, case) * case.scale, each * shared(size.transpose(-1, -2) @ q.abs(), case) * abs(case.scale))
    close(got.dv, shared(weights.transpose(-1, -2) @ grad, case), each * shared(weights.transpose(-1, -2) @ grad.abs(), case))
    if t.extra is not None:
        share = torch.exp(t.extra.double().view(1, -1, 1, 1) - stats)
        close(got.extra, -(share * delta).sum((0, 2, 3)), (each * share * spread).sum((0, 2, 3)), EPS32)


CASES = {
    "one of each": Case(b=1, queries=1, keys=1, heads=1, width=1, value_width=1),
    "no query": Case(queries=0),
    "no key": Case(keys=0),
    "no key but an extra logit": Case(keys=0, extra=True),
    "around a tile of queries": Case(queries=97, keys=65, heads=1, causal=True),
    "around a tile of keys": Case(b=1, queries=127, keys=257, width=33, value_width=65),
    "several tiles": Case(b=1, queries=300, keys=390, width=64, value_width=64, causal=True, bottom_right=True),
    "wide": Case(b=1, queries=70, keys=70, width=130, value_width=100, causal=True),
    "groups": Case(queries=40, keys=50, heads=6, groups=2, causal=True),
    "groups over several blocks": Case(b=1, queries=150, keys=150, heads=4, groups=1, causal=True),
    "extra logits": Case(queries=33, keys=66, heads=4, groups=2, extra=True),
    "window": Case(b=1, queries=200, keys=333, window=(70, 3), bottom_right=True, heads=1),
    "window before all keys": Case(b=1, queries=20, keys=300, window=(0, 0), heads=1),
    "rows that see nothing": Case(queries=30, keys=12, causal=True, bottom_right=True),
    "one query, many keys": Case(b=1, queries=1, keys=1500, heads=8, groups=2, width=64, value_width=64),
    "heads side by side": Case(b=3, queries=2, keys=400, heads=8, groups=4, causal=True, bottom_right=True),
    "as many pairs as let a thread take whole ones": Case(b=4, queries=100, keys=130, heads=4, groups=4, causal=True),
    "a scale below zero": Case(scale=-0.3, causal=True),
    "a scale of zero": Case(scale=0.0, causal=True),
}


@DTYPES
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(level: str, name: str, dtype: torch.dtype) -> None:
    tensors = draw(CASES[name], dtype)
    one, two = (native(CASES[name], tensors, threads) for threads in (1, 2))
    check(CASES[name], tensors, one, level)
    assert all(torch.equal(a, b) for a, b in zip(vars(one).values(), vars(two).values(), strict=True))


@DTYPES
@pytest.mark.parametrize("size", [2.0**exponent for exponent in (12, 14, 20, 30, 60)])
def test_where_scores_are_large_both_passes_weigh_alike(level: str, size: float, dtype: torch.dtype) -> None:
    """One key of each row has all the weight, to the bit: what an eps of its score would make of it cannot stand in a sum of the row."""
    case = Case(b=1, queries=150, keys=8, heads=1, scale=0.3)
    t = draw(case, dtype)
    limit = min(size, 2.0**14) if dtype is torch.float16 else size
    t.q[..., 1:] = t.k[..., 1:] = 0.0
    t.q[..., 0] = torch.where(torch.arange(case.queries) % 3 == 0, 1.0, -1.0)[None, :, None]
    t.k[..., 0] = (limit * torch.arange(1, case.keys + 1) / 11)[None, :, None]
    got = native(case, t)
    weights = torch.nn.functional.one_hot(torch.where(t.q[0, :, 0, 0] > 0, case.keys - 1, 0), case.keys).double()
    assert torch.equal(got.o[0, :, 0].double(), weights @ t.v[0, :, 0].double())
    grad = t.grad[0, :, 0].double()
    bound = (0.5001 * torch.finfo(dtype).eps + case.queries * EPS32) * (weights.T @ grad.abs())
    assert torch.all((got.dv[0, :, 0].double() - weights.T @ grad).abs() <= bound)


@given(
    case=st.builds(
        Case,
        b=st.integers(1, 2),
        queries=st.integers(0, 140),
        keys=st.integers(0, 280),
        heads=st.just(2),
        groups=st.integers(1, 2),
        width=st.integers(1, 70),
        value_width=st.integers(1, 70),
        causal=st.booleans(),
        bottom_right=st.booleans(),
        window=st.tuples(st.integers(-1, 90), st.integers(-1, 90)),
    ),
    data=st.data(),
)
def test_any_size_offset_and_number_of_threads(case: Case, data: st.DataObject) -> None:
    level = data.draw(st.sampled_from(cpp_extensions.usable_levels()))
    tensors = draw(case, data.draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])), data.draw(st.integers(0, 5)))
    cpp_extensions.set_level(level)
    one, two = (native(case, tensors, threads) for threads in (1, 2))
    check(case, tensors, one, level)
    assert all(torch.equal(a, b) for a, b in zip(vars(one).values(), vars(two).values(), strict=True))


@DTYPES
def test_operands_are_read_and_written_through_their_strides(level: str, dtype: torch.dtype) -> None:
    case = Case(queries=70, keys=70, heads=2, groups=2, causal=True)
    t = draw(case, dtype)
    wanted = native(case, t)
    packed = torch.stack([t.q, t.k, t.v], 3)
    q, k, v = packed.unbind(3)
    gradients = torch.full_like(packed, 7.0)
    o = torch.empty(2, 2, 70, 8, dtype=dtype).transpose(1, 2)
    stats, largest = (torch.empty(70, 2, 2, 1).permute(2, 0, 1, 3) for _ in range(2))
    cpp_extensions.attention_forward(q, k, v, o, stats, largest, *case.rules)
    grad = t.grad.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    cpp_extensions.attention_backward(q, k, v, o, grad, stats, *gradients.unbind(3), *case.rules)
    assert torch.equal(o, wanted.o) and torch.equal(stats, wanted.stats) and torch.equal(largest, wanted.largest)
    assert torch.equal(gradients, torch.stack([wanted.dq, wanted.dk, wanted.dv], 3))


@DTYPES
def test_dropout_drops_by_the_words_of_the_reference(level: str, dtype: torch.dtype) -> None:
    from fusible.tex.backends.torch_backend.random import words

    case, probability = Case(queries=70, keys=75, heads=4, groups=2, causal=True), 0.3
    state = torch.tensor([12345678901234, 7])
    elements = torch.arange(case.b * case.heads * case.queries * case.keys) + (state[1] << 40)
    kept = (words(state[:1], elements) >= int(probability * 2**32)).view(case.b, case.heads, case.queries, case.keys)
    tensors = draw(case, dtype)
    got = native(case, tensors, dropout=probability, rng_state=state)
    check(case, tensors, got, level, kept.double() / (1 - probability))


@DTYPES
def test_sequences_one_after_another_are_sequences(level: str, dtype: torch.dtype) -> None:
    lengths_q, lengths_kv, gap = (90, 0, 3, 130), (70, 5, 300, 130), 3

    def cumulative(lengths: tuple[int, ...], gap: int = 0) -> Tensor:
        return torch.tensor([0, *(n + gap for n in lengths)]).cumsum(0).int()

    def join(each: list[Tensor]) -> Tensor:
        return torch.cat([torch.nn.functional.pad(x[0], (0, 0, 0, 0, 0, gap), value=7.0) for x in each])

    cases = [Case(b=1, queries=n, keys=m, causal=True, bottom_right=True) for n, m in zip(lengths_q, lengths_kv, strict=True)]
    each = [draw(case, dtype) for case in cases]
    joined = Tensors(*(join([getattr(t, name) for t in each]) for name in ("q", "k", "v", "grad")), None)
    o = torch.full_like(joined.q, 9.0)
    stats, largest = (torch.full((*o.shape[:2], 1), 9.0) for _ in range(2))
    lengths = (cumulative(lengths_q), cumulative(lengths_q, gap), cumulative(lengths_kv), cumulative(lengths_kv, gap))
    named = dict(zip(("lengths_q", "starts_q", "lengths_kv", "starts_kv"), lengths, strict=True))
    cpp_extensions.attention_forward(joined.q, joined.k, joined.v, o, stats, largest, *cases[0].rules, **named)
    dq, dk, dv = (torch.full_like(x, 9.0) for x in (joined.q, joined.k, joined.v))
    cpp_extensions.attention_backward(joined.q, joined.k, joined.v, o, joined.grad, stats, dq, dk, dv, *cases[0].rules, **named)
    for i, (case, t) in enumerate(zip(cases, each, strict=True)):
        rows, keys = (slice(int(starts[i]), int(starts[i]) + n) for starts, n in ((lengths[1], case.queries), (lengths[3], case.keys)))
        parts = ((o, rows), (stats, rows), (largest, rows), (dq, rows), (dk, keys), (dv, keys))
        check(case, t, Results(*(x[part][None] for x, part in parts), torch.zeros(0)), level)
        assert all((x[part.stop : part.stop + gap] == 9).all() for x, part in parts)


def test_not_a_number_and_infinity_reach_what_depends_on_them(level: str) -> None:
    case = Case(b=1, queries=3, keys=300, heads=1, causal=True, bottom_right=True)
    for bad in (float("nan"), float("inf")):
        t = draw(case, torch.float32)
        t.k[0, 298] = bad  # unseen by the first query
        got = native(case, t)
        assert got.o[0, 0].isfinite().all() and got.stats[0, 0].isfinite().all()
        assert got.o[0, 1:].isnan().all() and got.stats[0, 1:].isnan().all() and got.dq[0, 1:].isnan().all()


REFUSED = [
    ({"q": torch.zeros(2, 5, 3, 8)}, ShapeError, "a multiple of k's heads"),
    ({"k": torch.zeros(2, 7, 2, 9)}, ShapeError, "q: expected .*, got"),
    ({"v": torch.zeros(2, 6, 2, 8)}, ShapeError, "v: expected .*, got"),
    ({"v": torch.zeros(2, 7, 2, 8, dtype=torch.float16)}, DTypeError, "v: expected float32"),
    ({"q": torch.zeros(2, 5, 2, 8, dtype=torch.int32)}, DTypeError, "q: expected float32, float16 or bfloat16"),
    ({"out": torch.zeros(2, 5, 2, 9)}, ShapeError, "out: expected .*"),
    ({"stats": torch.zeros(2, 5, 2)}, ShapeError, "stats: expected .*"),
    ({"q": torch.zeros(2, 5, 8, 2).transpose(2, 3)}, ArgumentError, "neighbouring elements"),
    ({"q": torch.zeros(5, 2, 8), "out": torch.zeros(5, 2, 8), "stats": torch.zeros(5, 2, 1)}, ArgumentError, "q: expected cumulative lengths"),
    ({"lengths_q": torch.zeros(2, dtype=torch.int32)}, ShapeError, "lengths_q: expected at least 3 elements"),
    ({"lengths_q": torch.zeros(3, dtype=torch.int64)}, DTypeError, "lengths_q: expected int32"),
    ({"page_table_k": torch.full((2, 1), 2, dtype=torch.int32)}, ArgumentError, "a page below 2"),
    ({"extra_logits": torch.zeros(3)}, ShapeError, "extra_logits: expected 2 elements"),
    ({"dropout": 1.0}, ArgumentError, "a probability"),
    ({"dropout": 0.5}, ArgumentError, "rng_state"),
    ({"num_threads": -1}, ArgumentError, "num_threads"),
]


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED)
def test_what_does_not_fit_is_refused_before_anything_is_written(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    out = torch.full((2, 5, 2, 8), 3.0)
    given_ = {"q": torch.zeros(2, 5, 2, 8), "k": torch.zeros(2, 7, 2, 8), "v": torch.zeros(2, 7, 2, 8), "out": out}
    rules = dict(zip(("scale", "causal", "causal_bottom_right", "window_left", "window_right", "window_bottom_right"), Case().rules, strict=True))
    with pytest.raises(error, match=message):
        cpp_extensions.attention_forward(**{**given_, "stats": torch.zeros(2, 5, 2, 1), "largest": torch.zeros(2, 5, 2, 1), **rules, **changes})
    assert (out == 3).all()
