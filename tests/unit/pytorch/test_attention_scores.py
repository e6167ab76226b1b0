"""What becomes of attention's scores - a cap, slopes, a mask, dropout - and cross attention, on every way that a module has, against float64."""

from __future__ import annotations

import copy
import importlib.util
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusible
from fusible import CrossAttention, DotProductAttention, KVCache, Residual, Sequential
from fusible.errors import ArgumentError, FusibleError, ShapeError
from fusible.pytorch import ops
from fusible.pytorch.engine.call_inputs import of_mask
from fusible.tex.calls.attention import alibi_slopes

HEADS, GROUPS, WIDTH, BATCH, LONGEST = 4, 2, 4, 3, 5
COLUMNS = (HEADS + 2 * GROUPS) * WIDTH
EPS = torch.finfo(torch.float32).eps
BOUND = 64 * (LONGEST + WIDTH) * EPS
"""Sums of at most that many terms of some units, in fp32, and a softmax between them."""
OWN = [0.5, 0.1, 0.25, 0.0]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cap": {"soft_cap": 0.8},
    "alibi": {"alibi": True},
    "slopes": {"alibi": OWN},
    "cap, slopes, window": {"soft_cap": 1.5, "alibi": torch.tensor(OWN), "window_size": (2, 1)},
    "all": {"soft_cap": 1.5, "alibi": True, "causal": False},
}
XLA = pytest.mark.skipif(importlib.util.find_spec("jaxlib") is None, reason="jaxlib is not installed")


def scored(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, options: dict[str, Any], causal: bool) -> Tensor:
    """One sequence ``[tokens, heads, width]``, as the documentation has it."""
    k, v = (t.repeat_interleave(HEADS // t.shape[1], 1) for t in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * WIDTH**-0.5
    cap, alibi = options.get("soft_cap"), options.get("alibi")
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    distance = torch.arange(len(q))[:, None] - torch.arange(len(k))
    if alibi is not None:
        slopes = alibi_slopes(HEADS) if alibi is True else alibi
        scores = scores - torch.as_tensor(slopes).to(scores)[:, None, None] * distance.abs()
    scores = scores if bias is None else scores + bias
    left, right = (edge if edge >= 0 else len(k) + len(q) for edge in options.get("window_size", (-1, -1)))
    scores = scores.masked_fill((distance > left) | (-distance > (0 if causal else right)), -torch.inf)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1).nan_to_num(0), v).flatten(1)


def reference(x: Tensor, lengths: Sequence[int], mask: Tensor | None, options: dict[str, Any]) -> Tensor:
    parts = []
    for b, part in enumerate(x.split(list(lengths))):
        q, k, v = (t.unflatten(1, (-1, WIDTH)) for t in part.split([n * WIDTH for n in (HEADS, GROUPS, GROUPS)], -1))
        one = None if mask is None else mask[b if len(mask) > 1 else 0]
        n = len(part)
        cut = None if one is None else one[:, : n if one.shape[1] > 1 else 1, : n if one.shape[2] > 1 else 1]
        parts.append(scored(q, k, v, cut, options, options.get("causal", True)))
    return torch.cat(parts)


Call = Callable[..., Tensor]


def _hooked(module: nn.Module) -> Call:
    model = Sequential(module, nn.Identity())
    module.register_forward_hook(lambda *args: None)
    return lambda x, lens, *extra: model(x, lens, extra_inputs=extra)


def _traced(module: nn.Module) -> Call:
    torch.compiler.reset()
    model = torch.compile(Sequential(module), backend="aot_eager", fullgraph=True)
    return lambda x, lens, *extra: model(x, lens, extra_inputs=list(extra))


def _in(container: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], Call]:
    def way(module: nn.Module) -> Call:
        model = container(module)
        return lambda x, lens, *extra: model(x, lens, extra_inputs=extra)

    return way


def _positional(module: nn.Module) -> Call:
    model = ops.Sequential(module, ops.Identity())
    return lambda x, lens, *extra: model(x, *extra, seq_lens=lens)


def _recomputed(module: nn.Module) -> Call:
    model = Sequential(module)
    return lambda x, lens, *extra: checkpoint(model, x, lens, extra_inputs=extra, use_reentrant=False)  # type: ignore[no-any-return]


