"""The block-scaled formats in NumPy and ml_dtypes, block by block and element by element: what every backend's bytes are compared with."""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import ml_dtypes
import numpy as np

from fusible.conformance.eight_bits import NUMPY, rounded
from fusible.tex.protocol import FP8_MAX

E4M3 = ml_dtypes.float8_e4m3fn
F = np.float32
FLT_MAX = np.finfo(np.float32).max
SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]

__all__ = ["E4M3", "F", "FLT_MAX", "NUMPY", "block_fp8", "e2m1_values", "mxfp8", "nvfp4", "swizzled", "tensor_scale", "transformed"]

Tile = tuple[slice, slice]
REMEMBERED = 2048

P = ParamSpec("P")
R = TypeVar("R", np.ndarray, tuple[np.ndarray, np.ndarray])


def remembered(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, which computes a result once: samples of the same numbers are made anew for every backend and dtype. Results are copies."""
    known: dict[Any, Any] = {}

    def key_of(x: Any) -> Any:
        return (x.shape, x.dtype.str, hashlib.blake2b(x.tobytes()).digest()) if isinstance(x, np.ndarray) else x

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        key = (*map(key_of, args), *((name, key_of(x)) for name, x in sorted(kwargs.items())))
        if key not in known:
            if len(known) >= REMEMBERED:
                known.clear()
            known[key] = function(*args, **kwargs)
        return copy.deepcopy(known[key])

    return call


def tiles(shape: tuple[int, ...], block: tuple[int, int]) -> Iterator[tuple[tuple[int, int], Tile]]:
    for i in range(0, shape[0], block[0]):
        for j in range(0, shape[1], block[1]):
            yield (i // block[0], j // block[1]), (slice(i, i + block[0]), slice(j, j + block[1]))


def grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def fp8_scale(amax: Any, fp8: int, epsilon: float, power_of_two: bool, overflow: float) -> Any:
    amax = F(epsilon) if amax < F(epsilon) else F(amax)
    if not np.isfinite(amax) or amax == 0:
        return F(1)
    scale = F(FP8_MAX[fp8]) / amax
    if np.isinf(scale):
        scale = F(overflow)
    return F(2.0 ** np.floor(np.log2(np.float64(scale)))) if power_of_two else scale


@remembered
def block_fp8(x: np.ndarray, fp8: int, block: tuple[int, int], epsilon: float, power_of_two: bool, overflow: float) -> tuple[np.ndarray, np.ndarray]:
    """Bytes and ``1 / scale`` by block of a matrix of fp32."""
    data, inverse = np.empty(x.shape, np.uint8), np.empty(grid(x.shape, block), F)
    with np.errstate(all="ignore"):
        for place, part in tiles(x.shape, block):
            scale = fp8_scale(np.abs(x[part]).max(), fp8, epsilon, power_of_two, overflow)
            data[part], inverse[place] = rounded(x[part] * scale, fp8), F(1) / scale
    return data, inverse


def exponent_byte(value: Any) -> int:
    """The least power of two that is not below ``value``, as E8M0."""
    if np.isnan(value):
        return 255
    if np.isinf(value):
        return 254
    mantissa, exponent = np.frexp(np.float64(value))
    return 0 if value == 0 else int(np.clip(exponent - (mantissa == 0.5) + 127, 0, 254))


@remembered
def mxfp8(x: np.ndarray, fp8: int, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Bytes and E8M0 scales by block."""
    data, scales = np.empty(x.shape, np.uint8), np.empty(grid(x.shape, block), np.uint8)
    with np.errstate(all="ignore"):
        for place, part in tiles(x.shape, block):
            byte = exponent_byte(np.abs(x[part]).max() * (F(1) / F(FP8_MAX[fp8])))
            factor = F(np.nan) if byte == 255 else F(2.0 ** (127 - byte))
            data[part], scales[place] = rounded(x[part] * factor, fp8), byte
    return data, scales


def e2m1(x: np.ndarray) -> np.ndarray:
    """Codes of a saturating cast to nearest even; NaN becomes 6."""
    x = np.where(np.isnan(x), F(6), np.clip(x, -6, 6)).astype(F)
    return x.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15


def e2m1_values(codes: np.ndarray) -> np.ndarray:
    """The values of E2M1 codes."""
    return codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(F)


def e4m3(x: Any) -> Any:
    return np.clip(F(x), None, F(448)).astype(E4M3)


def tensor_scale(amax: Any, e4m3_max: float) -> Any:
    """``6 e4m3_max / amax`` in fp32, at most the largest number; 1 where that is no scale."""
    scale = np.minimum(F(6 * e4m3_max) / F(amax), FLT_MAX)
    return F(1) if amax == 0 or scale == 0 else scale


@remembered
def nvfp4(x: np.ndarray, amax: np.ndarray, tiled: bool, over6: str | None = None, e4m3_max: float = 448) -> tuple[np.ndarray, np.ndarray]:
    """Codes (one per byte) and E4M3 bytes ``[lines, blocks]`` of the lines ``x``; ``amax`` is one number, or one per line."""
    codes, scales = np.empty(x.shape, np.uint8), np.empty((x.shape[0], x.shape[1] // 16), np.uint8)
    with np.errstate(all="ignore"):
        for (i, j), part in tiles(x.shape, (16, 16) if tiled else (1, 16)):
            own = amax.reshape(-1)[0 if amax.size == 1 else i]
            scale, largest = tensor_scale(own, e4m3_max), np.abs(x[part]).max()
            if over6 is None:
                chosen = _mapped(x[part], e4m3(np.minimum(largest * (scale * F(1 / 6)), FLT_MAX)), scale)
            else:
                base = largest / F(6) * scale
                six, four = _mapped(x[part], e4m3(base), scale), _mapped(x[part], e4m3(base * F(1.5)), scale)
                errors = [_error(x[part], *candidate, own, e4m3_max, over6) for candidate in (four, six)]
                chosen = four if errors[0] < errors[1] else six
            codes[part], scales[part[0], j] = chosen[0], chosen[1].view(np.uint8)
    return codes, scales


def _mapped(x: np.ndarray, block_scale: Any, scale: Any) -> tuple[np.ndarray, Any]:
    encoding = np.minimum(F(1) / (F(block_scale) * (F(1) / scale)), FLT_MAX)
    return e2m1(x * encoding), np.asarray(block_scale)


def _error(x: np.ndarray, codes: np.ndarray, block_scale: Any, amax: Any, e4m3_max: float, mode: str) -> Any:
    lines = np.zeros(x.shape[0], F)
    for place in range(16):
        difference = e2m1_values(codes[:, place]) * F(block_scale) * F(amax) / F(6 * e4m3_max) - x[:, place]
        lines = lines + (difference * difference if mode == "MSE" else np.abs(difference))
    while len(lines) > 1:
        lines = lines[: len(lines) // 2] + lines[len(lines) // 2 :]
    return lines[0]


def transformed(x: np.ndarray, signs: bool = True) -> np.ndarray:
    """``x^T`` with every 16 elements of its lines multiplied by the random Hadamard matrix, rounded to bfloat16."""
    hadamard = np.array([[(-1.0) ** bin(i & j).count("1") / 4 for j in range(16)] for i in range(16)])
    hadamard = np.array(SIGNS if signs else [1] * 16)[:, None] * hadamard
    return (x.T.reshape(-1, 16).astype(np.float64) @ hadamard).astype(F).reshape(x.T.shape).astype(ml_dtypes.bfloat16).astype(F)


@remembered
def swizzled(scales: np.ndarray) -> np.ndarray:
    """Scales ``[128 m, 4 k]`` in the order of tensor cores: tiles of 32 rows of 16, line ``l`` at row ``l % 32``, column ``4 (l // 32)``."""
    result = np.empty(scales.size, scales.dtype)
    lines, blocks = scales.shape
    for line in range(lines):
        for block in range(blocks):
            tile = line // 128 * (blocks // 4) + block // 4
            result[tile * 512 + line % 32 * 16 + line % 128 // 32 * 4 + block % 4] = scales[line, block]
    return result.reshape(scales.shape)
