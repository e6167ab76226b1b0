"""The formats of FP8 by ml_dtypes: the bytes that numbers become, and the numbers that bytes stand for."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from fusible.tex import DType
from fusible.tex.protocol import FP8_MAX

__all__ = ["FORMATS", "HALF_STEP", "NUMPY", "cast", "decoded", "drawn", "kept_within", "rounded"]

FORMATS = (DType.kFloat8E4M3, DType.kFloat8E5M2)

NUMPY: dict[int, Any] = {DType.kFloat8E4M3: ml_dtypes.float8_e4m3fn, DType.kFloat8E5M2: ml_dtypes.float8_e5m2}

HALF_STEP: dict[int, float] = {DType.kFloat8E4M3: 2.0**-4, DType.kFloat8E5M2: 2.0**-3}
"""The largest relative error of rounding to nearest: half the distance between two neighbouring numbers."""


def rounded(x: np.ndarray, fp8: int) -> np.ndarray:
    """The bytes of ``x`` rounded to nearest even and saturated."""
    return np.clip(x, -FP8_MAX[fp8], FP8_MAX[fp8]).astype(NUMPY[fp8]).view(np.uint8)


def cast(x: Tensor, scale: float | np.ndarray, fp8: int) -> Tensor:
    """The bytes of ``x * scale``, a product in fp32, rounded to nearest even and saturated."""
    with np.errstate(all="ignore"):
        return torch.from_numpy(rounded(x.float().numpy() * np.float32(scale), fp8))


def decoded(data: Tensor, fp8: int) -> Tensor:
    """The numbers that bytes stand for, float64."""
    return torch.from_numpy(data.cpu().numpy().view(NUMPY[fp8]).astype(np.float64))


def drawn(generator: torch.Generator, shape: tuple[int, ...], fp8: int) -> Tensor:
    """The bytes of normally distributed numbers."""
    return torch.from_numpy(torch.randn(shape, generator=generator).numpy().astype(NUMPY[fp8]).view(np.uint8))


def kept_within(data: Tensor, wanted: Tensor, inverse: float | Tensor, fp8: int, bound: Tensor) -> Tensor:
    """``data`` where a byte times ``inverse`` (``1 / scale``) is within ``bound`` of float64 ``wanted``, elsewhere the nearest bytes.

    A result that may have been rounded in between agrees with this exactly where it is near enough.
    """
    data = data.cpu().view(wanted.shape)
    near = (decoded(data, fp8) * inverse - wanted).abs() <= bound
    return torch.where(near, data, cast(wanted, 1 / np.asarray(inverse), fp8))
