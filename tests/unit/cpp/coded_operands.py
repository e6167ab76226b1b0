"""Operands of products in blocks: random codes and scales, their values by torch's own types, and how far a product may be off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusible import cpp_extensions as native

E4M3, E5M2, E2M1 = torch.float8_e4m3fn, torch.float8_e5m2, "float4_e2m1fn_x2"
WIDE = [torch.float32, torch.bfloat16, torch.float16]
EPS = torch.finfo(torch.float32).eps
FOURS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
LANES = 8
"""The fewest lanes of a vector, which share the elements of a column."""


@dataclass(frozen=True)
class Blocks:
    """Codes ``[lines, depth]``, what they are, their scales, and whether those are of squares. ``powers``: of codes of four bits, whether scales are
    powers of two for 32 of them."""

    codes: Tensor
    dtype: Any
    scales: Tensor
    tiled: bool = False
    powers: bool = False

    @property
    def length(self) -> int:
        """Of a block."""
        return 128 if self.scales.dtype == torch.float32 else 16 if self.dtype == E2M1 and not self.powers else 32

    @property
    def given(self) -> Tensor:
        """The scales as the kernel takes them."""
        return self.scales.view(torch.float8_e8m0fnu) if self.powers else self.scales

    @property
    def nan(self) -> int:
        """The byte of a scale that is none."""
        return 0x7F if self.length == 16 else 0xFF

    @property
    def values(self) -> Tensor:
        """In float64, by torch's own types."""
        if self.dtype == E2M1:
            each = torch.stack([self.codes & 15, self.codes >> 4], -1).flatten(1).long()
            return FOURS[each].double() * self.scales.view(torch.float8_e8m0fnu if self.powers else E4M3).double().repeat_interleave(self.length, 1)
        elements = self.codes.view(self.dtype).double()
        if self.scales.dtype == torch.uint8:
            return elements * self.scales.view(torch.float8_e8m0fnu).double().repeat_interleave(32, 1)
        lines, depth = elements.shape
        scales = self.scales.repeat_interleave(128, 0)[:lines] if self.tiled else self.scales.t()
        return elements * scales.double().repeat_interleave(128, 1)[:, :depth]

    def product(self, left: Tensor, dtype: torch.dtype = torch.float32, **more: Any) -> Tensor:
        out = torch.empty(left.shape[0], self.codes.shape[0], dtype=dtype)
        operands = left, False, left.dtype, 1.0, self.codes, True, self.dtype, 1.0, out, dtype
        native.gemm(*operands, right_scales=self.given, right_tiled=self.tiled, **more)
        return out


FORMATS = ["mx e4m3", "mx e5m2", "rows e4m3", "rows e5m2", "squares e4m3", "squares e5m2", "fours", "mx fours"]


def random_codes(shape: tuple[int, int], fp8: torch.dtype, generator: torch.Generator) -> Tensor:
    return (torch.randn(shape, generator=generator) * 10).to(fp8).view(torch.uint8)


def random_blocks(name: str, lines: int, blocks: int, seed: int = 0) -> Blocks:
    """``blocks`` of 32 elements along each line, of 16 in the format of four bits; of the last one of 128, as many as there are."""
    generator, fp8 = torch.Generator().manual_seed(seed), E5M2 if "e5m2" in name else E4M3
    if name == "mx fours":
        codes = torch.randint(256, (lines, 16 * blocks), generator=generator).to(torch.uint8)
        return Blocks(codes, E2M1, torch.randint(110, 140, (lines, blocks), generator=generator).to(torch.uint8), powers=True)
    depth = (16 if name == "fours" else 32) * blocks
    if name == "fours":
        codes = torch.randint(256, (lines, depth // 2), generator=generator).to(torch.uint8)
        return Blocks(codes, E2M1, torch.randint(1, 127, (lines, blocks), generator=generator).to(torch.uint8))
    codes = random_codes((lines, depth), fp8, generator)
    if name.startswith("mx"):
        return Blocks(codes, fp8, torch.randint(110, 140, (lines, blocks), generator=generator).to(torch.uint8))
    tiled = name.startswith("squares")
    shape = (-(-lines // 128), -(-depth // 128)) if tiled else (-(-depth // 128), lines)
    return Blocks(codes, fp8, torch.rand(shape, generator=generator) + 0.01, tiled)


def bound(left: Tensor, right: Blocks | Tensor, dtype: torch.dtype) -> Tensor:
    """What the documented orders may be off by: a lane rounds a product, its sum and a block's for each of its elements, and tiles one pair after
    another; then lanes are added up, and at the end of each 1024 elements the sums; and half a unit of the result."""
    depth = left.shape[1]
    size = left.double().abs() @ (right.values if isinstance(right, Blocks) else right.double()).abs().t()
    return size * (EPS / 2 * (max(3 / LANES, 1) * depth + 3 + depth / 1024 + 3) + torch.finfo(dtype).eps / 2) + torch.finfo(dtype).tiny


def agree(result: Tensor, expected: Tensor, allowed: Tensor) -> None:
    error = (result.double() - expected).abs()
    assert bool((error <= allowed).all()), f"off by {(error / allowed).max().item():.2f} times what is allowed"
