"""How the halves of a gated layer's weight lie: what the activation reads by ``glu_interleave_size`` is what the functions make."""

from __future__ import annotations

import pytest
import torch

from fusible.errors import ArgumentError, ShapeError
from fusible.pytorch import ops


def test_blocks_of_the_halves_alternate() -> None:
    rows = torch.arange(12)
    assert ops.interleave_glu_tensor(rows, 2).tolist() == [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]
    assert ops.interleave_glu_tensor(rows, 6).equal(rows)


@pytest.mark.parametrize("shape", [(8,), (8, 3), (24, 2, 5)])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_one_is_the_others_inverse(shape: tuple[int, ...], size: int) -> None:
    x = torch.randn(shape)
    y = ops.interleave_glu_tensor(x, size)
    assert (
        y.shape == x.shape
        and torch.equal(ops.deinterleave_glu_tensor(y, size), x)
        and torch.equal(x, ops.interleave_glu_tensor(ops.deinterleave_glu_tensor(x, size), size))
    )


def test_a_layer_of_interleaved_weights_before_an_interleaved_activation_is_the_plain_layer() -> None:
    weight, bias, x = torch.randn(32, 8), torch.randn(32), torch.randn(5, 8)
    plain = ops.SwiGLU()(torch.nn.functional.linear(x, weight, bias))
    rows = torch.nn.functional.linear(x, ops.interleave_glu_tensor(weight, 4), ops.interleave_glu_tensor(bias, 4))
    # A row of the product is summed alike wherever it lies; eight products at most are summed in another order.
    torch.testing.assert_close(ops.SwiGLU(glu_interleave_size=4)(rows), plain, rtol=8 * 2.0**-23, atol=8 * 2.0**-23)


@pytest.mark.parametrize("function", [ops.interleave_glu_tensor, ops.deinterleave_glu_tensor])
def test_what_is_not_whole_blocks_is_refused(function: object) -> None:
    assert callable(function)
    with pytest.raises(ShapeError, match=r"a gated layer's weight: expected a multiple of 8 rows, got \[12\]"):
        function(torch.zeros(12), 4)
    with pytest.raises(ShapeError):
        function(torch.zeros(()), 1)
    with pytest.raises(ArgumentError, match="interleave_size.*: expected .*at least 1.*got 0"):
        function(torch.zeros(12), 0)
