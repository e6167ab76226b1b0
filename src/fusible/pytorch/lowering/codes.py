"""The values of a quantized tensor in a graph: its codes and scales are constants, as they lie in memory wherever a graph can read them so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusible.errors import ArgumentError, expected
from fusible.pytorch.lowering.operators import dequantize, packed_dtype
from fusible.tex import DType
from fusible.tex.formats import FLOAT8, FLOAT8_BLOCKS, MXFP8, NVFP4, BlockFormat, Format, format_of

__all__ = ["Constants", "FP8", "constants_of", "values_of"]

FP8 = {DType.kFloat8E4M3: torch.float8_e4m3fn, DType.kFloat8E5M2: torch.float8_e5m2}
"""The 8-bit floats as torch has them."""

Constants = dict[str, Any]
"""``codes``, ``scale``, ``block``: of ``dequantize``. Scales of bf16 and E4M3 are made fp32 in the graph; those with a ``tensor_scale`` by that."""


def constants_of(x: Any) -> Constants:
    """The constants of a quantized tensor's row-wise copy. Raises ``ArgumentError`` for one of a custom quantizer, and one without that copy."""
    found = _CONSTANTS.get(format_of(x))
    if found is None or not x.get_usages()["rowwise"]:
        got, do = f"a {type(x).__name__}", "hold its weights by fusible.quantize_parameters"
        raise ArgumentError(expected("weights in FP8, FP8 blocks, MXFP8 or NVFP4", of="a model to export", got=got, do=do))
    return found(x)


def values_of(constants: Constants) -> torch.Tensor:
    """The fp32 values, in a graph."""
    scale, whole = constants["scale"], constants.get("tensor_scale")
    return dequantize(constants["codes"], dequantize(scale, whole) if whole is not None else scale.float(), constants["block"])


def _float8(x: Any) -> Constants:
    return {"codes": x._data.view(FP8[x._fp8_dtype]), "scale": x._scale_inv.reshape(()), "block": 0}


def _scales(x: Any) -> torch.Tensor:
    """The row-wise scales without what pads them, by lines and blocks."""
    form = format_of(x)
    assert isinstance(form, BlockFormat)
    if form.is_swizzled(x):
        do = "quantize without optimize_for_gemm"
        raise ArgumentError(expected("scales in the order of their blocks", of="a model to export", got="the order of products", do=do))
    lines, blocks = form.used_scales(tuple(x.shape), False, form.has_tile_scales(x))
    scales = x._rowwise_scale_inv
    return scales if tuple(scales.shape) == (lines, blocks) else scales[:lines, :blocks].clone(memory_format=torch.contiguous_format)


def _mxfp8(x: Any) -> Constants:
    """Scales as bf16, which has every power of two of E8M0, and which every runtime reads."""
    scale = _scales(x).view(torch.float8_e8m0fnu).to(torch.bfloat16)
    return {"codes": x._rowwise_data.view(FP8[x._fp8_dtype]), "scale": scale, "block": MXFP8.length}


def _float8_blocks(x: Any) -> Constants:
    """A tile's scale is repeated for each of its lines: a graph has blocks of one line."""
    scale, length = _scales(x), FLOAT8_BLOCKS.length
    scale = scale.repeat_interleave(length, 0)[: x.shape[0]] if FLOAT8_BLOCKS.has_tile_scales(x) else scale.t()
    return {"codes": x._rowwise_data.view(FP8[x._fp8_dtype]), "scale": scale.contiguous(), "block": length}


def _nvfp4(x: Any) -> Constants:
    amax = x._amax_rowwise
    if amax.numel() != 1:
        got, do = "one for each row", "hold its weights by fusible.quantize_parameters"
        raise ArgumentError(expected("one amax for a tensor of NVFP4", of="a model to export", got=got, do=do))
    bound = x._nvfp4_e4m3_max if x._nvfp4_use_4over6 else torch.finfo(torch.float8_e4m3fn).max
    scale = _scales(x).view(torch.float8_e4m3fn)
    whole = amax.reshape(()) / (_LARGEST_E2M1 * bound)
    return {"codes": x._rowwise_data.view(packed_dtype()), "scale": scale, "tensor_scale": whole, "block": NVFP4.length}


_LARGEST_E2M1 = 6.0

_CONSTANTS: dict[Format, Callable[[Any], Constants]] = {FLOAT8: _float8, FLOAT8_BLOCKS: _float8_blocks, MXFP8: _mxfp8, NVFP4: _nvfp4}
