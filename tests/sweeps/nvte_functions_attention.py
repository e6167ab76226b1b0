"""Right calls of nvte: attention, rotary positions, caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from nvte_draws import DRAWN_CALLS, Draw, DrawnCall, Wanted, draws, f64, share
from nvte_functions_activations import gradient, nearly

from fusible import nvte
from fusible.nvte import DType, Tensor
from fusible.tex.calls.attention import alibi_slopes

# Attention.


def _sequences(draw: Draw) -> tuple[nvte.Sequences, list[int]]:
    if draw.of(True, False):
        count, length = draw.of(1, 2, 3), draw.of(1, 2, 5)
        cu, lengths = torch.arange(count + 1, dtype=torch.int32) * length, [length] * count
        return nvte.Sequences(nvte.make_nvte_tensor(cu), count, length, True), lengths
    lengths = [draw.of(0, 1, 3, 5) for _ in range(draw.of(1, 2, 3))]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return nvte.Sequences(nvte.make_nvte_tensor(cu), len(lengths), max(*lengths, 1), False), lengths


def _rotated(x: torch.Tensor, lengths: Sequence[int], rotary: nvte.Rotary, sign: float = 1.0) -> torch.Tensor:
    x, rest = x.split([rotary.width or x.shape[-1], x.shape[-1] - (rotary.width or x.shape[-1])], -1)
    width = x.shape[-1]
    positions = torch.cat([torch.arange(length) for length in lengths]).double()
    inverse = rotary.base ** (-torch.arange(0, width, 2).double() / width)
    if rotary.factors:
        inverse *= torch.tensor(rotary.factors, dtype=torch.float64)
    angle = (positions[:, None] * inverse)[:, None, :]
    cos, sin = angle.cos(), sign * angle.sin()
    first, second = (x[..., 0::2], x[..., 1::2]) if rotary.interleaved else x.split(width // 2, -1)
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.cat([torch.stack(turned, -1).flatten(-2) if rotary.interleaved else torch.cat(turned, -1), rest], -1)


def _rope(draw: Draw, name: str, sign: float) -> DrawnCall:
    sequences, lengths = _sequences(draw)
    x, base = draw.tensor(sum(lengths), draw.of(1, 2), draw.of(2, 4, 8)), draw.of(10000.0, 100.0)
    width = x.shape[-1]
    rotary = draw.of(base, nvte.Rotary(base), nvte.Rotary(base, 2), nvte.Rotary(base, None, tuple(1 / (i + 1) for i in range(width // 2))))
    rotary = replace(rotary, interleaved=draw.of(True, False)) if isinstance(rotary, nvte.Rotary) else rotary
    value = _rotated(f64(x), lengths, rotary if isinstance(rotary, nvte.Rotary) else nvte.Rotary(rotary), sign)
    return DrawnCall({name: x, "sequences": sequences, "rotary": rotary}, [nearly(value, f64(x), type=x.type)])


DRAWN_CALLS["rope"] = lambda draw: _rope(draw, "x", 1.0)
DRAWN_CALLS["drope"] = lambda draw: _rope(draw, "dy", -1.0)


def _outside(queries: int, keys: int, starts: int, window: tuple[int, int]) -> torch.Tensor:
    """Where a query, the first of which stands at ``starts``, does not see a key for the window's edges."""
    distance = starts + torch.arange(queries)[:, None] - torch.arange(keys)
    left, right = (edge if edge >= 0 else starts + queries + keys for edge in window)
    return (distance > left) | (-distance > right)


Rule = dict[str, Any]
"""The arguments of ``attention`` that say how scores are made."""


def _scored(scores: torch.Tensor, rule: Rule, starts: int, bias: torch.Tensor | None) -> torch.Tensor:
    """Scores ``[heads, queries, keys]`` once they are scaled, as the options have them; a query sees what its window shows."""
    options: nvte.ScoreOptions = rule["options"]
    if options.soft_cap is not None:
        scores = options.soft_cap * torch.tanh(scores / options.soft_cap)
    queries, keys = scores.shape[1:]
    if bias is not None:
        scores = scores + bias[:, :queries, :keys]
    if options.alibi_slopes is not None:
        distance = (starts + torch.arange(queries)[:, None] - torch.arange(keys)).abs()
        scores = scores - torch.tensor(options.alibi_slopes, dtype=torch.float64)[:, None, None] * distance
    return scores.masked_fill(_outside(queries, keys, starts, rule["window_size"]), -torch.inf)


def _attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int], rule: Rule, bias: torch.Tensor | None = None
) -> torch.Tensor:
    parts = []
    for i, (q_, k_, v_) in enumerate(zip(*(x.split(list(lengths)) for x in (q, k, v)), strict=True)):
        k_, v_ = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k_, v_))
        scores = _scored(torch.einsum("qhd,khd->hqk", q_, k_) * rule["scale"], rule, 0, None if bias is None else bias[i % len(bias)])
        if rule["causal"]:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
        parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v_))
    return torch.cat(parts)


