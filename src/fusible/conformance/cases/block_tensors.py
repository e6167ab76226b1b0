"""Tensors of the block-scaled formats as calls take them, and what they stand for: made by the oracle, whatever backend is there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusible.conformance import block_oracle as oracle
from fusible.quantized import (
    Float8BlockQuantizer,
    Float8BlockwiseQTensorStorage,
    MXFP8Quantizer,
    MXFP8TensorStorage,
    NVFP4Quantizer,
    NVFP4TensorStorage,
)
from fusible.tex import DType
from fusible.tex.formats import block_format_of

__all__ = ["BLOCKED", "in_tiles", "stored"]

_E4M3, _E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2

BLOCKED: dict[str, Callable[..., Any]] = {
    "block 1x128": functools.partial(Float8BlockQuantizer, _E4M3, block_scaling_dim=1),
    "block 128x128": functools.partial(Float8BlockQuantizer, _E5M2, block_scaling_dim=2, force_pow_2_scales=False),
    "mxfp8": functools.partial(MXFP8Quantizer, _E4M3),
    "mxfp8 E5M2": functools.partial(MXFP8Quantizer, _E5M2),
    "nvfp4": NVFP4Quantizer,
    "nvfp4 by rows": functools.partial(NVFP4Quantizer, row_scaled_nvfp4=True),
    "nvfp4 4 over 6": functools.partial(NVFP4Quantizer, nvfp4_use_4over6=True, nvfp4_e4m3_max=256),
}
"""A quantizer of each format, by name."""


def _repeated(scales: np.ndarray, block: tuple[int, int], shape: tuple[int, ...]) -> np.ndarray:
    return scales.astype(np.float64).repeat(block[0], 0).repeat(block[1], 1)[: shape[0], : shape[1]]


def _eight_bits(x: np.ndarray, quantizer: Any, columns: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes, scales as they lie, and values of a copy in FP8 blocks or MXFP8."""
    if isinstance(quantizer, MXFP8Quantizer):
        block = (32, 1) if columns else (1, 32)
        data, scales = oracle.mxfp8(x, quantizer.dtype, block)
        factors = 2.0 ** (scales.astype(np.float64) - 127)
        return data, scales, data.view(oracle.NUMPY[quantizer.dtype]).astype(np.float64) * _repeated(factors, block, x.shape)
    tiled = block_format_of(quantizer).is_tiled(quantizer)
    block = (128, 128) if tiled else (128, 1) if columns else (1, 128)
    data, scales = oracle.block_fp8(x, quantizer.dtype, block, quantizer.amax_epsilon, quantizer.force_pow_2_scales, float(oracle.FLT_MAX))
    values = data.view(oracle.NUMPY[quantizer.dtype]).astype(np.float64) * _repeated(scales, block, x.shape)
    return data.T if columns else data, scales.T if tiled == columns else scales, values


def _four_bits(x: np.ndarray, quantizer: NVFP4Quantizer, columns: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Codes, two to a byte, scales, values and amaxes of a copy in NVFP4."""
    lines = x.T if columns else x
    amax = np.abs(lines).max(1) if quantizer.row_scaled_nvfp4 else np.abs(lines).max().reshape(1)
    over6 = quantizer.nvfp4_4over6_err_mode if quantizer.nvfp4_use_4over6 else None
    codes, scales = oracle.nvfp4(lines, amax, False, over6, quantizer.nvfp4_e4m3_max)
    factor = amax.astype(np.float64)[:, None] / (6 * quantizer.nvfp4_e4m3_max)
    values = oracle.e2m1_values(codes).astype(np.float64) * _repeated(scales.view(oracle.E4M3), (1, 16), lines.shape) * factor
    return codes[:, ::2] | codes[:, 1::2] << 4, scales, values.T if columns else values, amax


@functools.cache
def _made(name: str, shape: tuple[int, int], seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The buffers of both copies, and the values of each, float64."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).numpy()
    quantizer, buffers, values = BLOCKED[name](), {}, {}
    form = block_format_of(quantizer)
    for way, columns in (("rowwise", False), ("columnwise", True)):
        if isinstance(quantizer, NVFP4Quantizer):
            data, scales, wide, amax = _four_bits(x, quantizer, columns)
            buffers[f"amax_{way}"] = torch.from_numpy(amax.copy())
        else:
            data, scales, wide = _eight_bits(x, quantizer, columns)
        # What pads scales is anything that is a number.
        whole = np.ones(form.scale_shape(shape, columns, form.is_tiled(quantizer)), scales.dtype)
        whole[: scales.shape[0], : scales.shape[1]] = scales
        buffers[f"{way}_data"], buffers[f"{way}_scale_inv"] = torch.from_numpy(np.ascontiguousarray(data)), torch.from_numpy(whole)
        values[way] = torch.from_numpy(np.ascontiguousarray(wide))
    return buffers, values


def in_tiles(scales: Tensor, transposed: bool) -> Tensor:
    """Scales in the order of tensor cores, in the shape that they had; ``transposed`` first."""
    return torch.from_numpy(oracle.swizzled((scales.t() if transposed else scales).numpy())).view(scales.shape)


def stored(
    name: str, shape: tuple[int, int], dtype: torch.dtype, seed: int, ways: tuple[str, ...] = ("rowwise", "columnwise"), swizzled: bool = False
) -> tuple[Any, Any]:
    """A tensor of a format with the copies ``ways``, and the values of each copy, float64, by way; ``swizzled``: its scales lie in the order of
    tensor cores."""
    (buffers, values), quantizer = _made(name, shape, seed), BLOCKED[name]()
    if swizzled:
        transposed = {"columnwise_scale_inv": block_format_of(quantizer).blocks_first, "rowwise_scale_inv": False}
        buffers = {**buffers, **{key: in_tiles(buffers[key], turned) for key, turned in transposed.items()}}
    held = {key: x.clone() if any(way in key for way in ways) else None for key, x in buffers.items()}
    quantizer.set_usage(rowwise="rowwise" in ways, columnwise="columnwise" in ways)
    if isinstance(quantizer, NVFP4Quantizer):
        options: dict[str, Any] = {"row_scaled_nvfp4": quantizer.row_scaled_nvfp4, "nvfp4_use_4over6": quantizer.nvfp4_use_4over6}
        options |= {"nvfp4_e4m3_max": quantizer.nvfp4_e4m3_max, "fp4_dtype": quantizer.dtype, "with_gemm_swizzled_scales": swizzled}
        return NVFP4TensorStorage(**held, quantizer=quantizer, fake_dtype=dtype, **options), values
    own = {"fp8_dtype": quantizer.dtype, "quantizer": quantizer, "fake_dtype": dtype}
    if isinstance(quantizer, MXFP8Quantizer):
        return MXFP8TensorStorage(**held, **own, with_gemm_swizzled_scales=swizzled), values
    return Float8BlockwiseQTensorStorage(**held, **own, is_2D_scaled=quantizer.block_scaling_dim == 2), values
