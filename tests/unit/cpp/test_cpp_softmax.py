"""Softmax of scores and its gradient against float64, at every level: sizes, masks, threads, what is not finite."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fusible import cpp_extensions
from fusible.errors import ArgumentError, DTypeError, ShapeError

WIDE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
EPS = torch.finfo(torch.float32).eps
KEYS = st.one_of(st.integers(0, 40), st.sampled_from([63, 64, 65, 127, 130]))


def unaligned(x: Tensor, offset: int) -> Tensor:
    """``x`` at ``offset`` elements into its storage."""
    return torch.cat([x.new_zeros(offset), x.flatten()])[offset:].view(x.shape)


def forward(x: Tensor, scale: float, offset: int = 0, **options: Any) -> Tensor:
    out = unaligned(torch.full(x.shape, 7.0, dtype=x.dtype), offset)
    cpp_extensions.softmax_forward(x, out, scale, **options)
    return out


def backward(g: Tensor, y: Tensor, scale: float, **options: Any) -> Tensor:
    out = torch.full(g.shape, 7.0, dtype=g.dtype)
    cpp_extensions.softmax_backward(g, y, out, scale, **options)
    return out


def hidden_by_causality(queries: int, keys: int) -> Tensor:
    return torch.arange(keys) > torch.arange(queries)[:, None] + keys - queries


def reference(x: Tensor, scale: float, mask: Tensor | None, causal: bool) -> Tensor:
    """Float64; the product with the scale is rounded to fp32, as it is defined to be."""
    scores = (x.float() * scale).double()
    hidden = torch.zeros(x.shape, dtype=torch.bool)
    if mask is not None:
        scores = scores.masked_fill(mask == 1, -10000.0)
        hidden = (scores == -10000.0).all(-1, keepdim=True).expand(x.shape)
    if causal:
        hidden = hidden_by_causality(*x.shape[-2:]).expand(x.shape)
        scores = scores.masked_fill(hidden, -torch.inf)
    return torch.softmax(scores, -1).masked_fill(hidden, 0)


def assert_close(found: Tensor, wanted: Tensor, length: int, magnitude: float) -> None:
    """Half a step of the dtype, and in fp32 a few units of the exponential's and one of each addition's."""
    info = torch.finfo(found.dtype)
    bound = 0.5 * info.eps * wanted.abs() + (length + 16) * EPS * magnitude + info.smallest_normal * info.eps
    assert ((found.double() - wanted).abs() <= bound).all()


@WIDE
@given(data=st.data())
def test_forward_and_backward_of_any_size(dtype: torch.dtype, data: st.DataObject) -> None:
    batch, heads, queries, keys = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3)), data.draw(st.integers(0, 9)), data.draw(KEYS)
    kind = data.draw(st.sampled_from(["plain", "causal", "mask of each", "mask of all"]))
    offset = data.draw(st.integers(0, 3))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    shape = (batch, heads, queries, keys)
    x, g = (unaligned((torch.randn(shape, generator=generator) * 3).to(dtype), offset) for _ in range(2))
    mask = torch.randint(0, 3, (batch if kind == "mask of each" else 1, 1, queries, keys), generator=generator, dtype=torch.uint8)
    given_mask = mask if "mask" in kind else None
    wanted = reference(x, 0.4, given_mask, kind == "causal")
    visible = g.double().masked_fill(hidden_by_causality(queries, keys), 0) if kind == "causal" else g.double()
    for level in cpp_extensions.usable_levels():
        cpp_extensions.set_level(level)
        y = forward(x, 0.4, offset, mask=given_mask, causal=kind == "causal")
        assert_close(y, wanted, keys, 1.0)
        dx = 0.4 * y.double() * (visible - (y.double() * visible).sum(-1, keepdim=True))
        assert_close(backward(g, y, 0.4, causal=kind == "causal"), dx, keys, 2 * g.double().abs().amax().item() if g.numel() else 0)


@WIDE
@pytest.mark.parametrize("causal", [False, True])
def test_threads_change_no_bit(level: str, dtype: torch.dtype, causal: bool) -> None:
    x, g = torch.randn(2, 3, 90, 130).to(dtype), torch.randn(2, 3, 90, 130).to(dtype)
    y, same = (forward(x, 0.7, causal=causal, num_threads=threads) for threads in (1, 2))
    assert torch.equal(y, same)
    assert torch.equal(*(backward(g, y, 0.7, causal=causal, num_threads=threads) for threads in (1, 2)))


@pytest.mark.parametrize("keys", [1, 5, 16, 33])
def test_what_a_causal_mask_hides_is_zero_and_not_read(level: str, keys: int) -> None:
    x = torch.randn(1, 1, 7, keys)
    hidden = hidden_by_causality(7, keys).expand(x.shape)
    poisoned = x.masked_fill(hidden, torch.nan)
    y = forward(poisoned, 1.0, causal=True)
    assert torch.equal(y, forward(x, 1.0, causal=True)) and not y[hidden].any()
    dx = backward(poisoned, y, 1.0, causal=True)
    assert dx.isfinite().all() and not dx[hidden].any()


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC00001, 0x7F800001, -1], ids=hex)
@pytest.mark.parametrize("masked", [False, True])
def test_a_nan_makes_its_row_nan_and_no_other(level: str, bits: int, masked: bool) -> None:
    x = torch.randn(1, 1, 3, 37)
    x.view(torch.int32)[0, 0, 1, 20] = bits
    mask = torch.zeros(1, 1, 3, 37, dtype=torch.uint8)
    if masked:
        mask[0, 0, 1] = 1
        mask[0, 0, 1, 20] = 0
    y = forward(x, 1.0, mask=mask if masked else None)
    assert y[0, 0, 1].isnan().all() and y[0, 0, [0, 2]].isfinite().all()


def test_a_mask_hides_what_is_not_finite_and_large_scores_do_not_overflow(level: str) -> None:
    x = torch.tensor([[[[3e38, 3e38, torch.nan, torch.inf]]]])
    mask = torch.tensor([[[[0, 0, 1, 1]]]], dtype=torch.uint8)
    assert forward(x, 1.0, mask=mask).flatten().tolist() == [0.5, 0.5, 0.0, 0.0]
    assert forward(torch.full((1, 3), -torch.inf), 1.0).isnan().all()
    low = torch.tensor([[0.0, -torch.inf, -80.0]])
    assert forward(low, 1.0)[0, 1] == 0 and forward(low, 1.0)[0, 2] > 0


X = torch.ones(2, 3, 4, 5)
MASK = torch.zeros(2, 1, 4, 5, dtype=torch.uint8)
FORWARD, BACKWARD = cpp_extensions.softmax_forward, cpp_extensions.softmax_backward
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], type[Exception], str]] = {
    "a vector": (FORWARD, (X.flatten(), 1.0), ShapeError, re.escape("src: expected [*, queries, keys], got [120]")),
    "integers": (FORWARD, (X.int(), 1.0), DTypeError, "src: expected .*, got int32"),
    "a mask of floats": (FORWARD, (X, 1.0, MASK.float()), DTypeError, "mask: expected uint8, got float32"),
    "a mask per head": (FORWARD, (X, 1.0, MASK.repeat(1, 3, 1, 1)), ShapeError, "mask: expected 40 elements, got 120"),
    "a mask for three dimensions": (FORWARD, (X[0], 1.0, MASK), ShapeError, "src, with a mask: expected 4 dimensions"),
    "another dtype": (BACKWARD, (X.half(), X, 1.0), DTypeError, "results: expected float16, got float32"),
    "another size": (BACKWARD, (X, X[:1], 1.0), ShapeError, "results: expected 120 elements"),
    "negative threads": (BACKWARD, (X, X, 1.0, False, -1), ArgumentError, "num_threads"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_bad_argument_is_one_sentence_and_nothing_is_written(case: str) -> None:
    function, arguments, error, message = CASES[case]
    at = 1 if function is FORWARD else 2
    out = torch.full(arguments[0].shape, 7.0, dtype=torch.half if "another dtype" in case else torch.float32)
    with pytest.raises(error, match=message) as caught:
        function(*arguments[:at], out, *arguments[at:])
    assert re.fullmatch(r".+: expected .+, got .+; .+\.", str(caught.value)), str(caught.value)
    assert (out == 7.0).all()


def test_the_destination_is_like_the_source() -> None:
    for out, error in ((torch.ones(3), ShapeError), (X.half(), DTypeError)):
        with pytest.raises(error, match="dst: expected .*"):
            FORWARD(X, out, 1.0)
        with pytest.raises(error, match="dst: expected .*"):
            BACKWARD(X, X, out, 1.0)