def _options(draw: Draw, heads: int) -> nvte.ScoreOptions:
    slopes = draw.of(None, None, tuple(0.5 / (i + 1) for i in range(heads)), tuple(alibi_slopes(heads)))
    return nvte.ScoreOptions(draw.of(None, None, 1.5), slopes)


def _heads(draw: Draw) -> tuple[dict[str, Any], list[int]]:
    sequences, lengths = _sequences(draw)
    groups, width, kind = draw.of(1, 2), draw.of(4, 8), draw.type()
    heads = groups * draw.of(1, 2)
    q, k, v = (draw.tensor(sum(lengths), n, width, type=kind) for n in (heads, groups, groups))
    given = {"q": q, "k": k, "v": v, "sequences": sequences, "scale": width**-0.5, "causal": draw.of(True, False)}
    window = draw.of((-1, -1), (-1, -1), (0, 0), (2, -1), (-1, 1), (1, 2))
    longest = max(lengths)
    bias = draw.tensor(draw.of(1, sequences.count), heads, longest, longest, type=DType.Float32) if longest > 1 and draw.of(True, False) else None
    return {**given, "window_size": window, "options": _options(draw, heads), "bias": bias}, lengths


def _probabilities(kind: DType, v: torch.Tensor) -> float:
    """What rounding probabilities, which are at most 1, to the type of the operands may cost: a backend may do that."""
    return torch.finfo(nvte.te_to_torch_dtype(kind)).eps * (v.abs().max().item() if v.numel() else 0.0)


@draws("attention")
def _(draw: Draw) -> DrawnCall:
    arguments, lengths = _heads(draw)
    q, k, v = (f64(arguments[name]) for name in "qkv")
    kind = arguments["q"].type
    bias = None if arguments["bias"] is None else f64(arguments["bias"])
    value = _attended(q, k, v, lengths, arguments, bias)
    o = nearly(value, q, k, v, type=kind, slack=_probabilities(kind, v))

    def check(found: Any) -> None:
        assert share(found[0], o, o.type) <= 1

    return DrawnCall({**arguments, "is_training": draw.of(True, False)}, check)


@draws("dattention")
def _(draw: Draw) -> DrawnCall:
    arguments, lengths = _heads(draw)
    q, k, v = (f64(arguments[name]) for name in "qkv")
    kind, biased = arguments["q"].type, [] if arguments["bias"] is None else [f64(arguments["bias"])]
    o, aux = nvte.attention(**arguments, is_training=True)
    do = draw.tensor(*o.shape, type=kind)
    grads = gradient(lambda q, k, v, *bias: _attended(q, k, v, lengths, arguments, *bias), f64(do), q, k, v, *biased)  # type: ignore[misc, arg-type]
    size = [8 * q, k, v, f64(do)]
    # o and the probabilities are rounded to their dtype on the way, and several of them are added up.
    eps = torch.finfo(nvte.te_to_torch_dtype(kind)).eps
    types = [kind] * 3 + [DType.Float32]
    wanted = [Wanted(g, 32, (nearly(g, *size).magnitude * (1 + eps * 2**23 / 16)), type=t) for g, t in zip(grads, types, strict=False)]  # type: ignore[operator]
    return DrawnCall({"do": do, **arguments, "o": o, "aux": aux}, [*wanted, *([] if biased else [None])])


def _cache(draw: Draw, groups: int, width: int, kind: DType) -> tuple[nvte.KVCache, nvte.Sequences, list[int], list[int]]:
    lengths, starts = [draw.of(1, 2, 3), draw.of(1, 3)], [draw.of(0, 2), draw.of(0, 1, 4)]
    pages = [nvte.make_nvte_tensor(torch.randn(8, 2, groups, width, generator=draw.generator).to(nvte.te_to_torch_dtype(kind))) for _ in "kv"]
    table = nvte.make_nvte_tensor(torch.tensor([[3, 1, 6, 0], [2, 7, 5, 4]], dtype=torch.int32))
    ends = [a + b for a, b in zip(lengths, starts, strict=True)]
    cu_lengths = torch.tensor([0, ends[0], sum(ends)], dtype=torch.int32)
    cache = nvte.KVCache(*pages, table, nvte.make_nvte_tensor(torch.tensor(starts, dtype=torch.int32)), nvte.make_nvte_tensor(cu_lengths))
    cu = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32)
    return cache, nvte.Sequences(nvte.make_nvte_tensor(cu), 2, max(lengths), False), lengths, starts


def _held(pages: Tensor, cache: nvte.KVCache, sequence: int, count: int) -> torch.Tensor:
    table = cache.page_table.data[sequence]
    return torch.cat([f64(pages)[page] for page in table.tolist()])[:count] if count else f64(pages)[0][:0]


