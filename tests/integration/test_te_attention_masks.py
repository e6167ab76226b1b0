"""What attention by NVIDIA's names hides, adds and drops: padding wherever it lies, biases of the scores, slopes, dropout."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from te_client import package, relative_error
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fusible.compat import te_modules
from fusible.compat.te_modules.attention_call import Lengths
from fusible.compat.te_modules.attention_padding import of_padding
from fusible.compat.te_modules.rope import apply_fused_qkv_rotary_pos_emb, apply_rotary_pos_emb
from fusible.errors import ArgumentError, FusibleError, ShapeError

BATCH, HEADS, GROUPS, WIDTH = 3, 4, 2, 16
QUERIES, KEYS = 9, 11
BOUND = 2.0**-23 * math.sqrt(WIDTH + KEYS + QUERIES)
"""Of fp32: sums over a head's columns, over the keys of a query, and backward over the queries of a key, in another order."""
PADDED = {
    "left": lambda size: torch.arange(size) < torch.tensor([3, 0, 1])[:, None],
    "both sides": lambda size: (torch.arange(size) < torch.tensor([1, 2, 0])[:, None]) | (torch.arange(size) >= torch.tensor([7, 9, 5])[:, None]),
    "holes": lambda size: torch.arange(size)[None] % torch.tensor([3, 4, 5])[:, None] == 1,
}
"""What is True of padding, ``[b, s]``, by where it lies."""


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def operands(format_: str, keys: int = QUERIES) -> list[Tensor]:
    """q, k, v that want gradients, and a gradient of the output."""
    shapes = ((QUERIES, HEADS, WIDTH), (keys, GROUPS, WIDTH), (keys, GROUPS, WIDTH), (QUERIES, HEADS * WIDTH))
    made = [values(BATCH, *shape, seed=seed) for seed, shape in enumerate(shapes)]
    made = [x.transpose(0, 1).contiguous() for x in made] if format_ == "sbhd" else made
    return [x.requires_grad_() for x in made[:3]] + made[3:]


def attention(of: Any = te_modules, format_: str = "bshd", **options: Any) -> Any:
    return of.DotProductAttention(HEADS, WIDTH, GROUPS, qkv_format=format_, **options)


def outcome(module: Any, format_: str, hidden: Tensor, given: list[Tensor], **call: Any) -> list[Tensor]:
    """The output of the queries that are not ``hidden``, and the gradients of q, k and v."""
    q, k, v, do = given
    o = module(q, k, v, **call)
    hidden = (hidden.t() if format_ == "sbhd" else hidden).unsqueeze(-1)
    return [o.detach().masked_fill(hidden, 0), *torch.autograd.grad(o, (q, k, v), do.masked_fill(hidden, 0))]


