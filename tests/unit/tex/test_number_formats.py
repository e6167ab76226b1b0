"""E2M1 and E8M0 bit for bit as ml_dtypes has them, where it has them; the rest against exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import torch

from fusible.tex.backends.torch_backend import number_formats as f

ALL_BYTES = torch.arange(256, dtype=torch.uint8)


def test_e2m1_rounds_as_ml_dtypes_and_saturates() -> None:
    halves = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0])
    near = torch.cat([halves, torch.nextafter(halves, torch.tensor(9.0)), torch.nextafter(halves, torch.tensor(-9.0))])
    x = torch.cat([near, -near, torch.linspace(-7, 7, 9999)])
    expected = x.clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn)
    codes = f.encode_e2m1(x)
    assert np.array_equal(codes.numpy(), expected.view(np.uint8) & 15)
    assert np.array_equal(f.decode_e2m1(codes).numpy(), expected.astype(np.float32))
    extreme = torch.tensor([float("inf"), -float("inf"), float("nan"), 1e30])
    assert f.decode_e2m1(f.encode_e2m1(extreme)).tolist() == [6.0, -6.0, 6.0, 6.0]
    assert f.encode_e2m1(-extreme)[2] == 7  # NaN has no sign


def test_e2m1_rounds_up_as_often_as_the_value_is_near() -> None:
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    random = torch.tensor([0.0, 0.25, 0.5, 0.75, 1 - 2.0**-24])
    for i, lower in enumerate(grid):
        assert (f.encode_e2m1_stochastically(lower.expand(5), random) == i).all()  # what is on the grid stays, whatever is drawn
        if i < 7:
            between = (lower + 0.625 * (grid[i + 1] - lower)).expand(5)
            assert f.encode_e2m1_stochastically(between, random).tolist() == [i + 1, i + 1, i + 1, i, i]
            assert f.encode_e2m1_stochastically(-between, random).tolist() == [i + 9, i + 9, i + 9, i + 8, i + 8]
            assert f.encode_e2m1_stochastically(torch.nextafter(grid[i + 1], lower).expand(5), random).tolist()[:4] == [i + 1] * 4
    extreme = torch.tensor([6.1, 1e30, float("inf"), -float("inf"), float("nan")])
    assert f.encode_e2m1_stochastically(extreme, random).tolist() == [7, 7, 7, 15, 7]


def test_nibbles_are_packed_low_first() -> None:
    codes = torch.randint(0, 16, (3, 5, 8), dtype=torch.uint8)
    packed = f.pack_nibbles(codes)
    assert packed.shape == (3, 5, 4) and packed[0, 0, 0] == codes[0, 0, 0] + 16 * codes[0, 0, 1]
    assert torch.equal(f.unpack_nibbles(packed), codes)
    assert torch.equal(f.decode_e2m1_pairs(packed), f.decode_e2m1(codes)) and f.decode_e2m1_pairs(packed[:0]).shape == (0, 5, 8)


def test_e8m0_decodes_as_ml_dtypes() -> None:
    expected = ALL_BYTES.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert np.array_equal(f.decode_e8m0(ALL_BYTES).numpy(), expected, equal_nan=True)


def test_e8m0_is_the_smallest_power_of_two_that_is_not_less() -> None:
    x = torch.cat([torch.arange(1, 2**31 - 2**23, 40009, dtype=torch.int64).to(torch.int32).view(torch.float32), f.decode_e8m0(ALL_BYTES[:255])])
    code = f.encode_e8m0(x)
    inside = (x <= 2.0**127) & (x > 2.0**-127)
    value = f.decode_e8m0(code)
    assert (value >= x)[inside].all() and (value < 2 * x)[inside].all()
    assert (code[x > 2.0**127] == 0xFE).all() and (code[x <= 2.0**-127] == 0).all()
    assert f.encode_e8m0(torch.tensor([0.0, float("inf"), float("nan")])).tolist() == [0, 0xFE, 0xFF]


def test_the_factor_undoes_the_scale() -> None:
    product = f.factor_of_e8m0(ALL_BYTES) * f.decode_e8m0(ALL_BYTES)
    assert (product[:255] == 1).all() and torch.isnan(product[255])


def test_the_scale_of_an_amax() -> None:
    amax = torch.tensor([0.0, float("inf"), float("nan"), 448.0, 3.0, 1e-45, 2.0**-20])
    scale = f.scale_of_amax(amax, 448.0, 0.0, False, 7.0)
    assert scale.tolist() == [1.0, 1.0, 1.0, 1.0, float(np.float32(448) / np.float32(3)), 7.0, 448.0 * 2**20]
    power = f.scale_of_amax(amax, 448.0, 0.0, True, 7.0)
    assert power.tolist() == [1.0, 1.0, 1.0, 1.0, 128.0, 4.0, 256.0 * 2**20]
    assert f.scale_of_amax(amax, 448.0, 1.0, False, 7.0).tolist()[0] == 448.0
    assert Fraction(power[4].item()) <= Fraction(448, 3)
