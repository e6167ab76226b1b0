"""Blocks of bf16 under powers of two, cast as they lie, beside the same numbers as floats: every mantissa at every distance from the amax."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fusible import cpp_extensions as native

FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)
DISTANCES = 34  # the smallest codes are 2^-18 and 2^-32 of the largest

Quantize = Callable[[torch.Tensor, torch.dtype, bool, tuple[bool, bool]], list[torch.Tensor | None]]


def _squares(length: int, exponent: int, amax_mantissa: int, seed: int) -> torch.Tensor:
    """[lines * length, length] bf16: square below square, in each of which every row and every column has the same numbers: an amax of that exponent
    and mantissa, and others of some binade. All together have every number that bf16 has below the amax in ``DISTANCES`` binades."""
    amax = torch.tensor([(exponent << 7) | amax_mantissa], dtype=torch.int16)
    below = torch.arange(max(0, (exponent - DISTANCES) << 7), int(amax), dtype=torch.int16)
    words = torch.cat([below, below[: -len(below) % (length - 1)]]).view(-1, length - 1)
    lines = torch.cat([amax.expand(len(words), 1), words], dim=1)
    turns = (torch.arange(length)[:, None] + torch.arange(length)) % length
    squares = lines[:, turns].reshape(-1, length)
    signs = torch.randint(0, 2, squares.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int16) << 15
    return (squares | signs).view(torch.bfloat16)


def _blocks(x: torch.Tensor, fp8: torch.dtype, tiled: bool, copies: tuple[bool, bool]) -> list[torch.Tensor | None]:
    """What the kernel of 1x128 or 128x128 blocks writes: codes and scales of the rows, and of the columns."""
    (rows, cols), (high, wide) = x.shape, (-(-size // 128) for size in x.shape)
    buffers = [torch.zeros(rows, cols, dtype=torch.uint8), torch.zeros((high, wide) if tiled else (wide, rows))]
    buffers += [torch.zeros(cols, rows, dtype=torch.uint8), torch.zeros((wide, high) if tiled else (high, cols))]
    asked = [buffer if copies[i // 2] else None for i, buffer in enumerate(buffers)]
    native.quantize_block_fp8(x, fp8, *asked, tiled=tiled, power_of_two=True)
    return asked


def _microscaled(x: torch.Tensor, fp8: torch.dtype, tiled: bool, copies: tuple[bool, bool]) -> list[torch.Tensor | None]:
    """The same of MXFP8."""
    rows, cols = x.shape
    shapes = ((rows, cols), (rows, cols // 32), (rows, cols), (rows // 32, cols))
    asked = [torch.zeros(shape, dtype=torch.uint8) if copies[i // 2] else None for i, shape in enumerate(shapes)]
    native.quantize_mxfp8(x, fp8, *asked, tiled=tiled)
    return asked


def _same(a: list[torch.Tensor | None], b: list[torch.Tensor | None]) -> bool:
    return all(x is y if x is None or y is None else torch.equal(x, y) for x, y in zip(a, b, strict=True))


AMAXES = [
    (1, 0x60),
    (9, 0x60),
    *((exponent, 0x60) for exponent in (14, 15, 16, 29, 30, 31)),
    *((127, mantissa) for mantissa in (0x5F, 0x60, 0x61)),
    (254, 0x60),
]
"""Exponents and mantissas: 448 and 57344 are 1.75 times a power of two, 0x60; about 15 and 30 end the scales under which codes are found as the bits
lie, in E4M3 and in E5M2."""

KERNELS = pytest.mark.parametrize(("quantize", "length"), [(_blocks, 128), (_microscaled, 32)], ids=["blocks", "microscaled"])


@pytest.mark.parametrize("copies", [(True, False), (False, True), (True, True)], ids=["rows", "columns", "both"])
@pytest.mark.parametrize("tiled", [False, True], ids=["lines", "squares"])
@pytest.mark.parametrize("fp8", FORMATS, ids=str)
@KERNELS
def test_bf16_is_cast_as_its_floats_are(
    quantize: Quantize, length: int, fp8: torch.dtype, tiled: bool, copies: tuple[bool, bool], level: str
) -> None:
    for exponent, mantissa in AMAXES:
        x = _squares(length, exponent, mantissa, seed=exponent)
        assert _same(quantize(x, fp8, tiled, copies), quantize(x.float(), fp8, tiled, copies)), (exponent, mantissa)


@pytest.mark.parametrize("fp8", FORMATS, ids=str)
@KERNELS
def test_bf16_that_is_no_number_is_cast_as_its_floats_are(quantize: Quantize, length: int, fp8: torch.dtype, level: str) -> None:
    x = _squares(length, 127, 0x7F, seed=0)[-2 * length :]  # of the largest
    x[3, 5], x[9, 1], x[20, 30], x[length, 0] = torch.nan, torch.inf, -torch.inf, -torch.nan
    for tiled, copies in ((tiled, copies) for tiled in (False, True) for copies in ((True, False), (False, True), (True, True))):
        assert _same(quantize(x, fp8, tiled, copies), quantize(x.float(), fp8, tiled, copies)), (tiled, copies)
