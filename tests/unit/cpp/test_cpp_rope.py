"""The rotary embedding against float64, at every level: sizes, strides, positions, threads."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fusible import cpp_extensions
from fusible.errors import ArgumentError, DTypeError, FusibleError, ShapeError

WIDE = (torch.float32, torch.bfloat16, torch.float16)
EPS = torch.finfo(torch.float32).eps


def reference(x: Tensor, freqs: Tensor, positions: Tensor, interleaved: bool, backward: bool) -> Tensor:
    """Float64; ``x [tokens, h, d]`` and a position each."""
    angles = freqs.reshape(freqs.shape[0], -1).double()[positions][:, None]
    width = angles.shape[-1]
    low, high = (slice(0, width, 2), slice(1, width, 2)) if interleaved else (slice(0, width // 2), slice(width // 2, width))
    y, head = x.double().clone(), x.double()[..., :width]
    cosine, sine = angles.cos(), angles.sin()
    to_low, to_high = (sine[..., high], -sine[..., low]) if backward else (-sine[..., low], sine[..., high])
    y[..., :width][..., low] = head[..., low] * cosine[..., low] + head[..., high] * to_low
    y[..., :width][..., high] = head[..., high] * cosine[..., high] + head[..., low] * to_high
    return y


def assert_close(found: Tensor, wanted: Tensor, x: Tensor) -> None:
    """Half a step of the dtype, and a rounding each of a sine or cosine, of two products and of their sum, relative to the pair's size."""
    largest = x.double().abs().amax().item() if x.numel() else 0.0
    info = torch.finfo(found.dtype)
    bound = 0.5 * info.eps * wanted.abs() + 4 * EPS * largest + info.smallest_normal * info.eps
    assert ((found.double() - wanted).abs() <= bound).all()


def rope(x: Tensor, freqs: Tensor, **options: Any) -> Tensor:
    arguments = {"sequence_first": True, "interleaved": False, "backward": False, **options}
    out = torch.full(x.shape, 7.0, dtype=x.dtype)
    cpp_extensions.rope(x, out, freqs, **arguments)
    return out


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("backward", [False, True])
@given(data=st.data())
def test_it_rotates_any_shape_wherever_it_lies(dtype: torch.dtype, interleaved: bool, backward: bool, data: st.DataObject) -> None:
    length, batch, heads = (data.draw(st.integers(1, n)) for n in (9, 3, 3))
    width = 2 * data.draw(st.integers(1, 70))
    rotated = 2 * data.draw(st.integers(0, width // 2))
    offset, gap = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 3))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    storage = torch.randn(offset + batch * length * (heads + gap) * width, generator=generator).to(dtype)
    x = storage[offset:].view(length, batch, heads + gap, width)[:, :, :heads]
    freqs = torch.rand(length + 4, 1, 1, rotated, generator=generator) * 10
    if data.draw(st.booleans()):
        freqs[..., rotated // 2 :] = freqs[..., : rotated // 2]
    start = torch.randint(0, 4, (batch,), generator=generator, dtype=torch.int32)
    positions = torch.arange(length)[:, None] + start
    wanted = reference(x.reshape(-1, heads, width), freqs, positions.reshape(-1), interleaved, backward).view(x.shape)
    for level in cpp_extensions.usable_levels():
        cpp_extensions.set_level(level)
        options = {"interleaved": interleaved, "backward": backward, "start_positions": start}
        found = rope(x, freqs, **options)
        assert_close(found, wanted, x)
        swapped = rope(x.transpose(0, 1), freqs, sequence_first=False, **options)
        assert torch.equal(swapped.transpose(0, 1), found)


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_threads_change_no_bit(level: str, dtype: torch.dtype) -> None:
    x = torch.randn(300, 2, 3, 70).to(dtype)
    freqs = torch.rand(300, 1, 1, 64) * 300
    one, two = (rope(x, freqs, interleaved=True, num_threads=threads) for threads in (1, 2))
    assert torch.equal(one, two)


def test_sine_and_cosine_are_those_of_the_angle_at_every_level_alike(level: str) -> None:
    """Heads (1, 0) turn into (cos, sin). Patch multiples of pi / 2, whose sine is what a reduction loses first, and far beyond them."""
    generator = np.random.default_rng(3)
    quarters = (np.arange(4000) * np.pi / 2).astype(np.float32)
    spread = (generator.uniform(-1, 1, 40_000) * np.exp2(generator.uniform(-30, 30, 40_000))).astype(np.float32)
    angles = np.concatenate([quarters, np.nextafter(quarters, np.float32(0)), spread, np.float32([0.0, 2.0**19, -(2.0**19), 3e38])])
    x = torch.tensor([1.0, 0.0]).repeat(len(angles), 1, 1, 1)
    y = rope(x, torch.from_numpy(angles)[:, None, None, None].repeat(1, 1, 1, 2)).numpy().reshape(-1, 2)
    exact = np.stack([np.cos(angles.astype(np.float64)), np.sin(angles.astype(np.float64))], -1)
    far = np.abs(angles) > 2.0**19  # there libm answers, within a unit
    step = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    assert (np.abs(y - exact) <= np.where(far[:, None], 1.0, 0.51) * step).all()


def test_an_angle_that_is_not_finite_gives_nan_to_its_pair_alone(level: str) -> None:
    freqs = torch.ones(1, 1, 1, 40)
    freqs[..., [3, 23]] = float("inf")
    y = rope(torch.ones(1, 1, 1, 40), freqs).flatten()
    assert y.isnan().nonzero().flatten().tolist() == [3, 23]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_spreads_to_its_partner_alone(level: str, value: float) -> None:
    x = torch.ones(1, 1, 1, 40)
    x[..., 5] = value
    for interleaved, partner in ((False, 25), (True, 4)):
        y = rope(x, torch.ones(1, 1, 1, 40), interleaved=interleaved).flatten()
        assert (~y.isfinite()).nonzero().flatten().tolist() == sorted([5, partner])


def test_packed_sequences_restart_and_the_rest_is_zero(level: str) -> None:
    x, freqs = torch.randn(8, 2, 6), torch.rand(5, 1, 1, 6)
    cu = torch.tensor([0, 3, 3, 6], dtype=torch.int32)
    y = rope(x, freqs, cu_seqlens=cu)
    assert_close(y[:6], reference(x[:6], freqs, torch.tensor([0, 1, 2, 0, 1, 2]), False, False), x)
    assert not y[6:].any()
    later = rope(x, freqs, cu_seqlens=cu, start_positions=torch.tensor([2, 9, 1], dtype=torch.int32))
    assert_close(later[:6], reference(x[:6], freqs, torch.tensor([2, 3, 4, 1, 2, 3]), False, False), x)
    assert not rope(x, freqs, cu_seqlens=cu[1:])[:3].any()
    for starts in ([3, 0, 0], [0, 0, -1]):
        with pytest.raises(FusibleError, match="positions of every token"):
            rope(x, freqs, cu_seqlens=cu, start_positions=torch.tensor(starts, dtype=torch.int32))


@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (2, 0, 3, 8), (2, 3, 0, 8), (2, 3, 2, 0)])
def test_nothing_is_rotated_without_error(level: str, shape: tuple[int, ...]) -> None:
    rope(torch.empty(shape), torch.rand(4, 1, 1, min(4, shape[-1])))


