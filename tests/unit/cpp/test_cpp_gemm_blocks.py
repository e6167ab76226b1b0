"""Products with a right operand in blocks, read as it lies or packed with its scales, against float64 at every level: formats, sizes, special values,
errors."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from coded_operands import E2M1, E4M3, E5M2, EPS, FORMATS, FOURS, WIDE, Blocks, agree, bound, random_blocks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusible import cpp_extensions as native
from fusible.errors import ArgumentError, DTypeError, ShapeError


@pytest.mark.parametrize("name", FORMATS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(
    rows=st.integers(1, 24) | st.sampled_from([25, 32, 33, 47, 49, 70]),
    lines=st.sampled_from([1, 7, 8, 33, 64, 65, 130, 200]),
    blocks=st.sampled_from([1, 2, 3, 4, 5, 8, 31, 33, 70, 130]),
    kind=st.sampled_from([*WIDE, E4M3, E5M2]),
    dtype=st.sampled_from(WIDE[:2]),
)
def test_formats_and_sizes(level: str, name: str, rows: int, lines: int, blocks: int, kind: torch.dtype, dtype: torch.dtype) -> None:
    right = random_blocks(name, lines, blocks)
    left = torch.randn(rows, right.values.shape[1], generator=torch.Generator().manual_seed(1)).to(kind)
    agree(right.product(left, dtype), left.double() @ right.values.t(), bound(left, right, dtype))


@pytest.mark.parametrize("name", FORMATS)
def test_rows_that_are_longer_than_what_is_summed_at_once(level: str, name: str) -> None:
    right = random_blocks(name, 5, 260)
    left = torch.randn(3, right.values.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
    agree(right.product(left), left.double() @ right.values.t(), bound(left, right, torch.float32))


@pytest.mark.parametrize("name", ["rows e4m3", "squares e5m2"])
@pytest.mark.parametrize("depth", [1, 31, 100, 129, 1100])
@pytest.mark.parametrize("rows", [3, 35])
def test_a_last_block_may_be_short(level: str, name: str, depth: int, rows: int) -> None:
    whole = random_blocks(name, 70, -(-depth // 32))
    right = Blocks(whole.codes[:, :depth].contiguous(), whole.dtype, whole.scales, whole.tiled)
    left = torch.randn(rows, depth, generator=torch.Generator().manual_seed(1)).bfloat16()
    agree(right.product(left), left.double() @ right.values.t(), bound(left, right, torch.float32))


@pytest.mark.parametrize("rows", [1, 3, 30])
def test_every_code_is_decoded_exactly(level: str, rows: int) -> None:
    """Each code beside zeros, times one and a scale that is a power of two."""
    for dtype, count, length, powers in ((E4M3, 256, 64, False), (E5M2, 256, 64, False), (E2M1, 16, 32, False), (E2M1, 16, 32, True)):
        for place in (0, 1, 13, 31):
            codes = torch.zeros(count, length, dtype=torch.uint8)
            codes[:, place if dtype != E2M1 else place // 2] = torch.arange(count, dtype=torch.uint8) << (4 * (place % 2) if dtype == E2M1 else 0)
            depth = length if dtype != E2M1 else 2 * length
            scales = torch.full((count, depth // 32), 125, dtype=torch.uint8)
            scales = scales if dtype != E2M1 or powers else torch.full((count, depth // 16), 0x28, dtype=torch.uint8)  # a quarter, in either
            found = Blocks(codes, dtype, scales, powers=powers).product(torch.ones(rows, depth, dtype=torch.bfloat16))[-1]
            values = FOURS if dtype == E2M1 else torch.arange(256, dtype=torch.uint8).view(dtype).float()
            assert torch.equal(found.nan_to_num(7.0), (values / 4).nan_to_num(7.0)), (dtype, place)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 20, 40])
def test_special_values_are_those_of_decoded_operands(level: str, rows: int, kind: torch.dtype) -> None:
    """NaN and infinity among codes and scales, and what is multiplied by zero: wherever a decoded product has NaN or infinity, and nowhere else."""
    for name in FORMATS:
        right = random_blocks(name, 70, 10)
        length = right.codes.shape[1]
        if right.dtype != E2M1:
            right.codes[3, 5], right.codes[67, length - 1] = 0x7F, 0xFF  # NaN in both formats
        if right.dtype == E5M2:
            right.codes[9, 40], right.codes[10, 0], right.codes[10, 1] = 0x7C, 0x7C, 0xFC
        if right.scales.dtype == torch.uint8:
            right.scales[20, 1], right.scales[21, :] = right.nan, 0
        elif not right.tiled:
            right.scales[1, 20], right.scales[0, 21], right.scales[2, 22] = torch.nan, torch.inf, 0.0
        left = torch.randn(rows, right.values.shape[1], generator=torch.Generator().manual_seed(1))
        left[0, ::3] = 0.0
        left = left.to(kind)
        want, got = left.double() @ right.values.t(), right.product(left)
        unlike = torch.zeros(70, dtype=torch.bool)
        if right.scales.dtype == torch.float32 and not right.tiled:  # infinity times a sum, not a sum of infinities, which may be of either sign
            unlike[21] = True
        assert torch.equal(want.isnan()[:, ~unlike], got.isnan()[:, ~unlike]), name
        assert torch.equal(want.isfinite(), got.isfinite()), name
        finite = want.isfinite()
        assert bool((got.double() - want).abs()[finite].le(bound(left, right, torch.float32)[finite]).all()), name


@pytest.mark.parametrize("rows", [33, 64, 200, 530])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_many_rows_have_the_bits_of_a_product_of_decoded_values(level: str, rows: int, kind: torch.dtype) -> None:
    """Bf16 holds codes of FP8 times powers of two, and codes of four bits times their scales; units of floats are those of a float weight."""
    for name, lines, blocks in product(FORMATS, (33, 200), (3, 70, 130)):
        right = random_blocks(name, lines, blocks)
        if right.scales.dtype == torch.float32 and kind == torch.bfloat16:
            right.scales.copy_(torch.exp2(right.scales.log2().round()))
        left = torch.randn(rows, right.values.shape[1], generator=torch.Generator().manual_seed(1)).to(kind)
        values = right.values.to(kind)
        assert torch.equal(values.double(), right.values) or right.scales.dtype == kind == torch.float32
        wanted = torch.empty(rows, lines)
        native.gemm(left, False, kind, 1.0, values, True, kind, 1.0, wanted, torch.float32)
        assert torch.equal(right.product(left), wanted), (name, lines, blocks)


@pytest.mark.parametrize("name", ["mx e4m3", "mx e5m2"])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, E4M3])
@pytest.mark.parametrize("transposed", [False, True])
def test_blocks_along_columns(level: str, name: str, kind: torch.dtype, transposed: bool) -> None:
    """A right operand that is not transposed, as in a backward pass: the bits of a product of decoded values, at ends of panels and of K too."""
    wide = torch.float32 if kind == torch.float32 else torch.bfloat16
    for rows, lines, blocks in product((1, 30, 210), (1, 33), (3, 130)):
        right = random_blocks(name, lines, blocks)
        right.scales[0, 0] = 0
        right.codes[0, :32] = 0x80
        left = torch.randn(rows, right.values.shape[1], generator=torch.Generator().manual_seed(1)).to(kind)
        want, allowed = left.double() @ right.values.t(), bound(left, right, torch.float32)
        left = left.t().contiguous() if transposed else left
        codes, scales = right.codes.t().contiguous(), right.scales.t().contiguous()
        got, decoded = torch.empty(rows, lines), torch.empty(rows, lines)
        native.gemm(left, transposed, kind, 1.0, codes, False, right.dtype, 1.0, got, torch.float32, right_scales=scales)
        native.gemm(left, transposed, kind, 1.0, right.values.t().contiguous().to(wide), False, wide, 1.0, decoded, torch.float32)
        assert torch.equal(got, decoded), (rows, lines, blocks)
        agree(got, want, allowed)


@pytest.mark.parametrize("name", FORMATS)
def test_a_left_operand_may_be_transposed(level: str, name: str) -> None:
    right = random_blocks(name, 70, 10)
    for rows, kind in product((3, 40), (torch.float32, torch.bfloat16)):
        left = torch.randn(rows, right.values.shape[1], generator=torch.Generator().manual_seed(1)).to(kind)
        got = torch.empty(rows, 70)
        operands = left.t().contiguous(), True, kind, 1.0, right.codes, True, right.dtype, 1.0, got, torch.float32
        native.gemm(*operands, right_scales=right.given, right_tiled=right.tiled)
        agree(got, left.double() @ right.values.t(), bound(left, right, torch.float32))


@pytest.mark.parametrize("name", ["mx e4m3", "mx e5m2", "rows e4m3", "squares e5m2", "mx fours"])
@pytest.mark.parametrize("scale", [0, 1, 9, 10, 40, 76, 178, 200, 246])
def test_scales_at_the_ends_of_their_range_are_exact(level: str, name: str, scale: int) -> None:
    """Powers of two with which bf16 has no values, or products that are no normal floats: ``right`` is of one such block beside usual ones."""
    right = random_blocks(name, 40, 9)
    power = torch.tensor([scale], dtype=torch.uint8).view(torch.float8_e8m0fnu).float()
    exponents = right.scales.dtype == torch.uint8
    right.scales[:, 1 if exponents else 0] = scale if exponents else power
    magnitude = min(1.0, 2.0 ** (110 - scale)) if scale > 127 else 1.0
    left = (torch.randn(60, right.values.shape[1], generator=torch.Generator().manual_seed(1)) * magnitude).bfloat16()
    agree(right.product(left), left.double() @ right.values.t(), bound(left, right, torch.float32))


@pytest.mark.parametrize("name", ["mx e4m3", "mx fours"])
def test_blocks_of_zeros_may_have_any_scale(level: str, name: str) -> None:
    """A block of zeros has the least exponent, and does not make a product in bf16 one in floats: the bits are those of a usual exponent."""
    right = random_blocks(name, 40, 9)
    bytes_of = right.codes.shape[1] // 9
    right.codes[3:9, bytes_of : 3 * bytes_of] = 0x80 if right.dtype != E2M1 else 0x80 | 0x08
    left = torch.randn(60, right.values.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
    usual, wanted = right.scales.clone(), right.product(left)
    right.scales[3:9, 1:3] = torch.tensor([0, 254], dtype=torch.uint8)
    assert torch.equal(right.product(left), wanted)
    if right.dtype != E2M1:
        operands = left, False, left.dtype, 1.0, right.codes.t().contiguous(), False, right.dtype, 1.0
        across = [torch.empty(60, 40), torch.empty(60, 40)]
        for result, scales in zip(across, (usual, right.scales), strict=True):
            native.gemm(*operands, result, torch.float32, right_scales=scales.t().contiguous())
        assert torch.equal(*across)
    right.scales[4, 2] = 0xFF
    assert bool(right.product(left)[:, 4].isnan().all())


def test_the_epilogue(level: str) -> None:
    for name, rows in product(FORMATS, (9, 29)):
        right = random_blocks(name, 70, 6)
        left = torch.randn(rows, right.values.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
        bias, addend = torch.randn(70), torch.randn(rows, 70)
        want = 0.5 * (left.double() @ right.values.t()) + 0.25 * addend.double() + bias.double()
        allowed = bound(left, right, torch.float32) + 4 * EPS * (addend.abs().double() + bias.abs().double() + want.abs())
        agree(right.product(left, alpha=0.5, beta=0.25, addend=addend, bias=bias), want, allowed)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_threads_and_columns_around_it_change_nothing(level: str, kind: torch.dtype) -> None:
    """A column's result is of one order, whichever columns are computed with it and on however many threads."""
    for name in FORMATS:
        for rows in (1, 4, 11, 33):
            right = random_blocks(name, 200, 40)
            left = torch.randn(rows, right.values.shape[1], generator=torch.Generator().manual_seed(1)).to(kind)
            wanted = right.product(left, num_threads=1)
            assert torch.equal(right.product(left, num_threads=3), wanted)
            if not right.tiled:
                of_lines = right.scales if right.scales.dtype == torch.uint8 else right.scales.t()
                some = of_lines[131:150].contiguous() if right.scales.dtype == torch.uint8 else of_lines[131:150].t().contiguous()
                assert torch.equal(
                    Blocks(right.codes[131:150].contiguous(), right.dtype, some, powers=right.powers).product(left), wanted[:, 131:150]
                )


