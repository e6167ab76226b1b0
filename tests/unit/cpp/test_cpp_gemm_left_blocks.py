"""Products with a left operand in blocks, decoded while it is packed, against float64 at every level: formats, sizes, special values, errors."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from coded_operands import E2M1, E4M3, EPS, FORMATS, WIDE, Blocks, agree, bound, random_blocks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusible import cpp_extensions as native
from fusible.errors import ArgumentError, DTypeError, ShapeError

ALONG_ROWS = [name for name in FORMATS if not name.startswith("squares")]
MX = [name for name in FORMATS if name.startswith("mx e")]


def multiplied(left: Blocks, right: Tensor | Blocks, transposed: bool = True, dtype: torch.dtype = torch.float32, **more: Any) -> Tensor:
    """``left @ right.T``; not ``transposed``, the kernel is given ``right.T``."""
    codes = right.codes if isinstance(right, Blocks) else right if transposed else right.t().contiguous()
    if isinstance(right, Blocks):
        more |= {"right_scales": right.given, "right_tiled": right.tiled}
    out = torch.empty(len(left.codes), len(right.codes) if isinstance(right, Blocks) else len(right), dtype=dtype)
    operands = left.codes, False, left.dtype, 1.0, codes, transposed, right.dtype, 1.0
    native.gemm(*operands, out, dtype, left_scales=left.given, **more)
    return out


def other(lines: int, depth: int, kind: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(lines, depth, generator=torch.Generator().manual_seed(1)).to(kind)


def length_of(name: str) -> int:
    """Of what ``random_blocks`` counts."""
    return 16 if name == "fours" else 32


def with_powers(blocks: Blocks) -> Blocks:
    """With powers of two for scales of float32."""
    if blocks.scales.dtype == torch.float32:
        blocks.scales.copy_(torch.exp2(blocks.scales.log2().round()))
    return blocks


@pytest.mark.parametrize("name", ALONG_ROWS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(
    rows=st.sampled_from([1, 3, 8, 24, 25, 33, 70, 130, 200]),
    lines=st.sampled_from([1, 7, 33, 64, 65, 200]),
    blocks=st.sampled_from([1, 2, 5, 8, 31, 33, 130]),
    kind=st.sampled_from([*WIDE, E4M3]),
    transposed=st.booleans(),
)
def test_formats_and_sizes(level: str, name: str, rows: int, lines: int, blocks: int, kind: torch.dtype, transposed: bool) -> None:
    left = random_blocks(name, rows, blocks)
    right = other(lines, left.values.shape[1], kind)
    agree(multiplied(left, right, transposed), left.values @ right.double().t(), bound(left.values, right, torch.float32))


@pytest.mark.parametrize("name", ALONG_ROWS)
@pytest.mark.parametrize("of_right", FORMATS)
def test_both_operands_may_be_in_blocks(level: str, name: str, of_right: str) -> None:
    for rows, depth in product((5, 40, 210), (256, 1280)):
        left, right = random_blocks(name, rows, depth // length_of(name)), random_blocks(of_right, 70, depth // length_of(of_right), seed=1)
        agree(multiplied(left, right), left.values @ right.values.t(), bound(left.values, right, torch.float32))


SCALED_SUMS = [("fours", "fours"), ("mx fours", "mx fours"), ("rows e4m3", "rows e5m2"), ("rows e4m3", "squares e4m3"), ("rows e5m2", "mx fours")]
"""Pairs whose sums of blocks are scaled where the CPU has dot products of bf16, or of bytes."""


@pytest.mark.parametrize("name, of_right", SCALED_SUMS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    rows=st.sampled_from([1, 5, 24, 25, 31, 70, 130, 390, 530]),
    lines=st.sampled_from([1, 15, 16, 17, 31, 33, 48, 64, 100, 300]),
    depth=st.sampled_from([32, 96, 128, 160, 544, 1024, 4096, 4128, 4224, 8320]),
)
def test_sums_of_blocks_are_scaled(level: str, name: str, of_right: str, rows: int, lines: int, depth: int) -> None:
    left, right = random_blocks(name, rows, depth // length_of(name)), random_blocks(of_right, lines, depth // length_of(of_right), seed=1)
    found = [multiplied(left, right, num_threads=threads) for threads in (1, 2, 5)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    agree(found[0], left.values @ right.values.t(), bound(left.values, right, torch.float32))


@pytest.mark.parametrize("name, of_right", SCALED_SUMS)
@pytest.mark.parametrize("rows", [5, 40])
def test_special_scales_of_both_operands(level: str, name: str, of_right: str, rows: int) -> None:
    """What is no number, zeros, and of powers of two the ends of their range, beside codes that are zeros and others."""
    left, right = random_blocks(name, rows, 640 // length_of(name)), random_blocks(of_right, 70, 640 // length_of(of_right), seed=1)
    for place, blocks in enumerate((left, right)):
        if blocks.scales.dtype == torch.float32:
            blocks.scales[0, place], blocks.scales.view(-1)[-1], blocks.codes[1 + place, 5] = -0.75, 0.0, 0x7F  # no number in either format
            continue
        blocks.scales[1 + place, 1], blocks.scales[4, 2 + place] = blocks.nan, 1
        if blocks.powers:
            blocks.scales[3, 0], blocks.codes[3, :16], blocks.scales[0, 3] = 254, 0x80, 0
    want, got = left.values @ right.values.t(), multiplied(left, right)
    assert bool(want.isnan().any()) and torch.equal(want.isnan(), got.isnan())
    allowed = bound(left.values.nan_to_num(0.0), right.values.nan_to_num(0.0), torch.float32)
    numbers = ~want.isnan()
    assert bool((got.double() - want).abs()[numbers].le(allowed[numbers]).all())


@pytest.mark.parametrize("rows", [5, 40])
@pytest.mark.parametrize("ends", [(0, 0), (0, 254), (254, 0), (254, 254), (1, 240)])
def test_scales_of_zeros_may_be_any(level: str, rows: int, ends: tuple[int, int]) -> None:
    """Also where the product of both operands' scales is none that a float holds."""
    left, right = random_blocks("mx fours", rows, 20), random_blocks("mx fours", 70, 20, seed=1)
    for blocks, end in zip((left, right), ends, strict=True):
        blocks.scales[3, 0], blocks.codes[3, :16], blocks.scales[1, 7], blocks.codes[1, 112:128] = end, 0x80, end, 0
    agree(multiplied(left, right), left.values @ right.values.t(), bound(left.values, right, torch.float32))


