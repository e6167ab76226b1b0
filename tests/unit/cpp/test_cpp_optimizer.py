"""Adam, the L2 norm and the scaling of lists of tensors against float64, at every level: types, sizes, threads, what is not finite."""

from __future__ import annotations

import itertools
import math
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

WIDE = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = pytest.mark.parametrize("dtype", WIDE, ids=str)
EPS = torch.finfo(torch.float32).eps
COUNT = st.one_of(st.integers(0, 40), st.sampled_from([255, 256, 257, 511, 512, 513, 1100]))
RATES = {"lr": 0.1, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-4, "correction1": 0.271, "correction2": 0.142625}


def random(generator: torch.Generator, count: int, dtype: torch.dtype, offset: int = 0) -> Tensor:
    """``offset`` elements into its storage."""
    return torch.randn(count + offset, generator=generator).to(dtype)[offset:]


def adam(g: Tensor, p: Tensor, m: Tensor, v: Tensor, decoupled: bool, decay: float) -> tuple[Tensor, Tensor, Tensor]:
    """``(p, m, v)`` in float64."""
    g, p, m, v = (x.double() for x in (g, p, m, v))
    if not decoupled:
        g = g + decay * p
    m = RATES["beta1"] * m + (1 - RATES["beta1"]) * g
    v = RATES["beta2"] * v + (1 - RATES["beta2"]) * g * g
    u = (m / RATES["correction1"]) / ((v / RATES["correction2"]).sqrt() + RATES["epsilon"])
    return p - RATES["lr"] * (u + (decay * p if decoupled else 0)), m, v


def assert_close(found: Tensor, wanted: Tensor, magnitude: float) -> None:
    """Half a step of the dtype, and sixteen roundings in fp32 of numbers up to the magnitude."""
    info = torch.finfo(found.dtype)
    bound = 0.5 * info.eps * wanted.abs() + 16 * EPS * magnitude + info.smallest_normal * info.eps
    assert ((found.double() - wanted).abs() <= bound).all()


def step(lists: list[list[Tensor]], decoupled: bool = True, weight_decay: float = 0.2, num_threads: int = 0) -> None:
    g, p, m, v, *master = lists
    masters = master[0] if master else []
    cpp_extensions.multi_tensor_adam(g, p, m, v, masters, *RATES.values(), decoupled, weight_decay, num_threads)


@given(data=st.data(), decoupled=st.booleans(), decay=st.sampled_from([0.0, 0.2]))
def test_adam_of_any_mix_of_types_and_sizes(data: st.DataObject, decoupled: bool, decay: float) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    counts = data.draw(st.lists(COUNT, max_size=4))
    dtypes = data.draw(st.lists(st.sampled_from(WIDE), min_size=4, max_size=5))
    made = [[random(generator, count, dtype, data.draw(st.integers(0, 3))) for count in counts] for dtype in dtypes]
    made[3] = [v.abs() for v in made[3]]
    for level in cpp_extensions.usable_levels():
        cpp_extensions.set_level(level)
        lists = [[x.clone() for x in tensors] for tensors in made]
        step(lists, decoupled, decay)
        for i in range(len(counts)):
            g, p, m, v, *master = (tensors[i] for tensors in made)
            wanted = adam(g, master[0] if master else p, m, v, decoupled, decay)
            assert torch.equal(lists[0][i], g)
            for found, value, magnitude in zip((lists[1][i], lists[2][i], lists[3][i]), wanted, (40.0, 8.0, 32.0), strict=True):
                assert_close(found, value, magnitude)
            if master:
                assert_close(lists[4][i], wanted[0], 40.0)


def test_without_decay_an_infinite_weight_leaves_the_moments_alone(level: str) -> None:
    for decoupled in (False, True):
        lists = [[torch.ones(5)] for _ in range(4)]
        lists[1][0][2] = torch.inf
        step(lists, decoupled, 0.0)
        assert lists[2][0].isfinite().all() and lists[3][0].isfinite().all() and lists[1][0].isinf().sum() == 1


