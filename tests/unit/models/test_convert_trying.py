"""Whether a class computes a formula is told by numbers: what rounds otherwise is the same formula, and another one is not."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch.nn import functional as F

from fusible.models.convert.trying import computes, draw


@pytest.mark.parametrize("size", [1.0, 30.0, 1e4])
def test_a_sum_in_another_order_is_the_same(size: float) -> None:
    terms = size * draw(400, 24)
    exact = terms.double().sum(1)
    forwards, backwards = (functools.reduce(torch.add, columns) for columns in (terms.T, terms.T.flip(0)))
    assert not torch.equal(forwards, backwards)
    assert computes(forwards, backwards) and computes(forwards, exact.float())


@pytest.mark.parametrize("size", [1.0, 30.0])
def test_another_formula_is_another(size: float) -> None:
    x = draw(400, 8)
    assert not computes(size * F.gelu(x), size * F.gelu(x, approximate="tanh"))
    assert not computes(size * F.silu(x), size * F.silu(1.001 * x))


def test_no_tensor_another_shape_another_dtype_and_what_is_not_finite_are_told_apart() -> None:
    x = draw(4, 8)
    assert computes(x, x.clone()) and computes(x[:0], x[:0])
    assert not computes(None, x) and not computes(x.view(8, 4), x) and not computes(x.double(), x)
    for value in (math.inf, math.nan):
        assert not computes(torch.full_like(x, value), torch.full_like(x, value))
