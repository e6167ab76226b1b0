"""Records of the casts of slices of sharded weights, and of NVFP4's scales: bit for bit, as numpy and ml_dtypes have them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusible.conformance import block_oracle as oracle
from fusible.conformance.eight_bits import FORMATS, cast
from fusible.conformance.table import Output, Sample, record
from fusible.quantized import NVFP4TensorStorage
from fusible.tex import DType
from fusible.tex.protocol import FLT_MAX

__all__ = []

_SLICES = ((5, 300, 7, 1000), (300, 40, 123, 5), (130, 70, 139, 6000), (33, 2, 0, 66), (40, 34, 33, 2), (40, 34, 1359, 1), (40, 34, 12, 0))
"""``(h, w, start, length)``: a whole weight, parts of one row, none, and slices that begin and end within rows and tiles."""


@dataclass(frozen=True)
class Slice:
    """Elements ``start : start + length`` of a weight ``[h, w]``, some tiles of which are zeros."""

    h: int
    w: int
    start: int
    length: int
    part: Tensor

    @property
    def label(self) -> str:
        return f"{self.length} from {self.start} of {[self.h, self.w]}"

    @property
    def place(self) -> dict[str, int]:
        return {"h": self.h, "w": self.w, "start_offset": self.start}

    def tiles(self, block: int) -> tuple[int, int]:
        return -(-self.h // block), -(-self.w // block)

    def amaxes(self, down: int, across: int) -> Tensor:
        """The amax of each block of ``down`` rows and ``across`` columns, where elements outside the slice count as zeros."""
        whole = np.zeros(self.h * self.w, np.float32)
        whole[self.start : self.start + self.length] = np.abs(self.part.float().numpy())
        whole = whole.reshape(self.h, self.w)
        rows, columns = range(0, self.h, down), range(0, self.w, across)
        return torch.tensor([[whole[i : i + down, j : j + across].max().item() for j in columns] for i in rows]).view(len(rows), len(columns))

    def each(self, blocks: np.ndarray, down: int, across: int) -> np.ndarray:
        """The value of ``blocks`` for each element's block of ``down`` rows and ``across`` columns."""
        at = np.arange(self.start, self.start + self.length)
        return blocks[at // self.w // down, at % self.w // across]


def slices(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Slice]:
    for h, w, start, length in _SLICES:
        spread = torch.exp2(torch.randint(-9, 9, (h, w), generator=generator))
        weight = torch.randn(h, w, generator=generator) * spread * (torch.arange(h)[:, None] // 16 % 5 != 3)
        yield Slice(h, w, start, length, weight.to(dtype).view(-1)[start : start + length])


def inside(amax: Tensor, margin: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """A larger buffer of sevens, and the same with ``amax`` in its corner."""
    buffer = torch.full((amax.shape[0] + margin[0], amax.shape[1] + margin[1]), 7.0, dtype=amax.dtype)
    wanted = buffer.clone()
    wanted[: amax.shape[0], : amax.shape[1]] = amax
    return buffer, wanted


@record("fp8_block_scaling_compute_partial_amax")
@record("nvfp4_2d_compute_partial_amax")
def square_amaxes(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for x, block in itertools.product(slices(generator, dtype), (16, 128, 5)):
        buffer, wanted = inside(x.amaxes(block, block), (1, 3))
        yield Sample(f"{x.label} by {block}", {"tensor": x.part, "amax": buffer, **x.place, "block_len": block}, (Output("amax", wanted),))
    tensor = torch.ones(40, 40, dtype=dtype)
    tensor[3, 3], tensor[20, 39] = math.nan, -math.inf
    wanted = torch.tensor([[math.nan, 1, 1], [1, 1, math.inf], [1, 1, 1]], dtype=torch.float64)
    arguments = {"tensor": tensor.view(-1)[1:], "amax": torch.zeros(3, 3), "h": 40, "w": 40, "start_offset": 1, "block_len": 16}
    yield Sample("not finite", arguments, (Output("amax", wanted),))


@record("mxfp8_scaling_compute_partial_amax")
def mxfp8_amaxes(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for x in slices(generator, dtype):
        row, wanted_row = inside(x.amaxes(1, 32).to(dtype), (-x.h % 128, 3))
        column, wanted_column = inside(x.amaxes(32, 1), (2, -x.w % 128))
        arguments = {"input": x.part, "amax_rowwise": row, "amax_colwise": column, "rows": x.h, "cols": x.w, "start_offset": x.start}
        yield Sample(x.label, arguments, (Output("amax_rowwise", wanted_row), Output("amax_colwise", wanted_column)))


@record("fp8_block_scaling_partial_cast")
def block_fp8_cast(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for x in slices(generator, dtype):
        for fp8, block in ((fp8, block) for fp8 in FORMATS for block in (128, 16)):
            down, across = x.tiles(block)
            scale = torch.exp(torch.randn(down + 1, across + 4, generator=generator) * 3)
            wanted = cast(x.part, x.each(scale.numpy(), block, block), fp8)
            arguments = {"inp": x.part, "out": torch.full((x.length,), 99, dtype=torch.uint8), "scale": scale, **x.place}
            yield Sample(f"{x.label} by {block} to {fp8.name}", {**arguments, "block_len": block, "out_dtype": fp8}, (Output("out", wanted),))


@record("mxfp8_scaling_partial_cast")
def mxfp8_cast(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(label: str, x: Slice, row: Tensor, column: Tensor) -> Sample:
        wanted = []
        for scale, block in ((row, (1, 32)), (column, (32, 1))):
            factors = np.exp2(127.0 - x.each(scale.numpy(), *block)).astype(np.float32)
            wanted.append(cast(x.part, factors, DType.kFloat8E4M3))
        outs = {f"output_{way}": torch.full((x.length,), 99, dtype=torch.uint8) for way in ("rowwise", "colwise")}
        scales = {"scale_inv_rowwise": row, "scale_inv_colwise": column}
        arguments = {"input": x.part, **outs, **scales, "rows": x.h, "cols": x.w, "start_offset": x.start}
        return Sample(label, arguments, tuple(Output(name, bytes_) for name, bytes_ in zip(outs, wanted, strict=True)))

    for x in slices(generator, dtype):
        shapes = ((x.h, -(-x.w // 32) + 1), (-(-x.h // 32), x.w))
        yield sample(x.label, x, *(torch.randint(110, 140, shape, dtype=torch.uint8, generator=generator) for shape in shapes))
    part = torch.tensor([0.0, 1.0, -6e4, 1e-3, math.inf, -math.inf, -0.0, 3.0]).repeat(4).to(dtype)
    for code in (0, 253):
        row, column = (torch.full(shape, code, dtype=torch.uint8) for shape in ((1, 1), (1, 32)))
        yield sample(f"by the scale {code}", Slice(1, 32, 0, 32, part), row, column)


_AMAXES = torch.tensor([0.0, 1.5e-38, 1e-30, 0.1, 1.0, 6.0, 448.0, 2688.0, 1e30, FLT_MAX, math.inf, math.nan])


@record("nvfp4_compute_global_scale", dtypes=(torch.float32,))
def global_scales(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for shape in ((12,), (3, 4), (12, 1), (12, 350)):
        amax = _AMAXES.repeat(math.prod(shape) // 12).view(shape)
        wanted = torch.from_numpy(oracle.tensor_scale(amax.numpy()))
        yield Sample(str(list(shape)), {"global_amax": amax, "global_scale": torch.zeros(shape)}, (Output("global_scale", wanted),))


@record("nvfp4_compute_per_block_scale", dtypes=(torch.float32,))
def block_scales(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for amax in _AMAXES:
        blocks = torch.cat([_AMAXES, torch.rand(52, generator=generator) * 30]).view(8, 8)
        wanted = torch.from_numpy(oracle.nvfp4_scale(blocks.numpy(), oracle.tensor_scale(amax.numpy())))
        arguments = {"block_amax": blocks, "scale": torch.zeros(8, 8), "global_amax": amax.clone()[None]}
        yield Sample(f"within {amax.item():.3g}", arguments, (Output("scale", wanted),))


_TILES = ((3, 5, 128, 8, 16), (1, 1, 16, 1, 16), (2, 4, 29, 4, 16), (0, 3, 0, 4, 16), (2, 3, 8, 4, 4))
"""Tiles down and across, rows and columns of the expanded scales, rows of a tile."""


def expanded(scale: np.ndarray, padded: tuple[int, int], block: int) -> Tensor:
    out, rows = np.zeros(padded, np.uint8), oracle.e4m3(scale).view(np.uint8).repeat(block, 0)[: padded[0]]
    out[: len(rows), : scale.shape[1]] = rows
    return torch.from_numpy(out)


def sizes(down: int, across: int, rows: int) -> dict[str, int]:
    return {"tile_rows": down, "tile_cols": across, "rows_padded": rows}


@record("nvfp4_expand_scale_to_fp8", dtypes=(torch.float32,))
def expand(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for down, across, *padded, block in _TILES:
        scale = torch.exp(torch.randn(down, across, generator=generator) * 4)
        output = torch.full(padded, 99, dtype=torch.uint8)
        wanted = expanded(scale.numpy(), (padded[0], padded[1]), block)
        arguments = {"input": scale, "output": output, **sizes(down, across, padded[0]), "block_len": block}
        yield Sample(f"{[down, across]} to {padded}", arguments, (Output("output", wanted),))


def fused(generator: torch.Generator, tiles: tuple[int, ...], of_all: float | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The arguments for tensors of ``tiles``, without ``block_len``, and the expected outputs. ``of_all``: a global amax to use instead."""
    down, across, rows, columns, block = tiles
    amaxes = torch.exp(torch.randn(down, across, generator=generator) * 4)
    amax = amaxes.max()[None] if amaxes.numel() else torch.zeros(1)
    amax = amax if of_all is None else torch.tensor([of_all])
    scale = oracle.nvfp4_scale(amaxes.numpy(), oracle.tensor_scale(amax.numpy()))
    wanted = {"per_block_scale": torch.from_numpy(scale), "target_scale": expanded(scale, (rows, columns), block), "target_amax": amax.clone()}
    targets = {name: torch.full_like(x, 99) for name, x in wanted.items()}
    return {"block_amax": amaxes, "global_amax": amax, **targets, **sizes(down, across, rows)}, wanted


@record("nvfp4_fused_scale", dtypes=(torch.float32,))
def fused_scale(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    labelled = [(str(tiles), tiles, None) for tiles in _TILES] + [(f"a global amax of {of_all}", _TILES[0], of_all) for of_all in _OF_ALL]
    for label, tiles, of_all in labelled:
        arguments, wanted = fused(generator, tiles, of_all)
        yield Sample(label, {**arguments, "block_len": tiles[-1]}, tuple(Output(name, x) for name, x in wanted.items()))


_OF_ALL = (0.0, 1.0, torch.inf)
"""Global amaxes. The first and the last give no scale, so it is 1."""


def together(calls: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The arguments of several calls as lists."""
    return {f"{name}_list": [call[name] for call in calls] for name in calls[0]}


@record("nvfp4_multi_tensor_fused_scale", dtypes=(torch.float32,))
def fused_scales(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for block in (16, 4):
        several = [tiles for tiles in _TILES if tiles[-1] == block]
        made = [*(fused(generator, tiles) for tiles in several), *(fused(generator, several[0], of_all) for of_all in _OF_ALL)]
        calls, wanted = zip(*made, strict=True)
        outputs = tuple(Output(f"{name}_list.{i}", x) for i, each in enumerate(wanted) for name, x in each.items())
        yield Sample(f"{len(several)}", {**together([*calls]), "block_len": block}, outputs)


@record("nvfp4_multi_tensor_compute_partial_amax")
def amaxes_of_many(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for block in (16, 5):
        calls, outputs = [], []
        for i, x in enumerate(slices(generator, dtype)):
            amaxes = x.amaxes(block, block)
            buffer, wanted = inside(amaxes, (i, 1))
            calls.append({"master_weight": x.part, "partial_amax": buffer, "global_amax": torch.full((1,), 7.0), **x.place})
            outputs += [Output(f"partial_amax_list.{i}", wanted), Output(f"global_amax_list.{i}", amaxes.max()[None])]
        yield Sample(f"by {block}", {**together(calls), "block_len": block}, tuple(outputs))


def packed(generator: torch.Generator, dtype: torch.dtype, block: int = 16) -> Iterator[tuple[Slice, dict[str, Any], Tensor]]:
    """``(slice, arguments without block_len, bytes)``. The other half of a byte that the slice fills by half keeps its bits."""
    for x in slices(generator, dtype):
        amax = np.array([900.0], np.float32)
        of_all = oracle.tensor_scale(amax)
        scale = oracle.nvfp4_scale((torch.rand(x.tiles(block), generator=generator) ** 4).numpy() * amax, of_all)
        codes = np.resize(np.array([9, 6], np.uint8), x.h * x.w)
        codes[x.start : x.start + x.length] = oracle.four_bits(x.part.float().numpy(), oracle.e4m3(x.each(scale, block, block)), of_all)
        wanted = oracle.packed(codes)[x.start // 2 : -(-(x.start + x.length) // 2)]
        arguments = {"inp": x.part, "out": torch.full(wanted.shape, 0x69, dtype=torch.uint8), "scale": torch.from_numpy(scale)}
        yield x, {**arguments, "global_scale": torch.from_numpy(of_all), **x.place}, torch.from_numpy(wanted)


def holder(data: Tensor) -> NVFP4TensorStorage:
    return NVFP4TensorStorage(data, None, None, None, None, None, DType.kFloat4E2M1, None, False)


@record("nvfp4_2d_partial_cast")
def nvfp4_cast(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for block in (16, 5):
        for x, arguments, wanted in packed(generator, dtype, block):
            yield Sample(f"{x.label} by {block}", {**arguments, "block_len": block}, (Output("out", wanted),))
            in_storage = {**arguments, "out": holder(arguments["out"].clone()), "block_len": block}
            yield Sample(f"{x.label} by {block}, held", in_storage, (Output("out._rowwise_data", wanted),))
    for value, code in ((0.0, 0), (6e4, 0x77)):
        # A scale that E4M3 rounds to zero: all elements but zeros saturate.
        arguments = one_tile(torch.full((16, 16), value, dtype=dtype), torch.zeros(1, 1))
        yield Sample(f"{value} by a scale of zero", arguments, (Output("out", torch.full((16, 8), code, dtype=torch.uint8)),))
    arguments, wanted = between_codes(dtype)
    yield Sample("between two codes", arguments, (Output("out", wanted),))


def one_tile(x: Tensor, scale: Tensor) -> dict[str, Any]:
    """The arguments of a cast of the whole weight ``x [16, 16]`` by a global scale of 1."""
    arguments = {"inp": x, "out": torch.full((16, 8), 0x99, dtype=torch.uint8), "scale": scale, "global_scale": torch.ones(1)}
    return {**arguments, "h": 16, "w": 16, "start_offset": 0}


def between_codes(dtype: torch.dtype) -> tuple[dict[str, Any], Tensor]:
    """The arguments of a cast of numbers halfway between two of E2M1, and their bytes: rounded to the even code."""
    x = (torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(2) * torch.tensor([1.0, -1.0]).repeat_interleave(8)).repeat(16, 1)
    codes = oracle.four_bits(x.numpy(), np.ones((16, 16), oracle.E4M3), np.ones((1, 1), oracle.F))
    return one_tile(x.to(dtype), torch.ones(1, 1)), torch.from_numpy(oracle.packed(codes))


@record("nvfp4_multi_tensor_2d_partial_cast")
def nvfp4_casts(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for block in (16, 5):
        _, calls, wanted = zip(*packed(generator, dtype, block), strict=True)
        if block == 16:
            between = between_codes(dtype)
            calls, wanted = (*calls, between[0]), (*wanted, between[1])
        outputs = tuple(Output(f"out_list.{i}", bytes_) for i, bytes_ in enumerate(wanted))
        yield Sample(f"by {block}", {**together([*calls]), "block_len": block}, outputs)
