"""Casts of slices of sharded weights, and NVFP4's scales: bit for bit, element by element, as numpy and ml_dtypes have them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from tex_backends import Runner, on_backends
from torch import Tensor

from fusible.conformance.cases.sharded_cast import holder
from fusible.conformance.table import FLOATS
from fusible.errors import ArgumentError, DTypeError, ShapeError
from fusible.tex import DType
from fusible.tex.protocol import FLT_MAX, FP8_MAX

pytestmark = on_backends("fp8_block_scaling_compute_partial_amax", "mxfp8_scaling_partial_cast", "nvfp4_2d_partial_cast", "nvfp4_fused_scale")

SLICES = [
    (5, 300, 0, 1500),
    (5, 300, 7, 1000),
    (300, 40, 123, 5),
    (130, 70, 139, 8000),
    (64, 48, 144, 960),
    (33, 2, 0, 66),
    (40, 34, 33, 2),
    (40, 34, 1359, 1),
    (40, 34, 12, 0),
    (1, 260, 3, 250),
]
"""``(h, w, start, length)``: whole weights, parts of one row, and slices that begin and end within rows and tiles."""

NUMPY = {DType.kFloat8E4M3: ml_dtypes.float8_e4m3fn, DType.kFloat8E5M2: ml_dtypes.float8_e5m2}


def weight(h: int, w: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of many magnitudes, some tiles all zero."""
    generator = torch.Generator().manual_seed(h * 1000 + w)
    spread = torch.exp2(torch.randint(-9, 9, (h, w), generator=generator))
    return (torch.randn(h, w, generator=generator) * spread * (torch.arange(h)[:, None] // 16 % 5 != 3)).to(dtype)


def amaxes(x: Tensor, h: int, w: int, start: int, block: tuple[int, int]) -> np.ndarray:
    """Tile by tile, of a slice that stands in zeros."""
    full = np.zeros(h * w, np.float32)
    full[start : start + x.numel()] = np.abs(x.float().numpy().reshape(-1))
    full = full.reshape(h, w)
    rows, columns = range(0, h, block[0]), range(0, w, block[1])
    return np.array([[full[i : i + block[0], j : j + block[1]].max() for j in columns] for i in rows], np.float32)


def per_element(tiles: np.ndarray, h: int, w: int, start: int, length: int, block: tuple[int, int]) -> np.ndarray:
    place = np.arange(start, start + length)
    return tiles[place // w // block[0], place % w // block[1]]


def as_bytes(x: Tensor, factors: np.ndarray, fp8: DType) -> np.ndarray:
    with np.errstate(all="ignore"):
        product = x.float().numpy().reshape(-1) * factors
    return np.clip(product, -FP8_MAX[fp8], FP8_MAX[fp8]).astype(NUMPY[fp8]).view(np.uint8)


@pytest.mark.parametrize(("h", "w", "start", "length"), SLICES)
@pytest.mark.parametrize("function", ["fp8_block_scaling_compute_partial_amax", "nvfp4_2d_compute_partial_amax"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_square_amaxes(runner: Runner, function: str, h: int, w: int, start: int, length: int, dtype: torch.dtype) -> None:
    part = weight(h, w, dtype).view(-1)[start : start + length]
    for block in (16, 128, 5):
        tiles = -(-h // block), -(-w // block)
        amax = torch.full((tiles[0] + 1, tiles[1] + 3), 7.0)
        assert runner(function, tensor=part, amax=amax, h=h, w=w, start_offset=start, block_len=block) is None
        assert np.array_equal(amax[: tiles[0], : tiles[1]].numpy(), amaxes(part, h, w, start, (block, block)))
        assert (amax[tiles[0] :] == 7).all() and (amax[:, tiles[1] :] == 7).all()


@pytest.mark.parametrize(("h", "w", "start", "length"), SLICES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_mxfp8_amaxes(runner: Runner, h: int, w: int, start: int, length: int, dtype: torch.dtype) -> None:
    part = weight(h, w, dtype).view(-1)[start : start + length]
    row, column = torch.full((-(-h // 128) * 128, -(-w // 128) * 4), 7.0, dtype=dtype), torch.full((-(-h // 128) * 4, -(-w // 128) * 128), 7.0)
    runner("mxfp8_scaling_compute_partial_amax", input=part, amax_rowwise=row, amax_colwise=column, rows=h, cols=w, start_offset=start)
    for amax, block in ((row, (1, 32)), (column, (32, 1))):
        expected = amaxes(part, h, w, start, block)
        inside = amax[: expected.shape[0], : expected.shape[1]]
        assert np.array_equal(inside.float().numpy(), expected)
        assert (amax == 7).sum() >= amax.numel() - inside.numel()


@pytest.mark.parametrize("function", ["fp8_block_scaling_compute_partial_amax", "nvfp4_2d_compute_partial_amax"])
def test_what_is_not_finite_is_seen_in_its_tile_alone(runner: Runner, function: str) -> None:
    x = weight(40, 40)
    x[3, 3], x[20, 39] = math.nan, -math.inf
    amax = torch.zeros(3, 3)
    runner(function, tensor=x[:, :].reshape(-1)[1:], amax=amax, h=40, w=40, start_offset=1, block_len=16)
    assert amax.isnan().tolist() == [[True, False, False], [False] * 3, [False] * 3] and amax.isinf().sum() == 1 and amax[1, 2] == math.inf


@pytest.mark.parametrize("fp8", [DType.kFloat8E4M3, DType.kFloat8E5M2])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("h", "w", "start", "length"), SLICES)
def test_block_fp8_cast(runner: Runner, fp8: DType, dtype: torch.dtype, h: int, w: int, start: int, length: int) -> None:
    part = weight(h, w, dtype).view(-1)[start : start + length]
    for block in (128, 16):
        scale = torch.exp(torch.randn(-(-h // block) + 1, -(-w // block) + 4, generator=torch.Generator().manual_seed(2)) * 3)
        out = torch.full((length,), 99, dtype=torch.uint8)
        arguments = {"h": h, "w": w, "start_offset": start, "block_len": block, "out_dtype": fp8}
        assert runner("fp8_block_scaling_partial_cast", inp=part, out=out, scale=scale, **arguments) is None
        assert np.array_equal(out.numpy(), as_bytes(part, per_element(scale.numpy(), h, w, start, length, (block, block)), fp8))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("h", "w", "start", "length"), SLICES)
def test_mxfp8_cast(runner: Runner, dtype: torch.dtype, h: int, w: int, start: int, length: int) -> None:
    part = weight(h, w, dtype).view(-1)[start : start + length]
    row, column = (torch.randint(110, 140, shape, dtype=torch.uint8) for shape in ((h, -(-w // 32) + 1), (-(-h // 32), w)))
    outs = [torch.full((length,), 99, dtype=torch.uint8) for _ in range(2)]
    scales = {"scale_inv_rowwise": row, "scale_inv_colwise": column}
    runner("mxfp8_scaling_partial_cast", input=part, output_rowwise=outs[0], output_colwise=outs[1], **scales, rows=h, cols=w, start_offset=start)
    for out, scale, block in ((outs[0], row, (1, 32)), (outs[1], column, (32, 1))):
        factors = np.exp2(127.0 - per_element(scale.numpy(), h, w, start, length, block)).astype(np.float32)
        assert np.array_equal(out.numpy(), as_bytes(part, factors, DType.kFloat8E4M3))


@pytest.mark.parametrize("code", [0, 254, 255])
def test_mxfp8_cast_by_the_extreme_scales(runner: Runner, code: int) -> None:
    x = torch.tensor([0.0, 1.0, -3e38, 2.0**-127, math.inf, math.nan]).repeat(6)[:32].view(1, 32)
    outs = [torch.zeros(1, 32, dtype=torch.uint8) for _ in range(2)]
    row, column = (torch.full(shape, code, dtype=torch.uint8) for shape in ((1, 1), (1, 32)))
    scales = {"scale_inv_rowwise": row, "scale_inv_colwise": column}
    runner("mxfp8_scaling_partial_cast", input=x, output_rowwise=outs[0], output_colwise=outs[1], **scales, rows=1, cols=32, start_offset=0)
    expected = as_bytes(x, np.float32(math.nan if code == 255 else 2.0 ** (127 - code)), DType.kFloat8E4M3)
    for out in outs:
        got, value = (data.reshape(-1).view(ml_dtypes.float8_e4m3fn).astype(np.float32) for data in (out.numpy(), expected))
        assert np.array_equal(got, value, equal_nan=True)


def global_scale(amax: np.float32) -> np.float32:
    with np.errstate(all="ignore"):
        scale = np.minimum(np.float32(448 * 6) / amax, np.float32(FLT_MAX))
    return np.float32(1) if amax == 0 or scale == 0 else scale


def block_scale(block_amax: np.ndarray, amax: np.float32) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.minimum(block_amax * (global_scale(amax) * (np.float32(1) / np.float32(6))), np.float32(FLT_MAX))


def e4m3(scale: np.ndarray) -> np.ndarray:
    return np.minimum(scale, np.float32(448)).astype(ml_dtypes.float8_e4m3fn)


def nvfp4_codes(x: Tensor, scale: np.ndarray, of_all: np.float32) -> np.ndarray:
    """``scale`` is that of each element's tile."""
    with np.errstate(all="ignore"):
        factor = np.minimum(np.float32(1) / (e4m3(scale).astype(np.float32) * (np.float32(1) / of_all)), np.float32(FLT_MAX))
        product = x.float().numpy().reshape(-1) * factor
    return np.clip(product, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15


AMAXES = torch.tensor([0.0, 1e-45, 1e-38, 1e-30, 0.1, 1.0, 6.0, 448.0, 2688.0, 1e30, FLT_MAX, math.inf, math.nan])


def test_global_scales(runner: Runner) -> None:
    scale = torch.zeros_like(AMAXES)
    assert runner("nvfp4_compute_global_scale", global_amax=AMAXES, global_scale=scale) is None
    assert np.array_equal(scale.numpy(), np.array([global_scale(amax) for amax in AMAXES.numpy()]), equal_nan=True)
    assert scale[0] == 1 and scale[2] == FLT_MAX and scale[-2] == 1


def test_block_scales(runner: Runner) -> None:
    blocks = torch.cat([AMAXES, torch.rand(51, generator=torch.Generator().manual_seed(1)) * 30]).view(8, 8)
    for amax in AMAXES:
        scale = torch.zeros(8, 8)
        assert runner("nvfp4_compute_per_block_scale", block_amax=blocks, scale=scale, global_amax=amax[None]) is None
        assert np.array_equal(scale.numpy(), block_scale(blocks.numpy(), amax.numpy()), equal_nan=True)


@pytest.mark.parametrize(("rows", "columns", "padded"), [(3, 5, (128, 8)), (1, 1, (16, 1)), (2, 4, (29, 4)), (0, 3, (0, 4))])
def test_scales_of_tiles_become_a_byte_for_each_row(runner: Runner, rows: int, columns: int, padded: tuple[int, int]) -> None:
    scale = torch.exp(torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)) * 4)
    out = torch.full(padded, 99, dtype=torch.uint8)
    sizes = {"tile_rows": rows, "tile_cols": columns, "rows_padded": padded[0], "block_len": 16}
    assert runner("nvfp4_expand_scale_to_fp8", input=scale, output=out, **sizes) is None
    expected = np.zeros(padded, np.uint8)
    for i in range(min(16 * rows, padded[0])):
        expected[i, :columns] = e4m3(scale.numpy()[i // 16]).view(np.uint8)
    assert np.array_equal(out.numpy(), expected)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("h", "w", "start", "length"), SLICES)
def test_nvfp4_cast(runner: Runner, dtype: torch.dtype, h: int, w: int, start: int, length: int) -> None:
    part = weight(h, w, dtype).view(-1)[start : start + length]
    amax = np.float32(900.0)
    scale = block_scale(np.random.default_rng(1).random((-(-h // 16), -(-w // 16)), np.float32) ** 4 * amax, amax)
    codes = nvfp4_codes(part, per_element(scale, h, w, start, length, (16, 16)), global_scale(amax))
    all_codes = np.resize(np.array([9, 6], np.uint8), h * w)  # what lies beside the slice stays
    all_codes[start : start + length] = codes
    expected = (all_codes[0::2] | all_codes[1::2] << 4)[start // 2 : -(-(start + length) // 2)]
    out = torch.full(expected.shape, 0x69, dtype=torch.uint8)
    arguments = {"inp": part, "scale": torch.from_numpy(scale), "global_scale": torch.tensor([global_scale(amax)]), "h": h, "w": w}
    for target in (out.clone(), holder(out)):
        assert runner("nvfp4_2d_partial_cast", out=target, start_offset=start, **arguments) is None
        assert np.array_equal((target if isinstance(target, Tensor) else out).numpy(), expected)


@pytest.mark.parametrize("zero", [False, True])
def test_a_zero_block_and_an_underflown_scale_give_zeros_or_saturate(runner: Runner, zero: bool) -> None:
    x = torch.zeros(16, 16) if zero else torch.full((16, 16), 1e-30)
    out = torch.full((16, 8), 0x99, dtype=torch.uint8)
    runner("nvfp4_2d_partial_cast", inp=x, out=out, scale=torch.zeros(1, 1), global_scale=torch.ones(1), h=16, w=16, start_offset=0)
    assert (out == (0 if zero else 0x77)).all()


def ranks(numel: int) -> Iterator[tuple[int, int]]:
    """Unequal shares, of which one is empty and most begin within a row and within a byte."""
    edges = [0, numel // 7 | 1, numel // 3, numel // 3, numel - 5, numel]
    yield from itertools.pairwise(edges)


@pytest.mark.parametrize(("h", "w"), [(40, 50), (33, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_together_quantize_the_weight_as_one(runner: Runner, h: int, w: int, dtype: torch.dtype) -> None:
    """The whole of what a distributed optimizer does: amaxes, their reduction, scales, casts, by the functions on lists."""
    x = weight(h, w, dtype)
    tiles, padded = (-(-h // 16), -(-w // 16)), (128, -(-w // 64) * 4)
    shares = [(x.view(-1)[a:b], a) for a, b in ranks(x.numel()) if b > a]
    partial, of_all = torch.zeros(len(shares), *tiles), torch.zeros(len(shares), 1)
    count, starts, parts = len(shares), [a for _, a in shares], [part for part, _ in shares]
    sizes: dict[str, Any] = {"h_list": [h] * count, "w_list": [w] * count, "start_offset_list": starts}
    found = {"partial_amax_list": list(partial), "global_amax_list": list(of_all)}
    runner("nvfp4_multi_tensor_compute_partial_amax", master_weight_list=parts, **found, **sizes)
    block_amax, amax = partial.amax(0), of_all.amax(0)
    assert np.array_equal(block_amax.numpy(), amaxes(x, h, w, 0, (16, 16))) and amax == x.abs().max()

    scale, target, target_amax, inverse = torch.zeros(tiles), torch.zeros(padded, dtype=torch.uint8), torch.zeros(1), torch.zeros(1)
    lists = {"block_amax": block_amax, "global_amax": amax, "per_block_scale": scale, "target_scale": target, "target_amax": target_amax}
    numbers = {"tile_rows": tiles[0], "tile_cols": tiles[1], "rows_padded": padded[0]}
    runner("nvfp4_multi_tensor_fused_scale", **{f"{name}_list": [value] for name, value in {**lists, **numbers}.items()}, block_len=16)
    runner("nvfp4_compute_global_scale", global_amax=amax, global_scale=inverse)
    assert np.array_equal(scale.numpy(), block_scale(block_amax.numpy(), amax.numpy()[0])) and target_amax == amax
    again, target_again = torch.zeros_like(scale), torch.zeros_like(target)
    runner("nvfp4_fused_scale", **{**lists, "per_block_scale": again, "target_scale": target_again}, **numbers, block_len=16)
    assert torch.equal(again, scale) and torch.equal(target_again, target) and target[0, : tiles[1]].any()

    packed = torch.zeros(h * w // 2, dtype=torch.uint8)
    fragments = [packed[a // 2 : -(-(a + part.numel()) // 2)] for part, a in shares]
    casts = {"out_list": fragments, "scale_list": [scale] * count, "global_scale_list": [inverse] * count}
    runner("nvfp4_multi_tensor_2d_partial_cast", inp_list=parts, **casts, **sizes)
    codes = nvfp4_codes(x, per_element(scale.numpy(), h, w, 0, h * w, (16, 16)), inverse.numpy()[0])
    assert np.array_equal(packed.numpy(), codes[0::2] | codes[1::2] << 4)


X, OUT, TILES = torch.zeros(8), torch.zeros(8, dtype=torch.uint8), torch.zeros(1, 1)
BLOCK = {"inp": X, "out": OUT, "scale": TILES, "h": 4, "w": 4, "start_offset": 8, "block_len": 128, "out_dtype": DType.kFloat8E4M3}
NVFP4 = {"inp": X, "out": OUT[:4], "scale": TILES, "global_scale": torch.ones(1), "h": 4, "w": 4, "start_offset": 8}
FUSED = {"block_amax": TILES, "global_amax": X[:1], "per_block_scale": TILES, "target_scale": OUT[:, None], "target_amax": X[:1]}
FUSED_SIZES = {"tile_rows": 1, "tile_cols": 1, "rows_padded": 8, "block_len": 16}
REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("fp8_block_scaling_partial_cast", {**BLOCK, "start_offset": 9}, ShapeError, "the slice .*: expected elements within 0 to 16"),
    ("fp8_block_scaling_partial_cast", {**BLOCK, "start_offset": -1}, ArgumentError, "start_offset .*: expected .*at least 0"),
    ("fp8_block_scaling_partial_cast", {**BLOCK, "block_len": 0}, ArgumentError, "block_len .*: expected .*at least 1"),
    ("fp8_block_scaling_partial_cast", {**BLOCK, "block_len": 2}, ShapeError, r"scale .*: expected at least \[2, 2\]"),
    ("fp8_block_scaling_partial_cast", {**BLOCK, "out": OUT[:7]}, ShapeError, "out .*: expected 8 bytes"),
    ("fp8_block_scaling_partial_cast", {**BLOCK, "out": X}, DTypeError, "out .*: expected .*uint8"),
    ("fp8_block_scaling_partial_cast", {**BLOCK, "inp": OUT}, DTypeError, "inp of.*: expected"),
    ("fp8_block_scaling_partial_cast", {**BLOCK, "scale": TILES.half()}, DTypeError, "scale .*: expected .*float32"),
    ("fp8_block_scaling_partial_cast", {**BLOCK, "out_dtype": DType.kBFloat16}, DTypeError, "out_dtype .*: expected .*kFloat8E5M2"),
    ("nvfp4_2d_partial_cast", {**NVFP4, "h": 6, "w": 3}, ShapeError, "an even width"),
    ("nvfp4_2d_partial_cast", {**NVFP4, "out": OUT}, ShapeError, "out .*: expected 4 bytes"),
    ("nvfp4_2d_partial_cast", {**NVFP4, "global_scale": X}, DTypeError, r"global_scale .*: expected fp32 \[1\]"),
    ("nvfp4_fused_scale", {**FUSED, **FUSED_SIZES, "tile_rows": 2}, ShapeError, r"tile_rows and tile_cols, .*: expected \[2, 1\]"),
    ("nvfp4_fused_scale", {**FUSED, **FUSED_SIZES, "rows_padded": 9}, ShapeError, r"\[9, 1 or more\]"),
    ("nvfp4_fused_scale", {**FUSED, **FUSED_SIZES, "target_amax": OUT[:1]}, DTypeError, "target_amax .*: expected .*float32"),
    ("nvfp4_compute_per_block_scale", {"block_amax": TILES, "scale": X, "global_amax": X[:1]}, ShapeError, r"scale: expected shape \[1, 1\]"),
    (
        "nvfp4_compute_per_block_scale",
        {"block_amax": TILES.half(), "scale": TILES, "global_amax": X[:1]},
        DTypeError,
        "block_amax .*: expected .*float32",
    ),
    ("nvfp4_fused_scale", {**FUSED, **FUSED_SIZES, "per_block_scale": TILES.half()}, DTypeError, "per_block_scale .*: expected .*float32"),
    ("nvfp4_compute_global_scale", {"global_amax": X, "global_scale": TILES}, ShapeError, r"global_scale: expected shape \[8\]"),
    (
        "mxfp8_scaling_compute_partial_amax",
        {"input": X, "amax_rowwise": TILES, "amax_colwise": TILES.clone(), "rows": 2, "cols": 4, "start_offset": 0},
        ShapeError,
        r"amax_rowwise .*: expected at least \[2, 1\]",
    ),
]


@pytest.mark.parametrize(("function", "arguments", "error", "message"), REFUSED)
def test_what_does_not_fit_is_refused_and_nothing_written(
    runner: Runner, function: str, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        runner(function, **arguments)
    assert not X.any() and not OUT.any() and not TILES.any()


def test_a_list_is_checked_before_its_first_tensor_is_written(runner: Runner) -> None:
    amax, of_all = torch.full((1, 1), 7.0), torch.full((1,), 7.0)
    amaxes = {"partial_amax_list": [amax, amax.clone()], "global_amax_list": [of_all, of_all.clone()]}
    lists = {"master_weight_list": [X + 1, X], **amaxes, "h_list": [4, 4], "w_list": [4, 4]}
    with pytest.raises(ShapeError, match="elements within 0 to 16"):
        runner("nvfp4_multi_tensor_compute_partial_amax", **lists, start_offset_list=[0, 9])
    with pytest.raises(ArgumentError, match="lists of equal length"):
        runner("nvfp4_multi_tensor_compute_partial_amax", **lists, start_offset_list=[0])
    assert amax == 7 and of_all == 7