WAYS: dict[str, Callable[[nn.Module], Call]] = {
    "alone": _in(lambda m: m),
    "Sequential": _in(Sequential),
    "nested": _in(lambda m: Sequential(ops.Sequential(m))),
    "ops.Sequential": _positional,
    "hooked": _hooked,
    "copy": _in(lambda m: copy.deepcopy(Sequential(m))),
    "pickle": _in(lambda m: pickle.loads(pickle.dumps(Sequential(m)))),
    "recomputed": _recomputed,
    "compiled": _in(lambda m: Sequential(m).compile("xla")),
    "torch.compile": _traced,
}
FORMS: dict[str, tuple[tuple[int, ...], Tensor | None, list[int]]] = {
    "batch": ((BATCH, LONGEST), None, [LONGEST] * BATCH),
    "concatenated": ((10,), torch.tensor([5, 2, 3]), [5, 2, 3]),
    "padded": ((BATCH, LONGEST), torch.tensor([5, 2, 3]), [5, 2, 3]),
}


def rows(x: Tensor, lengths: Sequence[int]) -> Tensor:
    """The tokens of a batch without its padding."""
    return x.flatten(0, -2) if x.ndim == 2 else torch.cat([part[:n] for part, n in zip(x, lengths, strict=True)])


def check(way: str, form: str, options: dict[str, Any], masked: bool) -> None:
    shape, lens, lengths = FORMS[form]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*shape, COLUMNS, generator=generator).requires_grad_()
    mask = torch.randn(BATCH, HEADS, LONGEST, LONGEST, generator=generator).requires_grad_() if masked else None
    extra = [] if mask is None else [mask]
    y = WAYS[way](DotProductAttention(HEADS, WIDTH, groups=GROUPS, mask=masked, **options))(x, lens, *extra)
    dy = torch.randn(y.shape, generator=generator)
    y.backward(dy)
    x_, mask_ = (None if t is None else t.detach().double().requires_grad_() for t in (x, mask))
    assert x_ is not None
    wanted = reference(rows(x_, lengths), lengths, mask_, options)
    wanted.backward(rows(dy, lengths).double())
    pairs = [(rows(y, lengths), wanted), (x.grad, x_.grad), *([] if mask_ is None or mask is None else [(mask.grad, mask_.grad)])]
    for found, right in pairs:
        assert found is not None and right is not None
        assert (found.detach().double() - right).abs().max() <= BOUND * max(1.0, right.abs().max().item())


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("form", FORMS)
def test_scores_are_those_of_the_formula(form: str, options: str, masked: bool) -> None:
    check("alone", form, OPTIONS[options], masked)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", [pytest.param(way, marks=XLA) if way == "compiled" else way for way in WAYS])
def test_every_way_of_a_call_has_the_options(way: str, form: str) -> None:
    check(way, form, OPTIONS["all"], masked=True)


@pytest.mark.parametrize("shape", [(b, h, s, t) for b in (1, BATCH) for h in (1, HEADS) for s in (1, LONGEST + 1) for t in (1, LONGEST + 2)], ids=str)
@pytest.mark.parametrize("executor", [pytest.param("xla", marks=XLA), "eager"])
def test_masks_of_every_shape_reach_sequences_of_unequal_length(executor: str, shape: tuple[int, ...]) -> None:
    """With rows and columns beyond the longest sequence, a gradient of 0 there, and an element that hides a key."""
    lengths, generator = [5, 2, 3], torch.Generator().manual_seed(4)
    x, mask = torch.randn(10, COLUMNS, generator=generator), torch.randn(shape, generator=generator)
    if shape[3] > 1:
        mask[..., 1] = -torch.inf
    model = Sequential(DotProductAttention(HEADS, WIDTH, groups=GROUPS, mask=True)).compile(executor)
    dy, results = torch.randn(10, HEADS * WIDTH, generator=generator), []
    for dtype in (torch.float32, torch.float64):
        leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in (x, mask)]
        if dtype is torch.float32:
            y = model(leaves[0], torch.tensor(lengths), extra_inputs=[leaves[1]])
        else:
            y = reference(leaves[0], lengths, leaves[1].expand(BATCH, -1, -1, -1), {})
        y.backward(dy.to(dtype))
        results.append([y.detach(), *(leaf.grad for leaf in leaves)])
    for found, right in zip(*results, strict=True):
        assert found is not None and right is not None and found.shape == right.shape
        assert (found.double() - right).abs().max() <= BOUND * max(1.0, right.abs().max().item())


@pytest.mark.parametrize("executor", [pytest.param("xla", marks=XLA), "eager"])
def test_a_mask_too_small_for_its_sequences_is_refused(executor: str) -> None:
    model = Sequential(DotProductAttention(HEADS, WIDTH, groups=GROUPS, mask=True)).compile(executor)
    for shape, error in (((1, 1, 4, 5), "5 queries and keys"), ((1, 1, 5, 4), "5 queries and keys"), ((2, 1, 5, 5), r"shape \[3 or 1, ")):
        with pytest.raises(FusibleError, match=f": expected {error}"):
            model(torch.zeros(10, COLUMNS), torch.tensor([5, 2, 3]), extra_inputs=[torch.zeros(shape)])


