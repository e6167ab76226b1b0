"""Both dropouts: the 8-bit one of NVIDIA's interface, and the counter-based primitive."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tex_backends import REFERENCE, Runner, on_backends

from fusible.conformance.table import FLOATS, close
from fusible.errors import ArgumentError, ShapeError
from fusible.quantized import Float8Quantizer
from fusible.tex import DType
from fusible.tex.backends.torch_backend.random import words

NVIDIA = on_backends("dropout_fwd", "dropout_bwd")
PRIMITIVE = on_backends("prim_dropout", "prim_dropout_backward")
M64 = (1 << 64) - 1


def word(seed: int, counter: int) -> int:
    """The documented generator, in Python integers."""
    z = (seed + 0x9E3779B97F4A7C15) & M64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M64
    key = (z ^ (z >> 31)) | 1
    y = counter * key & M64
    x = y
    for addend in (y, y + key, y):
        x = (x * x + addend) & M64
        x = (x >> 32 | x << 32) & M64
    return (x * x + y + key & M64) >> 32


@given(seed=st.integers(-(1 << 63), (1 << 63) - 1), counter=st.integers(0, (1 << 63) - 1))
def test_words_are_the_documented_function(seed: int, counter: int) -> None:
    assert words(torch.tensor([seed]), torch.tensor([counter])).item() == word(seed & M64, counter)


def test_words_look_uniform_and_independent() -> None:
    for seed in (0, 1, 2):
        drawn = words(torch.tensor([seed]), torch.arange(1 << 16)).double() / 2**32
        assert abs(drawn.mean().item() - 0.5) < 5 / 12**0.5 / 2**8
        low_bits = words(torch.tensor([seed]), torch.arange(1 << 16)) & 255
        assert (torch.bincount(low_bits, minlength=256) - 256).abs().max() < 6 * 16
        assert abs(torch.corrcoef(torch.stack((drawn[:-1], drawn[1:])))[0, 1].item()) < 5 / 2**8


def unpacked(mask: torch.Tensor) -> torch.Tensor:
    return torch.stack([(mask >> bit) & 1 for bit in range(8)], -1).flatten().bool()


@NVIDIA
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5])
def test_the_mask_is_of_bits_and_backward_applies_it(runner: Runner, dtype: torch.dtype, p: float) -> None:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    torch.manual_seed(7)
    y, mask = runner("dropout_fwd", input=x, dropout_probability=p)
    assert mask.dtype is torch.uint8 and mask.shape == (x.numel() // 8,)
    keep = unpacked(mask).view(x.shape)
    close(y, torch.where(keep, x.double() / (1 - p), 0.0), dtype)
    dropped = 1 - keep.double().mean().item()
    assert abs(dropped - int(256 * p) / 256) < 5 * (0.25 / x.numel()) ** 0.5
    g = torch.randn(32, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    close(runner("dropout_bwd", grad_output=g, mask=mask, dropout_probability=p), torch.where(keep, g.double() / (1 - p), 0.0), dtype)
    torch.manual_seed(7)
    assert torch.equal(runner("dropout_fwd", input=x, dropout_probability=p)[1], mask)


@NVIDIA
def test_given_outputs_are_written_also_without_dropout(runner: Runner) -> None:
    x, out, grad = torch.ones(4, 8), torch.zeros(4, 8), torch.zeros(4, 8)
    y, mask = runner("dropout_fwd", input=x, dropout_probability=0.0, out=out)
    assert y is out and torch.equal(out, x)
    assert runner("dropout_bwd", grad_output=x, mask=mask, dropout_probability=0.0, grad_input=grad) is grad and torch.equal(grad, x)


@NVIDIA
def test_a_dropped_infinity_is_zero(runner: Runner) -> None:
    y, mask = runner("dropout_fwd", input=torch.full((64, 16), torch.inf), dropout_probability=0.5)
    assert torch.equal(y.flatten() == 0, ~unpacked(mask))


@NVIDIA
def test_an_fp8_input_comes_out_in_its_nominal_dtype(runner: Runner) -> None:
    x = torch.ones(4, 8, dtype=torch.bfloat16)
    quantized = REFERENCE("quantize", tensor=x, quantizer=Float8Quantizer(torch.ones(1), None, DType.kFloat8E4M3))
    y, _ = runner("dropout_fwd", input=quantized, dropout_probability=0.0)
    assert y.dtype is torch.bfloat16 and torch.equal(y, x)


@NVIDIA
def test_wrong_arguments_are_refused(runner: Runner) -> None:
    for p in (1.0, -0.1, 2.0):
        with pytest.raises(ArgumentError, match=r"a probability in \[0, 1\)"):
            runner("dropout_fwd", input=torch.ones(16), dropout_probability=p)
    with pytest.raises(ShapeError, match="a multiple of 16"):
        runner("dropout_fwd", input=torch.ones(3, 5), dropout_probability=0.5)
    with pytest.raises(ShapeError, match=r"uint8 \[2\]"):
        runner("dropout_bwd", grad_output=torch.ones(16), mask=torch.zeros(16, dtype=torch.uint8), dropout_probability=0.5)


@PRIMITIVE
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("offset", [0, 3])
def test_the_primitive_draws_the_documented_words(runner: Runner, dtype: torch.dtype, offset: int) -> None:
    x = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
    y, mask = runner("prim_dropout", x=x, probability=0.3, seed=torch.tensor([42]), offset=offset)
    expected = torch.tensor([word(42, offset * 2**40 + i) >= int(0.3 * 2**32) for i in range(x.numel())]).view(x.shape)
    assert mask.dtype is torch.uint8 and torch.equal(mask.bool(), expected)
    close(y, x.double() * expected / 0.7, dtype)
    close(runner("prim_dropout_backward", dy=x, mask=mask, probability=0.3), x.double() * expected / 0.7, dtype)
