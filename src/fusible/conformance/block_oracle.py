"""The block-scaled formats in NumPy and ml_dtypes, step by step in fp32: what every backend's bytes are compared with."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from fusible.conformance.eight_bits import NUMPY, rounded
from fusible.tex.protocol import FP8_MAX

E4M3 = ml_dtypes.float8_e4m3fn
F = np.float32
FLT_MAX = np.finfo(np.float32).max
SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]

__all__ = [
    "E4M3",
    "F",
    "FLT_MAX",
    "NUMPY",
    "block_fp8",
    "e2m1_values",
    "e4m3",
    "exponent_bytes",
    "four_bits",
    "fp8_scale",
    "mxfp8",
    "nvfp4",
    "nvfp4_scale",
    "packed",
    "spread",
    "swizzled",
    "tensor_scale",
    "transformed",
]

Block = tuple[int, int]
_quiet = np.errstate(all="ignore")
"""Scales overflow, and numbers that are not finite come through; what must come of them is a matter of tests, not of warnings."""


def block_amax(x: np.ndarray, block: Block) -> np.ndarray:
    """The largest absolute value of each block of the matrix ``x``; a block at the edge may be cut off."""
    rows, columns = (range(0, size, step) for size, step in zip(x.shape, block, strict=True))
    return np.maximum.reduceat(np.maximum.reduceat(np.abs(x), rows, 0), columns, 1) if x.size else np.empty((len(rows), len(columns)), x.dtype)


def spread(blocks: np.ndarray, block: Block, shape: tuple[int, ...]) -> np.ndarray:
    """A value per block as a value per element of the matrix ``shape``."""
    return blocks.repeat(block[0], 0).repeat(block[1], 1)[: shape[0], : shape[1]]


@_quiet
def fp8_scale(amax: np.ndarray, fp8: int, epsilon: float, power_of_two: bool, overflow: float) -> np.ndarray:
    """``FP8_MAX / max(amax, epsilon)``, or the next lower power of two; 1 where the amax is 0 or not finite. ``overflow`` replaces infinity."""
    amax = np.where(amax < F(epsilon), F(epsilon), amax)
    scale = F(FP8_MAX[fp8]) / amax
    scale = np.where(np.isinf(scale), F(overflow), scale)
    scale = np.exp2(np.floor(np.log2(scale, dtype=np.float64))).astype(F) if power_of_two else scale
    return np.where(np.isfinite(amax) & (amax != 0), scale, F(1))


@_quiet
def block_fp8(x: np.ndarray, fp8: int, block: Block, epsilon: float, power_of_two: bool, overflow: float) -> tuple[np.ndarray, np.ndarray]:
    """Bytes and ``1 / scale`` by block of a matrix of fp32."""
    scale = fp8_scale(block_amax(x, block), fp8, epsilon, power_of_two, overflow)
    return rounded(x * spread(scale, block, x.shape), fp8), F(1) / scale


@_quiet
def exponent_bytes(values: np.ndarray) -> np.ndarray:
    """The least powers of two that are not below ``values``, as E8M0; an infinity is the largest one."""
    mantissa, exponent = np.frexp(values.astype(np.float64))
    found = np.where(values == 0, 0, np.clip(exponent - (mantissa == 0.5) + 127, 0, 254))
    return np.where(np.isnan(values), 255, np.where(np.isinf(values), 254, found)).astype(np.uint8)


@_quiet
def mxfp8(x: np.ndarray, fp8: int, block: Block) -> tuple[np.ndarray, np.ndarray]:
    """Bytes and E8M0 scales by block."""
    scales = exponent_bytes(block_amax(x, block) * (F(1) / F(FP8_MAX[fp8])))
    factors = np.where(scales == 255, np.nan, 2.0 ** (127.0 - scales)).astype(F)
    return rounded(x * spread(factors, block, x.shape), fp8), scales


def e2m1(x: np.ndarray) -> np.ndarray:
    """Codes of a saturating cast to nearest even; NaN becomes 6."""
    x = np.where(np.isnan(x), F(6), np.clip(x, -6, 6)).astype(F)
    return x.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15


def e2m1_values(codes: np.ndarray) -> np.ndarray:
    """The values of E2M1 codes."""
    return codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(F)


def packed(codes: np.ndarray) -> np.ndarray:
    """Two codes to a byte, that of the even column in the low half."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def e4m3(x: np.ndarray) -> np.ndarray:
    """A saturating cast of what is not negative."""
    return np.minimum(x, F(448)).astype(E4M3)