def test_a_bool_mask_hides_and_a_row_that_sees_nothing_is_0() -> None:
    seen = torch.rand(BATCH, 1, LONGEST, LONGEST, generator=torch.Generator().manual_seed(2)) > 0.4
    seen[1, :, 3] = False
    model, x = Sequential(DotProductAttention(HEADS, WIDTH, groups=GROUPS, causal=False, mask=True)), torch.randn(BATCH, LONGEST, COLUMNS)
    y = model(x, extra_inputs=[seen])
    added = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    wanted = reference(x.double().flatten(0, 1), [LONGEST] * BATCH, added, {"causal": False})
    assert (y.flatten(0, 1).double() - wanted).abs().max() <= BOUND and not y[1, 3].any()


@pytest.mark.parametrize("options", [name for name, given in OPTIONS.items() if given.get("causal", True)])
def test_a_cache_goes_on_as_the_whole_does(options: str) -> None:
    given = {**OPTIONS[options], **({"window_size": (2, 0)} if "window_size" in OPTIONS[options] else {})}
    model, x = Sequential(DotProductAttention(HEADS, WIDTH, groups=GROUPS, **given)).eval(), torch.randn(7, COLUMNS)
    cache, found = KVCache(2, 8, dtype=torch.float32), []
    with torch.no_grad():
        for step in ([0, 3], [2, 1], [2, 2]):
            done = cache.lengths
            lens = torch.tensor([step[1], step[0]])
            part = torch.cat([x[done[0] : done[0] + step[1]], x[done[1] : done[1] + step[0]]])
            found.append(model(part, lens, cache=cache).split(lens.tolist()))
            cache.advance(lens)
    whole = reference(x.double(), [7], None, given)
    for place in range(2):
        one = torch.cat([parts[place] for parts in found])
        assert (one.double() - whole[: len(one)]).abs().max() <= BOUND


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("executor", ["eager", pytest.param("xla", marks=XLA)])
def test_what_is_dropped_in_forward_is_dropped_in_backward(executor: str, recompute: bool) -> None:
    """What comes is linear in v, by what is kept: where backward keeps the same, ``<dy, y> = <dv, v>``."""
    attention = DotProductAttention(HEADS, WIDTH, dropout=0.4, causal=False)
    model = Sequential(attention).compile(executor)
    x = torch.zeros(2, 16, 3 * HEADS * WIDTH)
    x[..., 2 * HEADS * WIDTH :] = torch.randn(2, 16, HEADS * WIDTH, generator=torch.Generator().manual_seed(3))
    leaf = x.requires_grad_()
    torch.manual_seed(5)
    y = checkpoint(model, leaf, use_reentrant=False) if recompute else model(leaf)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(4))
    y.backward(dy)
    v, dv = (t.double()[..., 2 * HEADS * WIDTH :] for t in (leaf.detach(), leaf.grad))  # type: ignore[union-attr]
    assert ((dy.double() * y.detach()).sum() - (v * dv).sum()).abs() <= BOUND * (v * dv).abs().sum()
    torch.manual_seed(5)
    assert torch.equal(model(leaf), y)
    assert not torch.equal(model(leaf), y)
    model.eval()
    plain = Sequential(DotProductAttention(HEADS, WIDTH, causal=False))(leaf)
    assert (model(leaf) - plain).abs().max() <= BOUND


def test_dropout_keeps_its_share_and_every_layer_draws_its_own() -> None:
    tokens, p = 64, 0.3
    x = torch.zeros(4, tokens, 3 * HEADS * WIDTH)
    x[..., 2 * HEADS * WIDTH :] = 1
    one = DotProductAttention(HEADS, WIDTH, dropout=p, causal=False)
    y = Sequential(one)(x)
    kept = y[..., ::WIDTH] * tokens * (1 - p)
    assert (kept - kept.round()).abs().max() < 1e-3
    draws = kept.numel() * tokens
    assert abs(kept.mean() / tokens - (1 - p)) < 6 * (p * (1 - p) / draws) ** 0.5
    torch.manual_seed(1)
    first = Sequential(one)(x)
    torch.manual_seed(1)
    second = Sequential(fusible.Dropout(0.0), one)(x)
    assert not torch.equal(first, second)