@pytest.mark.parametrize("rows", [25, 64, 200, 530])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_many_rows_have_the_bits_of_a_product_of_decoded_values(level: str, rows: int, kind: torch.dtype) -> None:
    for name, blocks, transposed in product(ALONG_ROWS, (3, 70, 130), (True, False)):
        left = with_powers(random_blocks(name, rows, blocks))
        right, values = other(70, left.values.shape[1], kind), left.values.to(kind)
        assert torch.equal(values.double(), left.values)
        wanted = torch.empty(rows, 70)
        given = right if transposed else right.t().contiguous()
        native.gemm(values, False, kind, 1.0, given, transposed, kind, 1.0, wanted, torch.float32)
        assert torch.equal(multiplied(left, right, transposed), wanted), (name, blocks, transposed)


@pytest.mark.parametrize("name", MX)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, E4M3])
def test_blocks_along_columns(level: str, name: str, kind: torch.dtype) -> None:
    """A left operand that is transposed, as in a weight's gradient: the bits of a product of decoded values; and with a right one in blocks."""
    wide = torch.float32 if kind == torch.float32 else torch.bfloat16
    for rows, lines, blocks in product((1, 30, 210, 400), (1, 33), (3, 130)):
        left = random_blocks(name, rows, blocks)
        left.scales[0, 0] = 0
        left.codes[0, :32] = 0x80
        right = other(lines, left.values.shape[1], kind)
        codes, scales, values = (x.t().contiguous() for x in (left.codes, left.scales, left.values.to(wide)))
        got, decoded, both = (torch.empty(rows, lines) for _ in range(3))
        operand = right.t().contiguous(), False, kind, 1.0
        native.gemm(codes, True, left.dtype, 1.0, *operand, got, torch.float32, left_scales=scales)
        native.gemm(values, True, wide, 1.0, *operand, decoded, torch.float32)
        assert torch.equal(got, decoded), (rows, lines, blocks)
        coded = random_blocks(name, lines, blocks, seed=1)
        of_right = coded.codes.t().contiguous(), False, coded.dtype, 1.0
        of_both = {"left_scales": scales, "right_scales": coded.scales.t().contiguous()}
        native.gemm(codes, True, left.dtype, 1.0, *of_right, both, torch.float32, **of_both)
        agree(both, left.values @ coded.values.t(), bound(left.values, coded, torch.float32))


