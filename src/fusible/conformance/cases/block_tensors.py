"""Block-scaled tensors made by the oracle: the copies that a quantizer makes, and whole tensors as arguments, with the values they represent."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fusible.conformance import block_oracle as oracle
from fusible.quantized import (
    BlockScaledStorage,
    Float8BlockQuantizer,
    Float8BlockwiseQTensorStorage,
    MXFP8Quantizer,
    MXFP8TensorStorage,
    NVFP4Quantizer,
    NVFP4TensorStorage,
)
from fusible.tex import DType
from fusible.tex.formats import block_format_of

__all__ = ["BLOCKED", "BlockQuantizer", "Copy", "WAYS", "copies", "in_tiles", "stored"]

WAYS = ("rowwise", "columnwise")
_E4M3, _E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2

Shape = tuple[int, int]
Stored = tuple[BlockScaledStorage, dict[str, Tensor]]
BlockQuantizer = Float8BlockQuantizer | MXFP8Quantizer | NVFP4Quantizer

BLOCKED: dict[str, Callable[..., BlockQuantizer]] = {
    "block 1x128": functools.partial(Float8BlockQuantizer, _E4M3, block_scaling_dim=1),
    "block 128x128": functools.partial(Float8BlockQuantizer, _E5M2, block_scaling_dim=2, force_pow_2_scales=False),
    "mxfp8": functools.partial(MXFP8Quantizer, _E4M3),
    "mxfp8 E5M2": functools.partial(MXFP8Quantizer, _E5M2),
    "nvfp4": NVFP4Quantizer,
    "nvfp4 by rows": functools.partial(NVFP4Quantizer, row_scaled_nvfp4=True),
    "nvfp4 4 over 6": functools.partial(NVFP4Quantizer, nvfp4_use_4over6=True, nvfp4_e4m3_max=256),
}
"""A quantizer of each format, by name."""


class Copy(NamedTuple):
    """A copy of a matrix ``[M, K]``: bytes and scales as they lie in memory, without what pads them; in NVFP4 the amaxes; and the float64 values
    ``[M, K]`` that it stands for, or its transform."""

    data: Tensor
    scales: Tensor
    amax: Tensor | None
    values: Tensor


def copies(x: Tensor, quantizer: BlockQuantizer, amaxes: dict[str, Tensor] | None = None) -> Iterator[tuple[str, Copy]]:
    """The copies that a block-scaled quantizer makes of ``x [M, K]``, by way; in NVFP4 with their own amaxes, or those given."""
    asked = {"rowwise": quantizer.rowwise_usage, "columnwise": quantizer.columnwise_usage}
    for way in WAYS:
        if not asked[way]:
            continue
        columns = way == "columnwise"
        if isinstance(quantizer, NVFP4Quantizer):
            data, scales, amax, values = _four_bits(x.float().numpy(), quantizer, columns, None if amaxes is None else amaxes[way].numpy())
            yield way, Copy(_tensor(data), _tensor(scales), _tensor(amax), _tensor(values))
        else:
            data, scales, values = _eight_bits(x, quantizer, columns)
            yield way, Copy(_tensor(data), _tensor(scales), None, _tensor(values))


def _tensor(x: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(x))


@np.errstate(all="ignore")
def _eight_bits(x: Tensor, quantizer: Float8BlockQuantizer | MXFP8Quantizer, columns: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes, scales and values of a copy in FP8 blocks or MXFP8."""
    matrix, tiled = x.float().numpy(), block_format_of(quantizer).is_tiled(quantizer)
    length = 32 if isinstance(quantizer, MXFP8Quantizer) else 128
    block = (length, length) if tiled else (length, 1) if columns else (1, length)
    if isinstance(quantizer, MXFP8Quantizer):
        data, scales = oracle.mxfp8(matrix, quantizer.dtype, block)
        factors = 2.0 ** (scales.astype(np.float64) - 127)
    else:
        rule = quantizer.amax_epsilon, quantizer.force_pow_2_scales, torch.finfo(x.dtype).max
        data, scales = oracle.block_fp8(matrix, quantizer.dtype, block, *rule)
        factors = scales.astype(np.float64)
    values = data.view(oracle.NUMPY[quantizer.dtype]).astype(np.float64) * oracle.spread(factors, block, matrix.shape)
    if isinstance(quantizer, MXFP8Quantizer):
        return data, scales.repeat(length, int(columns)) if tiled else scales, values
    return data.T if columns else data, scales.T if tiled == columns else scales, values