@pytest.mark.skipif(importlib.util.find_spec("jaxlib") is None, reason="jaxlib is not installed")
@pytest.mark.parametrize("capped", [None, 2.0])
def test_both_executors_drop_the_same(capped: float | None) -> None:
    results = []
    for executor in ("eager", "xla"):
        model = Sequential(DotProductAttention(HEADS, WIDTH, groups=GROUPS, dropout=0.5, soft_cap=capped)).compile(executor)
        x = torch.randn(2, 6, COLUMNS, generator=torch.Generator().manual_seed(3)).requires_grad_()
        torch.manual_seed(9)
        y = model(x)
        y.square().sum().backward()
        results.append((y.detach(), x.grad))
    for a, b in zip(*results, strict=True):
        assert a is not None and b is not None and (a - b).abs().max() <= BOUND * max(1.0, a.abs().max().item())


KEYS = 7


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", [pytest.param(way, marks=XLA) if way == "compiled" else way for way in WAYS])
def test_cross_attention_is_that_of_the_formula(way: str, form: str, masked: bool) -> None:
    if way == "compiled" and form != "batch" and masked:
        pytest.skip("refused: a mask of sequences of unequal length")
    shape, lens, lengths = FORMS[form]
    generator, options = torch.Generator().manual_seed(1), {"soft_cap": 2.0}
    x = torch.randn(*shape, HEADS * WIDTH, generator=generator).requires_grad_()
    kv = torch.randn(BATCH, KEYS, 2 * GROUPS * WIDTH, generator=generator).requires_grad_()
    hidden = torch.zeros(BATCH, 1, 1, KEYS).masked_fill(torch.arange(KEYS) >= torch.tensor([7, 4, 1]).view(-1, 1, 1, 1), -torch.inf)
    extra = [kv, hidden] if masked else [kv]
    y = WAYS[way](CrossAttention(HEADS, WIDTH, groups=GROUPS, mask=masked, **options))(x, lens, *extra)  # type: ignore[arg-type]
    dy = torch.randn(y.shape, generator=generator)
    y.backward(dy)
    x_, kv_ = (t.detach().double().requires_grad_() for t in (x, kv))
    parts = []
    for b, part in enumerate(rows(x_, lengths).split(lengths)):
        k, v = (t.unflatten(1, (-1, WIDTH)) for t in kv_[b].chunk(2, -1))
        parts.append(scored(part.unflatten(1, (-1, WIDTH)), k, v, hidden[b].double() if masked else None, options, causal=False))
    torch.cat(parts).backward(rows(dy, lengths).double())
    for found, right in ((rows(y, lengths), torch.cat(parts)), (x.grad, x_.grad), (kv.grad, kv_.grad)):
        assert found is not None and right is not None
        assert (found.detach().double() - right).abs().max() <= BOUND * max(1.0, right.abs().max().item())


def test_keys_as_long_as_queries_are_not_cut_where_queries_are_padded() -> None:
    attention, lens = CrossAttention(HEADS, WIDTH), torch.tensor([5, 2, 3])
    x, kv = torch.randn(BATCH, LONGEST, HEADS * WIDTH), torch.randn(BATCH, LONGEST, 2 * HEADS * WIDTH)
    y, whole = attention(x, lens, extra_inputs=[kv]), attention(x, extra_inputs=[kv])
    assert all((y[b, :n] - whole[b, :n]).abs().max() <= BOUND for b, n in enumerate(lens.tolist())) and not y[1, 2:].any()


def test_an_encoder_decoder_generates_with_a_cache() -> None:
    """Self-attention goes on from the cache, cross attention reads the whole context at each step."""
    h = HEADS * WIDTH
    torch.manual_seed(3)
    self_attention = Residual(fusible.Linear(h, 3 * h), DotProductAttention(HEADS, WIDTH), fusible.Linear(h, h))
    model = Sequential(self_attention, Residual(fusible.Linear(h, h), CrossAttention(HEADS, WIDTH), fusible.Linear(h, h))).eval()
    x, kv = torch.randn(2, 6, h), torch.randn(2, KEYS, 2 * h)
    cache, steps = KVCache(2, 8, dtype=torch.float32), []
    with torch.no_grad():
        whole = model(x, extra_inputs=[kv])
        for part in x.split([3, 1, 2], 1):
            steps.append(model(part, cache=cache, extra_inputs=[kv]))
            cache.advance([part.shape[1]] * 2)
    assert (torch.cat(steps, 1) - whole).abs().max() <= 64 * h * EPS * max(1.0, whole.abs().max().item())