def _attended_last(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: int, rule: Rule, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Causal attention of the last tokens of one sequence, from ``starts`` on, over all of it."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = _scored(torch.einsum("qhd,khd->hqk", q, k) * rule["scale"], rule, starts, bias)
    scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(starts + 1).bool(), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


@draws("append_kv")
def _(draw: Draw) -> DrawnCall:
    groups, width, kind = draw.of(1, 2), draw.of(4, 8), draw.type()
    cache, sequences, lengths, starts = _cache(draw, groups, width, kind)
    k, v = (draw.tensor(sum(lengths), groups, width, type=kind) for _ in "kv")
    before = [[_held(pages, cache, i, starts[i]) for i in range(2)] for pages in (cache.k, cache.v)]

    def check(found: Any) -> None:
        for pages, new, held in ((found.k, k, before[0]), (found.v, v, before[1])):
            for i, part in enumerate(f64(new).split(lengths)):
                assert torch.equal(_held(pages, found, i, starts[i] + lengths[i]), torch.cat([held[i], part]))

    return DrawnCall({"cache": cache, "k": k, "v": v, "sequences": sequences}, check)


@draws("attention_cached")
def _(draw: Draw) -> DrawnCall:
    groups, width, kind = draw.of(1, 2), draw.of(4, 8), draw.type()
    cache, sequences, lengths, starts = _cache(draw, groups, width, kind)
    q, scale = draw.tensor(sum(lengths), groups * draw.of(1, 2), width, type=kind), width**-0.5
    window, options, parts = draw.of((-1, -1), (0, 0), (2, -1), (3, 0)), _options(draw, q.shape[1]), []
    queries, keys = max(lengths), max(a + b for a, b in zip(lengths, starts, strict=True)) + draw.of(0, 1)
    shape = draw.of(1, 2), draw.of(1, q.shape[1]), draw.of(1, queries), draw.of(1, keys)
    bias = draw.tensor(*shape, type=DType.Float32) if draw.of(True, False) else None
    added = None if bias is None else f64(bias).expand(2, q.shape[1], queries, keys)
    for i, part in enumerate(f64(q).split(lengths)):
        ends = starts[i] + lengths[i]
        held = [_held(pages, cache, i, ends) for pages in (cache.k, cache.v)]
        rule = {"scale": scale, "options": options, "window_size": window}
        parts.append(_attended_last(part, *held, starts[i], rule, None if added is None else added[i]))
    values = f64(cache.v)
    wanted = nearly(torch.cat(parts), f64(q), f64(cache.k), values, type=kind, slack=_probabilities(kind, values))
    given = {"q": q, "cache": cache, "sequences": sequences, "scale": scale, "window_size": window, "options": options, "bias": bias}
    return DrawnCall(given, [wanted])


@draws("attention_step")
def _(draw: Draw) -> DrawnCall:
    groups, width, kind = draw.of(1, 2), draw.of(4, 8), draw.type()
    cache, sequences, lengths, starts = _cache(draw, groups, width, kind)
    q, scale = draw.tensor(sum(lengths), groups * draw.of(1, 2), width, type=kind), width**-0.5
    k, v = (draw.tensor(sum(lengths), groups, width, type=kind) for _ in "kv")
    window, rotary = draw.of((-1, -1), (0, 0), (2, -1)), draw.of(None, nvte.Rotary(100.0), nvte.Rotary(100.0, 4, interleaved=True))
    before = [[_held(pages, cache, i, starts[i]) for i in range(2)] for pages in (cache.k, cache.v)]
    # The position of a token is its place among the rows of as many tokens before it.
    placed = [
        torch.cat([torch.zeros(start, *x.shape[1:], dtype=torch.float64), part])
        for x in (q, k)
        for start, part in zip(starts, f64(x).split(lengths), strict=True)
    ]
    turned = [x if rotary is None else _rotated(x, [len(x)], rotary) for x in placed]
    rounded = [x[start:].to(nvte.te_to_torch_dtype(kind)).double() for x, start in zip(turned, starts * 2, strict=True)]
    held = [[torch.cat([before[0][i], rounded[2 + i]]), torch.cat([before[1][i], part])] for i, part in enumerate(f64(v).split(lengths))]
    rule = {"scale": scale, "options": nvte.ScoreOptions(), "window_size": window}
    value = torch.cat([_attended_last(rounded[i], *held[i], starts[i], rule) for i in range(2)])
    keys, values = (torch.cat([part[which] for part in held]) for which in range(2))
    slack = _probabilities(kind, values) * (1 if rotary is None else 1 + 8 * scale * width * q.data.abs().max().item() * keys.abs().max().item())
    wanted = nearly(value, f64(q), keys, values, type=kind, slack=slack)

    def check(found: Any) -> None:
        assert share(found, wanted, kind) <= 1
        for i, (of_k, of_v) in enumerate(held):
            assert torch.equal(_held(cache.v, cache, i, len(of_v)), of_v)
            rows = nvte.make_nvte_tensor(_held(cache.k, cache, i, len(of_k)).to(nvte.te_to_torch_dtype(kind)))
            assert share(rows, nearly(of_k, keys, type=kind), kind) <= 1

    return DrawnCall({"q": q, "k": k, "v": v, "cache": cache, "sequences": sequences, "scale": scale, "window_size": window, "rotary": rotary}, check)