@np.errstate(all="ignore")
def _four_bits(x: np.ndarray, quantizer: NVFP4Quantizer, columns: bool, amax_of_all: np.ndarray | None) -> tuple[np.ndarray, ...]:
    """Bytes, scales, amaxes and values of a copy in NVFP4, with its own amaxes or those given."""
    turned = oracle.transformed(x, quantizer.rht_matrix_random_sign_mask_t != 0) if quantizer.with_rht else x.T
    lines = np.ascontiguousarray(turned if columns else x)
    own = np.abs(lines).max(1) if quantizer.row_scaled_nvfp4 else np.abs(lines).max().reshape(1)
    amax = own if amax_of_all is None else amax_of_all
    over6 = quantizer.nvfp4_4over6_err_mode if quantizer.nvfp4_use_4over6 else None
    codes, scales = oracle.nvfp4(lines, amax, quantizer.with_2d_quantization, over6, quantizer.nvfp4_e4m3_max)
    factors = oracle.spread(scales.view(oracle.E4M3).astype(np.float64), (1, 16), lines.shape)
    values = oracle.e2m1_values(codes).astype(np.float64) * factors * (amax.astype(np.float64)[:, None] / (6 * quantizer.nvfp4_e4m3_max))
    return oracle.packed(codes), scales, amax, values.T if columns else values


@functools.cache
def _made(name: str, shape: Shape, seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The buffers of both copies, and the values of each, float64."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    quantizer, buffers, values = BLOCKED[name](), {}, {}
    form = block_format_of(quantizer)
    for way, copy in copies(x, quantizer):
        # The padding of scales may be any number, here 1.
        whole = torch.ones(form.scale_shape(shape, way == "columnwise", form.is_tiled(quantizer)), dtype=copy.scales.dtype)
        whole[: copy.scales.shape[0], : copy.scales.shape[1]] = copy.scales
        buffers |= {f"{way}_data": copy.data, f"{way}_scale_inv": whole, **({} if copy.amax is None else {f"amax_{way}": copy.amax})}
        values[way] = copy.values
    return buffers, values


def in_tiles(scales: Tensor, transposed: bool = False) -> Tensor:
    """Scales in the order that tensor cores read, in their former shape. ``transposed``: their transpose is reordered."""
    return torch.from_numpy(oracle.swizzled((scales.t() if transposed else scales).numpy())).view(scales.shape)


def stored(name: str, shape: Shape, dtype: torch.dtype, seed: int, ways: Sequence[str] = WAYS, swizzled: bool = False) -> Stored:
    """A tensor of a format with the copies ``ways``, and the float64 values of each copy, by way. ``swizzled``: its scales are in the order that
    tensor cores read."""
    (buffers, values), quantizer = _made(name, shape, seed), BLOCKED[name]()
    if swizzled:
        transposed = {"columnwise_scale_inv": block_format_of(quantizer).blocks_first, "rowwise_scale_inv": False}
        buffers = {**buffers, **{key: in_tiles(buffers[key], turned) for key, turned in transposed.items()}}
    stored_buffers = {key: x.clone() if any(way in key for way in ways) else None for key, x in buffers.items()}
    quantizer.set_usage(rowwise="rowwise" in ways, columnwise="columnwise" in ways)
    if isinstance(quantizer, NVFP4Quantizer):
        options: dict[str, Any] = {"row_scaled_nvfp4": quantizer.row_scaled_nvfp4, "nvfp4_use_4over6": quantizer.nvfp4_use_4over6}
        options |= {"nvfp4_e4m3_max": quantizer.nvfp4_e4m3_max, "fp4_dtype": quantizer.dtype, "with_gemm_swizzled_scales": swizzled}
        return NVFP4TensorStorage(**stored_buffers, quantizer=quantizer, fake_dtype=dtype, **options), values
    own = {"fp8_dtype": quantizer.dtype, "quantizer": quantizer, "fake_dtype": dtype}
    if isinstance(quantizer, MXFP8Quantizer):
        return MXFP8TensorStorage(**stored_buffers, **own, with_gemm_swizzled_scales=swizzled), values
    return Float8BlockwiseQTensorStorage(**stored_buffers, **own, is_2D_scaled=quantizer.block_scaling_dim == 2), values