def test_a_channel_gives_keys_of_the_same_sequences() -> None:
    h = HEADS * WIDTH
    branch, cross = ops.MakeExtraOutput(), CrossAttention(HEADS, WIDTH, groups=GROUPS)
    assert 2 * GROUPS * WIDTH == h
    branch.set_extra_output_channel(0, "context", output_to_caller=False)
    cross.set_extra_input_channel(0, "context")
    model, x = ops.Sequential(branch, ops.GELU(), cross), torch.randn(BATCH, LONGEST, h)
    alone = CrossAttention(HEADS, WIDTH, groups=GROUPS)
    assert torch.equal(model(x), alone(ops.GELU()(x), extra_inputs=[x]))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_mask_of_bools_becomes_numbers_where_it_is(device: str) -> None:
    seen = torch.tensor([[True, False]], device=device)
    numbers = of_mask(seen)
    assert numbers.device == seen.device and (device == "meta" or numbers.tolist() == [[0.0, -torch.inf]])


def test_explain_shows_the_options() -> None:
    text = repr(DotProductAttention(HEADS, WIDTH, soft_cap=50.0, alibi=True, mask=True, dropout=0.1))
    assert "soft_cap=50.0, alibi=True, dropout=0.1, mask=True" in text
    assert "DotProductAttention" in Sequential(DotProductAttention(HEADS, WIDTH, mask=True)).explain(torch.randn(2, 3, 3 * HEADS * WIDTH))


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no cap": (lambda: DotProductAttention(2, 4, soft_cap=0.0), ArgumentError, "soft_cap of .*: expected a number above 0, or None"),
    "slopes": (lambda: DotProductAttention(2, 4, alibi=[0.5]), ArgumentError, "alibi of DotProductAttention: expected a bool, or 2 slopes"),
    "dropout": (lambda: CrossAttention(2, 4, dropout=1.0), ArgumentError, r"dropout of CrossAttention: expected a probability in \[0, 1\)"),
    "no mask": (
        lambda: DotProductAttention(2, 4, mask=True)(torch.randn(3, 24)),
        ArgumentError,
        "a call of DotProductAttention: expected 1 extra inputs",
    ),
    "mask": (
        lambda: DotProductAttention(2, 4, mask=True)(torch.randn(3, 24), extra_inputs=[torch.zeros(1, 3, 3, 3)]),
        ShapeError,
        r"the mask of DotProductAttention.*: expected shape \[1 or 1, 2 or 1, 3 or 1, 3 or 1\], got \[1, 3, 3, 3\]",
    ),
    "a mask too small": (
        lambda: DotProductAttention(2, 4, mask=True)(torch.randn(4, 24), torch.tensor([3, 1]), extra_inputs=[torch.zeros(1, 1, 2, 2)]),
        ShapeError,
        "the mask of DotProductAttention: expected 3 queries and keys, or 1, got ",
    ),
    "a mask too small for sequences of one length": (
        lambda: DotProductAttention(2, 4, mask=True)(torch.randn(2, 4, 24), extra_inputs=[torch.zeros(1, 1, 3, 4)]),
        ShapeError,
        r"the mask of DotProductAttention.*: expected shape \[2 or 1, 2 or 1, 4 or 1, 4 or 1\], got \[1, 1, 3, 4\]",
    ),
    "a mask of too few queries for keys of others": (
        lambda: CrossAttention(2, 4, mask=True)(
            torch.randn(4, 8), torch.tensor([3, 1]), extra_inputs=[torch.zeros(2, 5, 16), torch.zeros(1, 1, 2, 5)]
        ),
        ShapeError,
        r"the mask of CrossAttention: expected 3 queries, or 1, got \[1, 1, 2, 5\]",
    ),
    "a mask of three dimensions": (
        lambda: DotProductAttention(2, 4, mask=True)(torch.randn(4, 24), torch.tensor([3, 1]), extra_inputs=[torch.zeros(1, 3, 2)]),
        ShapeError,
        r"the mask of DotProductAttention.*: expected shape \[2 or 1, 2 or 1, q or 1, k or 1\], got \[1, 3, 2\]",
    ),
    "keys": (
        lambda: CrossAttention(2, 4)(torch.randn(2, 3, 8), extra_inputs=[torch.zeros(3, 5, 16)]),
        ShapeError,
        r"the keys and values of CrossAttention.*: expected \[2, keys, 16\], got \[3, 5, 16\]",
    ),
    "a mask with a cache": (
        lambda: torch.no_grad()(DotProductAttention(2, 4, causal=False, mask=True))(
            torch.randn(3, 24), cache=KVCache(1, 4, dtype=torch.float32), extra_inputs=[torch.zeros(1, 1, 3, 3)]
        ),
        ArgumentError,
        "a call with a cache: expected causal attention",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_options_are_refused_in_a_sentence(case: str) -> None:
    call, error, text = REFUSED[case]
    with pytest.raises(error, match=text):
        call()