@DTYPES
@given(data=st.data())
def test_norms_of_any_sizes(dtype: torch.dtype, data: st.DataObject) -> None:
    """Squares and sums are double: what is left is the rounding of 1100 additions, 2^-53 each."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    tensors = [random(generator, count, dtype, data.draw(st.integers(0, 3))) for count in data.draw(st.lists(COUNT, max_size=4))]
    wanted = [x.double().square().sum().sqrt().item() for x in tensors]
    for level in cpp_extensions.usable_levels():
        cpp_extensions.set_level(level)
        total, each = cpp_extensions.multi_tensor_l2norm(tensors)
        assert each == pytest.approx(wanted, rel=1100 * 2.0**-53)
        assert total == pytest.approx(math.hypot(*wanted), rel=4400 * 2.0**-53)


def test_a_norm_neither_overflows_nor_vanishes(level: str) -> None:
    for value in (1e30, 1e-30, 1e-45):
        x = torch.full((100,), value)
        assert cpp_extensions.multi_tensor_l2norm([x])[0] == pytest.approx(10 * x[0].item(), rel=1e-12)
    assert math.isnan(cpp_extensions.multi_tensor_l2norm([torch.ones(3), torch.tensor([torch.nan])])[0])
    assert cpp_extensions.multi_tensor_l2norm([torch.tensor([-torch.inf])])[0] == math.inf
    assert cpp_extensions.multi_tensor_l2norm([]) == (0.0, [])


@pytest.mark.parametrize(("dtype", "out_dtype"), list(itertools.product(WIDE, WIDE)), ids=str)
@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 64, 1000])
def test_scaling_is_one_product_rounded_once(level: str, dtype: torch.dtype, out_dtype: torch.dtype, count: int) -> None:
    x = random(torch.Generator().manual_seed(count), count, dtype, 1)
    out = torch.full((count + 3,), 7.0, dtype=out_dtype)
    assert cpp_extensions.multi_tensor_scale([x], [out[:count]], 0.3)
    assert torch.equal(out[:count], (x.float() * 0.3).to(out_dtype)) and (out[count:] == 7.0).all()


@DTYPES
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("place", [0, 16, 39])
def test_scaling_tells_what_is_not_finite_and_writes_all_the_same(level: str, dtype: torch.dtype, value: float, place: int) -> None:
    x, out = torch.ones(40, dtype=dtype), torch.zeros(40)
    x[place] = value
    assert not cpp_extensions.multi_tensor_scale([torch.ones(3), x], [torch.ones(3), out], 2.0)
    assert (out == 2.0).sum() == 39
    assert cpp_extensions.multi_tensor_scale([torch.full((9,), 3e38)], [torch.zeros(9)], 2.0), "an input that is finite"


def test_threads_change_no_bit(level: str) -> None:
    shapes = (40_000, 3, 0, 17_000, 16_384)
    made = [[torch.rand(count) for count in shapes] for _ in range(4)]
    runs = []
    for threads in (1, 2):
        lists = [[x.clone() for x in tensors] for tensors in made]
        step(lists, num_threads=threads)
        scaled = [torch.empty(count) for count in shapes]
        cpp_extensions.multi_tensor_scale(made[0], scaled, 3.0, num_threads=threads)
        total, each = cpp_extensions.multi_tensor_l2norm(made[0], num_threads=threads)
        runs.append([*itertools.chain(*lists), *scaled, torch.tensor([total, *each], dtype=torch.float64)])
    assert all(torch.equal(one, two) for one, two in zip(*runs, strict=True))


X, Y, Z, W, V = ([torch.ones(4)] for _ in range(5))
LISTS = [X, Y, Z, W, V]
SCALE, NORM = cpp_extensions.multi_tensor_scale, cpp_extensions.multi_tensor_l2norm
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], type[Exception], str]] = {
    "integers": (NORM, ([torch.ones(3).int()],), DTypeError, "tensors: expected .*, got int32"),
    "one tensor": (NORM, (torch.ones(3),), DTypeError, "tensors: expected a list of tensors"),
    "an output too many": (SCALE, (X, [*Y, *Z], 2.0), ShapeError, "outputs: expected 1 tensors, got 2"),
    "another size": (SCALE, (X, [torch.ones(3)], 2.0), ShapeError, "outputs: expected 4 elements, got 3"),
    "negative threads": (SCALE, (X, X, 2.0, None, -1), ArgumentError, "num_threads"),
    "a missing moment": (step, ([*LISTS[:3], []],), ShapeError, "second: expected 1 tensors, got 0"),
    "another weight": (step, ([X, [torch.ones(5)], Z, W],), ShapeError, "weights: expected 4 elements"),
    "a master of integers": (step, ([X, Y, Z, W, [X[0].int()]],), DTypeError, "masters: expected .*, got int32"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_bad_argument_is_one_sentence_and_nothing_is_written(case: str) -> None:
    function, arguments, error, message = CASES[case]
    with pytest.raises(error, match=message) as caught:
        function(*arguments)
    assert re.fullmatch(r".+: expected .+, got .+; .+\.", str(caught.value)), str(caught.value)
    assert all(torch.equal(each[0], torch.ones(4)) for each in LISTS)