def assert_close(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert all(relative_error(one, other) <= BOUND for one, other in zip(found, wanted, strict=True))


# Padding.


@pytest.mark.parametrize("where", PADDED)
def test_padding_lies_where_it_does_in_nvidias_package(where: str) -> None:
    hidden = PADDED[where](QUERIES)
    with package() as te:
        for format_, mask in (("bshd", "padding"), ("sbhd", "padding_causal")):
            theirs, ours = (attention(of, format_, attn_mask_type=mask) for of in (te, te_modules))
            call = {"attention_mask": hidden[:, None, None]}
            wanted = outcome(theirs, format_, hidden, operands(format_), **call)
            assert_close(outcome(ours, format_, hidden, operands(format_), **call), wanted)


OPTIONS: dict[str, dict[str, Any]] = {
    "padding": {},
    "padding_causal": {},
    "padding_causal_bottom_right": {},
    "a window": {"window_size": (2, 1)},
    "alibi": {"core_attention_bias_type": "alibi"},
    "slopes": {"core_attention_bias_type": "alibi", "alibi_slopes": torch.tensor([0.5, 0.2, 0.1, 0.7])},
    "a sink": {"softmax_type": "off-by-one"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_tokens_among_padding_are_those_that_lie_one_after_another(name: str) -> None:
    """The lengths and the bottom right corner, a window and slopes are of what is not hidden, as where padding is left out."""
    made = {key: value for key, value in OPTIONS[name].items() if key in ("window_size", "softmax_type")}
    called = {key: value for key, value in OPTIONS[name].items() if key not in made}
    mask = name if name.startswith("padding") else "padding"
    for where, to in PADDED.items():
        hidden = to(QUERIES), to(KEYS).roll(1, 0)
        packed, padded = (attention(format_=format_, attn_mask_type=mask, **made) for format_ in ("thd", "bshd"))
        given = operands("bshd", KEYS)
        found = outcome(padded, "bshd", hidden[0], given, attention_mask=tuple(x[:, None, None] for x in hidden), **called)
        rows = [x.detach()[~side].requires_grad_() for x, side in zip(given[:3], (hidden[0], hidden[1], hidden[1]), strict=True)]
        ends = [torch.cat([torch.zeros(1), (~side).sum(1).cumsum(0)]).to(torch.int32) for side in hidden]
        o = packed(*rows, cu_seqlens_q=ends[0], cu_seqlens_kv=ends[1], max_seqlen_q=QUERIES, max_seqlen_kv=KEYS, **called)
        grads = torch.autograd.grad(o, rows, given[3][~hidden[0]])
        for x, y, side in zip(found, (o, *grads), (hidden[0], *hidden, hidden[1]), strict=True):
            assert relative_error(x[~side], y) <= BOUND, where
            assert not x[side].any(), where


@pytest.mark.parametrize("kind", ["pre_scale_bias", "post_scale_bias"])
@pytest.mark.parametrize("shape", [(BATCH, HEADS, QUERIES, KEYS), (1, 1, 1, KEYS), (BATCH, 1, QUERIES, 1)], ids=str)
def test_a_bias_is_of_the_places_in_which_tokens_lie(kind: str, shape: tuple[int, ...]) -> None:
    hidden = PADDED["left"](QUERIES), PADDED["holes"](KEYS)
    masks = tuple(x[:, None, None] for x in hidden)
    bias, whole = values(*shape, seed=7).requires_grad_(), values(*shape, seed=7).requires_grad_()
    call = {"core_attention_bias_type": kind, "attention_mask": masks}
    found = operands("bshd", KEYS)
    o = attention(attn_mask_type="padding")(*found[:3], core_attention_bias=bias, **call)
    q, k, v, do = (x.double() for x in operands("bshd", KEYS))
    scale = WIDTH**-0.5
    k, v = (x.repeat_interleave(HEADS // GROUPS, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale + whole.double() * (scale if kind == "pre_scale_bias" else 1)
    wanted = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(masks[1], -torch.inf).softmax(-1), v).flatten(2)
    do = do.masked_fill(hidden[0].unsqueeze(-1), 0)
    assert relative_error(o, wanted.masked_fill(hidden[0].unsqueeze(-1), 0)) <= BOUND
    if shape[3] > 1:  # what is added to all scores of a query changes nothing
        (of_bias,), (of_whole,) = torch.autograd.grad(o, (bias,), do.float()), torch.autograd.grad(wanted, (whole,), do)
        assert relative_error(of_bias, of_whole) <= BOUND


def test_a_mask_of_one_sequence_is_that_of_all() -> None:
    q, k, v, _ = operands("bshd")
    module, hidden = attention(attn_mask_type="padding"), PADDED["left"](QUERIES)[:1, None, None]
    assert torch.equal(module(q, k, v, hidden), module(q, k, v, hidden.expand(BATCH, 1, 1, -1)))


def test_padding_behind_the_tokens_is_not_moved() -> None:
    hidden = torch.arange(QUERIES) >= torch.tensor([QUERIES, 4, 0])[:, None]
    lengths, order = of_padding(hidden[:, None, None], Lengths(None, None), "padding", BATCH, (QUERIES, QUERIES))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert order is None and lengths.q is lengths.kv and lengths.q.tolist() == [0, 9, 13, 13]


def test_nobody_waits_for_the_mask_of_a_gpu() -> None:
    """A number that the host asks for is refused in this mode."""
    called: list[str] = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(str(func))
            return func(*args, **kwargs or {})

    with FakeTensorMode(), Calls():
        hidden = torch.zeros(BATCH, 1, 1, QUERIES, dtype=torch.bool, device="cuda")
        _, order = of_padding(hidden, Lengths(None, None), "padding", BATCH, (QUERIES, QUERIES))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert order is None and called.count("aten._assert_async.msg") == 1


# Slopes.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", ["no_mask", "causal", "padding", "padding_causal", "padding_causal_bottom_right"])
def test_slopes_of_ones_own_are_those_of_alibi(mask: str, dtype: torch.dtype) -> None:
    q, k, v = (x.detach().to(dtype) for x in operands("bshd", 600)[:3])  # distances that bf16 cannot say
    slopes = torch.tensor([2.0 ** (-2 * (head + 1)) for head in range(HEADS)])
    ends = [torch.tensor(cu, dtype=torch.int32) for cu in ([0, 9, 11, 13], [0, 600, 1100, 1103])]
    lengths = dict(zip(("cu_seqlens_q", "cu_seqlens_kv"), ends, strict=True)) if "padding" in mask else {}
    module = attention(attn_mask_type=mask)
    found, per_sequence, wanted = (
        module(q, k, v, core_attention_bias_type="alibi", alibi_slopes=given, **lengths) for given in (slopes, slopes.expand(BATCH, HEADS), None)
    )
    eps = torch.finfo(dtype).eps
    stored = math.sqrt(eps * BOUND)  # where fp32 differs by BOUND, BOUND / eps of the values are rounded the other way, by eps
    assert relative_error(found, wanted) <= BOUND + stored and torch.equal(found, per_sequence)


# Dropout.


def _dot(x: Tensor) -> tuple[Any, tuple[Tensor, ...]]:
    q, k, v = (x.unflatten(-1, (HEADS, WIDTH)) for _ in "qkv")
    return te_modules.DotProductAttention(HEADS, WIDTH, attention_dropout=0.5), (q, k, v)


DROPPING: dict[str, Callable[[Tensor], tuple[Any, tuple[Tensor, ...]]]] = {
    "DotProductAttention": _dot,
    "MultiheadAttention": lambda x: (te_modules.MultiheadAttention(HEADS * WIDTH, HEADS, attention_dropout=0.5), (x,)),
    "TransformerLayer": lambda x: (te_modules.TransformerLayer(HEADS * WIDTH, 64, HEADS, hidden_dropout=0.0, attention_dropout=0.5), (x,)),
}


@pytest.mark.parametrize("name", DROPPING)
def test_attention_drops_while_it_trains_whatever_autograd_records(name: str) -> None:
    module, given = DROPPING[name](values(QUERIES, BATCH, HEADS * WIDTH))

    def called(*tensors: Tensor) -> Tensor:
        torch.manual_seed(5)
        return module(*tensors).detach()

    recorded = called(*(x.clone().requires_grad_() for x in given))
    assert torch.equal(called(*given), recorded)
    with torch.no_grad():
        assert torch.equal(called(*given), recorded)
    with torch.inference_mode():
        assert torch.equal(called(*given), recorded)
    module.eval()
    assert not torch.equal(called(*given), recorded)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_draws_what_is_drawn_without_it(reentrant: bool) -> None:
    module, _ = DROPPING["TransformerLayer"](values(1))
    found = []
    for checkpointed in (False, True):
        x = values(QUERIES, BATCH, HEADS * WIDTH).requires_grad_()
        torch.manual_seed(50)
        y = te_modules.checkpoint(module, x, use_reentrant=reentrant) if checkpointed else module(x)
        y.square().mean().backward()
        found.append((y.detach(), x.grad))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


# Rotary positions.


@pytest.mark.parametrize("format_", ["sbhd", "bshd"])
@pytest.mark.parametrize("split", [(32, 16, 16), (64, 32, 16)], ids=str)
def test_the_joint_rotation_goes_back_from_where_sequences_start(format_: str, split: tuple[int, ...]) -> None:
    angles = te_modules.RotaryPositionEmbedding(WIDTH)(32)
    starts = torch.tensor([3, 0, 7], dtype=torch.int32)
    qkv = values(*((QUERIES, BATCH) if format_ == "sbhd" else (BATCH, QUERIES)), GROUPS, sum(split)).requires_grad_()
    joint = apply_fused_qkv_rotary_pos_emb(qkv, angles, 0.5 * angles, list(split), format_, starts)
    parts = [x.reshape(*qkv.shape[:2], -1, WIDTH) for x in qkv.split(split, -1)]
    apart = [*(apply_rotary_pos_emb(x, e, format_, starts) for x, e in zip(parts, (angles, 0.5 * angles), strict=False)), parts[2]]
    grads = [values(*x.shape, seed=seed) for seed, x in enumerate(joint)]
    (found,) = torch.autograd.grad(joint, qkv, grads)
    (wanted,) = torch.autograd.grad(apart, qkv, [g.reshape(x.shape) for g, x in zip(grads, apart, strict=True)])
    assert relative_error(found, wanted) <= 2.0**-23 * math.sqrt(2)  # two products and their sum


# Refusals.


def _called(mask: str = "no_mask", attention_mask: Any = None, keys: int = KEYS, **call: Any) -> Any:
    q, k, v = operands("bshd", keys)[:3]
    return attention(attn_mask_type=mask)(*(call.pop(name, x) for name, x in zip(("q", "k", "v"), (q, k, v), strict=True)), attention_mask, **call)


def _biased(*shape: int, kind: str = "post_scale_bias") -> Any:
    return _called(core_attention_bias_type=kind, core_attention_bias=torch.zeros(shape))


def _sloped(*shape: int) -> Any:
    return _called(core_attention_bias_type="alibi", alibi_slopes=torch.ones(shape))


def _hidden(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bool)


def _packed_bias(keys: int) -> Any:
    ends = torch.tensor([0, 5, QUERIES], dtype=torch.int32)
    call = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "max_seqlen_q": 5, "max_seqlen_kv": 5}
    bias = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": torch.zeros(2, 1, 5, keys)}
    q, k, v = (x[0] for x in operands("bshd")[:3])
    return attention(format_="thd", attn_mask_type="padding")(q, k, v, **call, **bias)


def _decoder(length: int) -> Any:
    layer = te_modules.TransformerLayer(64, 64, HEADS, layer_type="decoder", self_attn_mask_type="no_mask")
    bias = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": torch.zeros(1, HEADS, QUERIES, QUERIES)}
    return layer(values(QUERIES, BATCH, 64), encoder_output=values(length, BATCH, 64), **bias)


SCORES = f"expected [{BATCH} or 1, {HEADS} or 1, {QUERIES} or 1, {KEYS} or 1], got "
REFUSED: dict[str, tuple[Callable[[], Any], type[FusibleError], str]] = {
    "a bias of more queries": (lambda: _biased(1, HEADS, QUERIES + 1, KEYS), ShapeError, SCORES),
    "a bias of more keys": (lambda: _biased(1, HEADS, QUERIES, KEYS + 1, kind="pre_scale_bias"), ShapeError, SCORES),
    "a bias of fewer keys": (lambda: _biased(1, HEADS, QUERIES, KEYS - 1), ShapeError, SCORES),
    "a bias of more sequences": (lambda: _biased(BATCH + 1, HEADS, QUERIES, KEYS), ShapeError, SCORES),
    "a bias of two sequences": (lambda: _biased(2, HEADS, QUERIES, KEYS), ShapeError, SCORES),
    "a bias of k's heads": (lambda: _biased(1, GROUPS, QUERIES, KEYS), ShapeError, SCORES),
    "a bias without heads": (lambda: _biased(BATCH, QUERIES, KEYS), ShapeError, SCORES),
    "no bias": (lambda: _called(core_attention_bias_type="post_scale_bias"), ArgumentError, "with 'post_scale_bias': expected a tensor, got none"),
    "a bias beside alibi": (lambda: _biased(1, HEADS, QUERIES, KEYS, kind="alibi"), ArgumentError, "with 'alibi': expected none, got a tensor"),
    "a bias of longer packed sequences": (lambda: _packed_bias(6), ShapeError, "expected [2 or 1, 4 or 1, 5 or 1, 5 or 1], got [2, 1, 5, 6]"),
    "a decoder's bias": (lambda: _decoder(KEYS), ShapeError, SCORES),
    "slopes of other heads": (lambda: _sloped(HEADS + 1), ShapeError, "alibi_slopes of DotProductAttention: expected [3 or 1, 4 or 1], got [1, 5]"),
    "slopes of other sequences": (lambda: _sloped(2, HEADS), ShapeError, "alibi_slopes of DotProductAttention: expected [3 or 1, 4 or 1]"),
    "an arbitrary mask of more": (lambda: _called("arbitrary", _hidden(1, 1, 16, 16)), ShapeError, SCORES),
    "an arbitrary mask of other sequences": (lambda: _called("arbitrary", _hidden(2, 1, QUERIES, KEYS)), ShapeError, SCORES),
    "padding of other sequences": (lambda: _called("padding", (_hidden(2, 1, 1, QUERIES),) * 2), ShapeError, "expected [3, 1, 1, 9] for the queries"),
    "padding of fewer keys": (
        lambda: _called("padding", (_hidden(BATCH, 1, 1, QUERIES), _hidden(BATCH, 1, 1, 5))), ShapeError, "expected [3, 1, 1, 11] for the keys"
    ),
    "one padding of two lengths": (lambda: _called("padding", _hidden(BATCH, 1, 1, QUERIES)), ShapeError, "expected [3, 1, 1, 11] for the keys"),
    "padding of scores": (
        lambda: _called("padding", _hidden(BATCH, 1, QUERIES, QUERIES), keys=QUERIES), ShapeError, "got [3, 1, 9, 9]; give a mask of these"
    ),
    "padding of numbers": (lambda: _called("padding", torch.zeros(BATCH, 1, 1, QUERIES)), ArgumentError, "expected a bool attention_mask"),
    "more heads of queries": (
        lambda: _called(q=torch.ones(BATCH, QUERIES, 8, WIDTH)), ShapeError, "query_layer of DotProductAttention: expected 4 heads, got 8"
    ),
    "other heads of keys": (
        lambda: _called(k=torch.ones(BATCH, KEYS, HEADS, WIDTH)), ShapeError, "key_layer of DotProductAttention: expected 2 heads, got 4"
    ),
    "other heads of values": (
        lambda: _called(v=torch.ones(BATCH, KEYS, 1, WIDTH)), ShapeError, "value_layer of DotProductAttention: expected 2 heads, got 1"
    ),
    "fewer values": (
        lambda: _called(v=torch.ones(BATCH, KEYS - 1, GROUPS, WIDTH)), ShapeError, "expected the tokens of key_layer, [3, 11], got [3, 10]"
    ),
    "more sequences of keys": (
        lambda: _called(**dict.fromkeys("kv", torch.ones(4, KEYS, GROUPS, WIDTH))), ShapeError, "expected the 3 sequences of query_layer, got 4"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_in_one_sentence(name: str) -> None:
    make, kind, sentence = REFUSED[name]
    with pytest.raises(kind) as raised:
        make()
    assert sentence in str(raised.value)


def test_what_fits_is_taken() -> None:
    for shape in ((1, 1, QUERIES, KEYS), (BATCH, 1, QUERIES, KEYS), (1, HEADS, 1, KEYS), (BATCH, HEADS, QUERIES, 1)):
        assert _biased(*shape).shape == (BATCH, QUERIES, HEADS * WIDTH)
        _called("arbitrary", _hidden(*shape))
    _packed_bias(5)
    _decoder(QUERIES)
    mask = torch.arange(KEYS) > torch.arange(QUERIES)[:, None]
    assert torch.equal(_called("arbitrary", mask), _called("arbitrary", mask.expand(BATCH, HEADS, QUERIES, KEYS)))
    assert torch.equal(_called(core_attention_bias=torch.ones(1, HEADS, QUERIES, KEYS)), _called())  # as in NVIDIA's package