@_quiet
def tensor_scale(amax: np.ndarray, e4m3_max: float = 448) -> np.ndarray:
    """``6 e4m3_max / amax`` in fp32, at most the largest number; 1 where that is no scale."""
    scale = np.minimum(F(6 * e4m3_max) / amax, FLT_MAX)
    return np.where((amax == 0) | (scale == 0), F(1), scale)


@_quiet
def nvfp4_scale(block_amax: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """``block_amax * scale / 6``, before it is cast to E4M3: the scale of a block relative to that of the tensor."""
    return np.minimum(block_amax * (scale * F(1 / 6)), FLT_MAX)


@_quiet
def four_bits(x: np.ndarray, block_scale: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The codes of ``x * scale / block_scale``, of which ``block_scale`` is in E4M3."""
    return e2m1(x * np.minimum(F(1) / (block_scale.astype(F) * (F(1) / scale)), FLT_MAX))


@_quiet
def nvfp4(x: np.ndarray, amax: np.ndarray, tiled: bool, over6: str | None = None, e4m3_max: float = 448) -> tuple[np.ndarray, np.ndarray]:
    """Codes (one per byte) and E4M3 bytes ``[lines, blocks]`` of the lines ``x``; ``amax`` is one number, or one per line.

    ``over6``, "MSE" or "MAE": a block is mapped to 4 instead of 6 where the error by that measure is smaller.
    """
    block = (16, 16) if tiled else (1, 16)
    amax = amax.reshape(-1, 1)
    scale, largest = tensor_scale(amax, e4m3_max), block_amax(x, block)

    def mapped(block_scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        each = spread(e4m3(block_scale), block, x.shape)
        return four_bits(x, each, scale), each

    if over6 is None:
        codes, scales = mapped(nvfp4_scale(largest, scale))
    else:
        base = largest / F(6) * scale
        six, four = mapped(base), mapped(base * F(1.5))
        errors = [_errors(x, *candidate, amax, e4m3_max, over6, block[0]) for candidate in (four, six)]
        better = spread(errors[0] < errors[1], block, x.shape)
        codes, scales = (np.where(better, of_four, of_six) for of_four, of_six in zip(four, six, strict=True))
    return codes, scales[:, ::16].view(np.uint8)


def _errors(x: np.ndarray, codes: np.ndarray, scales: np.ndarray, amax: np.ndarray, e4m3_max: float, mode: str, rows: int) -> np.ndarray:
    """The error of each block of ``rows`` rows. The order of the sum decides near ties: along a row, then the rows by halves."""
    difference = e2m1_values(codes) * scales.astype(F) * amax / F(6 * e4m3_max) - x
    each = (difference * difference if mode == "MSE" else np.abs(difference)).reshape(len(x) // rows, rows, -1, 16)
    lines = np.zeros(each.shape[:-1], F)
    for place in range(16):
        lines = lines + each[..., place]
    while lines.shape[1] > 1:
        lines = lines[:, : lines.shape[1] // 2] + lines[:, lines.shape[1] // 2 :]
    return lines[:, 0]


def transformed(x: np.ndarray, signs: bool = True) -> np.ndarray:
    """``x^T`` with every 16 elements of its lines multiplied by the random Hadamard matrix, rounded to bfloat16."""
    hadamard = np.array([[(-1.0) ** bin(i & j).count("1") / 4 for j in range(16)] for i in range(16)])
    hadamard = np.array(SIGNS if signs else [1] * 16)[:, None] * hadamard
    return (x.T.reshape(-1, 16).astype(np.float64) @ hadamard).astype(F).reshape(x.T.shape).astype(ml_dtypes.bfloat16).astype(F)


def swizzled(scales: np.ndarray) -> np.ndarray:
    """Scales ``[128 m, 4 k]`` in the order of tensor cores: tiles of 32 rows of 16, line ``l`` at row ``l % 32``, column ``4 (l // 32)``."""
    line, block = np.indices(scales.shape)
    tile = line // 128 * (scales.shape[1] // 4) + block // 4
    result = np.empty(scales.size, scales.dtype)
    result[tile * 512 + line % 32 * 16 + line % 128 // 32 * 4 + block % 4] = scales
    return result.reshape(scales.shape)