def test_wrong_arguments_are_named_before_anything_is_written() -> None:
    right, out = random_blocks("mx e4m3", 6, 2), torch.full((4, 6), 7.0)

    def refused(error: type[Exception], match: str, left: Tensor | None = None, flags: tuple[bool, bool] = (False, True), **changed: Any) -> None:
        left = torch.zeros(4, 64) if left is None else left
        given = {"right": right.codes, "right_dtype": right.dtype, "right_scales": right.scales, "right_tiled": False, "dst": out} | changed
        kinds = {"left_dtype": left.dtype, "left_scale": 1.0, "right_scale": 1.0, "dtype": torch.float32}
        with pytest.raises(error, match=match):
            native.gemm(left=left, left_transposed=flags[0], right_transposed=flags[1], **kinds, **given)
        assert bool((out == 7.0).all())

    other = "gemm with right_scales that are no E8M0 bytes: expected a transposed right operand, got another"
    floats = torch.zeros(1, 64)
    refused(ArgumentError, other, torch.zeros(4, 6), (False, False), right_scales=floats)
    refused(ArgumentError, other, torch.zeros(6, 4), (True, False), right_scales=floats)
    refused(ArgumentError, other, torch.zeros(4, 6), (False, False), right_dtype=E2M1)
    refused(ShapeError, "right: expected rows in multiples of 32, got 6", torch.zeros(4, 6), (False, False))
    refused(ShapeError, "right_scales: expected a matrix of at least 1 x 64", torch.zeros(4, 32), (False, False), right=right.codes.new_zeros(32, 64))
    refused(ShapeError, "right_scales: expected a matrix of at least 6 x 2", right_scales=right.scales[:, :1].contiguous())
    refused(ShapeError, "right: expected columns in multiples of 32, got 40", torch.zeros(4, 40), right=right.codes[:, :40].contiguous())
    refused(ShapeError, "right_scales: expected a matrix of at least 1 x 6", right_scales=torch.zeros(1, 5))
    refused(
        ShapeError, "right: expected 64 in the contracted dimension, got 128", right_dtype=E2M1, right_scales=torch.zeros(6, 8, dtype=torch.uint8)
    )
    refused(DTypeError, "right_scales: expected uint8 or float8_e8m0fnu, got int32", right_scales=right.scales.int())
    refused(DTypeError, "fp8_dtype: expected float8_e4m3fn or float8_e5m2, got bfloat16", right_dtype=torch.bfloat16)
    refused(ArgumentError, "right_scales of squares: expected float32 scales, got uint8", right_tiled=True)
    refused(ArgumentError, "dst", dst=right.scales)