X, FREQS = torch.ones(4, 2, 1, 8), torch.ones(4, 1, 1, 8)
INT = torch.zeros(2, dtype=torch.int32)
CASES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a stride within the head": ({"x": torch.ones(4, 2, 1, 16)[..., ::2]}, ArgumentError, "src: expected neighbouring elements .+"),
    "integers": ({"x": X.int()}, DTypeError, "src: expected .*, got int32"),
    "a missing dimension": ({"x": X[0]}, ShapeError, re.escape("src: expected 4 dimensions, got [2, 1, 8]")),
    "one too many": ({"cu_seqlens": INT}, ShapeError, "src: expected 3 dimensions"),
    "wide angles": ({"freqs": torch.ones(4, 1, 1, 10)}, ShapeError, "freqs: expected an even width up to 8"),
    "angles in half precision": ({"freqs": FREQS.half()}, DTypeError, "freqs: expected float32"),
    "too few angles": ({"freqs": FREQS[:3]}, ShapeError, "got 3 and a token at 3"),
    "a start too late": ({"start_positions": INT + 1}, ShapeError, "got 4 and a token at 4"),
    "a negative start": ({"start_positions": INT - 1}, ShapeError, "a token at -1"),
    "a start too many": ({"start_positions": INT[:1]}, ShapeError, "start_positions: expected 2 elements"),
    "a start in floats": ({"start_positions": INT.float()}, DTypeError, "start_positions: expected int32"),
    "a rank too high": ({"cp_size": 2, "cp_rank": 2}, ArgumentError, "0 <= cp_rank < cp_size"),
    "no bounds": ({"x": X[0], "cu_seqlens": INT[:0], "out": torch.full((2, 1, 8), 7.0)}, ShapeError, "cu_seqlens: expected .*, got none"),
    "a wrong destination": ({"out": torch.full((3,), 7.0)}, ShapeError, "dst: expected 64 elements"),
    "another destination": ({"out": torch.full(X.shape, 7.0, dtype=torch.half)}, DTypeError, "dst: expected float32"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_bad_argument_is_one_sentence_and_nothing_is_written(case: str) -> None:
    given_arguments, error, message = CASES[case]
    arguments = {"x": X, "freqs": FREQS, "out": torch.full(X.shape, 7.0), "sequence_first": True, "interleaved": False, "backward": False}
    arguments |= given_arguments
    x, out, freqs = (arguments.pop(name) for name in ("x", "out", "freqs"))
    with pytest.raises(error, match=message) as caught:
        cpp_extensions.rope(x, out, freqs, **arguments)
    assert re.fullmatch(r".+: expected .+, got .+; .+\.", str(caught.value)), str(caught.value)
    assert (out == 7.0).all()


def test_strides_are_those_of_the_tensor() -> None:
    class Short:
        dtype, shape = torch.float32, (2, 2)

        def stride(self) -> tuple[int, ...]:
            return (2,)

    with pytest.raises(ShapeError, match="src: expected 2 strides, got 1"):
        cpp_extensions.rope(Short(), X, FREQS, True, False, False)  # pyright: ignore[reportArgumentType]