@pytest.mark.parametrize("name", ["mx e4m3", "mx e5m2", "rows e4m3", "mx fours"])
@pytest.mark.parametrize("scale", [0, 1, 9, 10, 40, 76, 178, 200, 246])
@pytest.mark.parametrize("rows", [4, 40])
def test_scales_at_the_ends_of_their_range_are_exact(level: str, name: str, scale: int, rows: int) -> None:
    left = random_blocks(name, rows, 9)
    power = torch.tensor([scale], dtype=torch.uint8).view(torch.float8_e8m0fnu).float()
    exponents = left.scales.dtype == torch.uint8
    if exponents:
        left.scales[:, 1] = scale
    else:
        left.scales[0] = power
    right = other(30, left.values.shape[1]) * (min(1.0, 2.0 ** (110 - scale)) if scale > 127 else 1.0)
    agree(multiplied(left, right), left.values @ right.double().t(), bound(left.values, right, torch.float32))


@pytest.mark.parametrize("rows", [5, 40])
def test_special_values_are_those_of_decoded_operands(level: str, rows: int) -> None:
    for name in ALONG_ROWS:
        left = random_blocks(name, rows, 10)
        if left.dtype != E2M1:
            left.codes[3, 5], left.codes[4, -1] = 0x7F, 0xFF  # NaN in both formats
        if left.scales.dtype == torch.uint8:
            left.scales[1, 1] = left.nan
        else:
            left.scales[1, 1], left.scales[0, 2], left.scales[2, 0] = torch.nan, torch.inf, 0.0
        right = other(70, left.values.shape[1])
        right[0, ::3] = 0.0
        want, got = left.values @ right.double().t(), multiplied(left, right)
        assert torch.equal(want.isnan(), got.isnan()) and torch.equal(want.isfinite(), got.isfinite()), name
        finite = want.isfinite()
        assert bool((got.double() - want).abs()[finite].le(bound(left.values, right, torch.float32)[finite]).all()), name


def test_the_epilogue_and_threads(level: str) -> None:
    for name, rows in product(ALONG_ROWS, (9, 29, 300)):
        left, bias = random_blocks(name, rows, 6), torch.randn(70)
        right, addend = other(70, left.values.shape[1]), torch.randn(rows, 70)
        want = 0.5 * (left.values @ right.double().t()) + 0.25 * addend.double() + bias.double()
        allowed = bound(left.values, right, torch.float32) + 4 * EPS * (addend.abs().double() + bias.abs().double() + want.abs())
        found = [multiplied(left, right, alpha=0.5, beta=0.25, addend=addend, bias=bias, num_threads=threads) for threads in (1, 3)]
        assert torch.equal(*found)
        agree(found[0], want, allowed)


def test_wrong_arguments_are_named_before_anything_is_written() -> None:
    left, right, out = random_blocks("mx e4m3", 4, 2), torch.zeros(6, 64), torch.full((4, 6), 7.0)

    def refused(error: type[Exception], match: str, **changed: Any) -> None:
        given = {"left": left.codes, "left_transposed": False, "left_dtype": left.dtype, "left_scale": 1.0, "left_scales": left.scales}
        given |= {"right": right, "right_transposed": True, "right_dtype": right.dtype, "right_scale": 1.0, "dst": out, "dtype": out.dtype}
        with pytest.raises(error, match=match):
            native.gemm(**{**given, **changed})
        assert bool((out == 7.0).all())

    turned = {"left": left.codes.t().contiguous(), "left_transposed": True}
    only = "gemm with left_scales that are no E8M0 bytes: expected a left operand that is not transposed, got another"
    refused(ArgumentError, only, **turned, left_scales=torch.zeros(1, 64))
    refused(ArgumentError, only, **turned, left_dtype=E2M1)
    refused(ShapeError, "left: expected rows in multiples of 32, got 4", left_transposed=True, right=torch.zeros(6, 4))
    refused(ShapeError, "left_scales: expected a matrix of at least 4 x 2", left_scales=left.scales[:, :1].contiguous())
    refused(ShapeError, "left: expected columns in multiples of 32, got 40", left=left.codes[:, :40].contiguous(), right=torch.zeros(6, 40))
    refused(DTypeError, "left_scales: expected uint8 or float8_e8m0fnu, got int32", left_scales=left.scales.int())
    refused(ArgumentError, "dst", dst=left.scales)
