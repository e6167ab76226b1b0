"""Quantizers and quantized tensors as every backend sees them: their format and scaling, told by their attributes, and what they consist of.

Nothing here computes on a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from fusible.errors import ArgumentError, DTypeError, expected
from fusible.tex.protocol import fp8_format, to_torch

__all__ = [
    "Format",
    "Scaling",
    "a_buffer",
    "format_of",
    "is_quantized",
    "logical_shape",
    "nominal",
    "scaling",
    "transposed",
    "update_buffers",
    "usages",
]

Scaling = Literal["none", "delayed", "current", "block", "mxfp8", "nvfp4"]
Format = Literal["none", "float8", "block", "mxfp8", "nvfp4"]
_SCALING: dict[type, Scaling] = {type(None): "none"}


def scaling(quantizer: Any) -> Scaling:
    """How ``quantizer`` scales, told from its attributes, so that NVIDIA's classes answer like ours; ``"none"`` for None.

    Delayed scaling has ``scale`` and ``amax``; current scaling ``force_pow_2_scales`` and ``with_amax_reduction``; FP8 blocks (``"block"``)
    ``block_scaling_dim``; NVFP4 ``row_scaled_nvfp4``; MXFP8 ``with_2d_quantization`` and nothing of the former.
    """
    known = _SCALING.get(type(quantizer))
    return known if known is not None else _recognise(quantizer)


_QUANTIZER_MARKS: tuple[tuple[Scaling, tuple[str, ...]], ...] = (
    ("block", ("block_scaling_dim",)),
    ("nvfp4", ("row_scaled_nvfp4",)),
    ("mxfp8", ("with_2d_quantization",)),
    ("current", ("force_pow_2_scales", "with_amax_reduction")),
    ("delayed", ("scale", "amax")),
)


def _recognise(quantizer: Any) -> Scaling:
    found = _first_with_all(_QUANTIZER_MARKS, quantizer)
    if found is None:
        wanted = "delayed or current scaling, FP8 blocks, MXFP8 or NVFP4"
        raise DTypeError(expected(wanted, of="a quantizer", got=type(quantizer).__qualname__, do="use such a quantizer or another backend"))
    _SCALING[type(quantizer)] = found
    return found


def _first_with_all(marks: tuple[tuple[Any, tuple[str, ...]], ...], x: Any) -> Any:
    """The name of the first entry all of whose attributes ``x`` has, or None."""
    return next((name for name, attributes in marks if all(hasattr(x, attribute) for attribute in attributes)), None)


def usages(quantizer: Any) -> tuple[bool, bool]:
    """``(rowwise, columnwise)`` of a quantizer; one of the two must be asked for."""
    if not (quantizer.rowwise_usage or quantizer.columnwise_usage):
        raise ArgumentError(expected("rowwise or columnwise usage", of="a quantizer", got="neither", do="set one of the two usages"))
    return quantizer.rowwise_usage, quantizer.columnwise_usage


_FORMATS: dict[type, Format] = {torch.Tensor: "none", torch.nn.Parameter: "none"}
_TENSOR_MARKS: tuple[tuple[Format, tuple[str, ...]], ...] = (
    ("float8", ("_fp8_dtype", "_scale_inv", "_data")),
    ("block", ("_is_2D_scaled", "_rowwise_data", "_columnwise_data")),
    ("nvfp4", ("_fp4_dtype", "_rowwise_data", "_columnwise_data")),
    ("mxfp8", ("_with_gemm_swizzled_scales", "_fp8_dtype", "_rowwise_data", "_columnwise_data")),
)


def format_of(x: Any) -> Format:
    """The format of a quantized tensor or of its bare storage, told from its attributes; ``"none"`` for anything else.

    Per-tensor FP8 (``"float8"``) has ``_data``, ``_fp8_dtype`` and ``_scale_inv``; the block-scaled formats have ``_rowwise_data`` and
    ``_columnwise_data``, beside ``_is_2D_scaled`` (FP8 blocks), ``_fp4_dtype`` (NVFP4), or ``_fp8_dtype`` and ``_with_gemm_swizzled_scales``
    (MXFP8). A class answers once for all of its instances.
    """
    known = _FORMATS.get(type(x))
    if known is None:
        known = _FORMATS[type(x)] = _first_with_all(_TENSOR_MARKS, x) or "none"
    return known


def is_quantized(x: Any) -> bool:
    """Whether ``x`` is a quantized tensor of any format, or its bare storage."""
    return format_of(x) != "none"


def a_buffer(x: Any) -> Any:
    """A tensor that ``x`` consists of: itself, or a buffer where it is quantized; it lies where ``x`` does."""
    found = format_of(x)
    if found == "none":
        return x
    if found == "float8":
        return x._scale_inv
    if x._rowwise_data is None and x._columnwise_data is None:
        raise _without_data()
    return x._rowwise_data if x._rowwise_data is not None else x._columnwise_data


def _without_data() -> ArgumentError:
    return ArgumentError(expected("row-wise or column-wise data", of="a quantized tensor", got="neither", do="quantize it again"))


def transposed(x: Any) -> Any:
    """The transposed data of a per-tensor FP8 tensor, or None where it has none that is up to date."""
    return None if getattr(x, "_transpose_invalid", False) else getattr(x, "_transpose", None)


def nominal(x: Any) -> torch.dtype:
    """The dtype of a tensor, or the unquantized one that a quantized tensor stands for."""
    if not is_quantized(x):
        return x.dtype
    dtype = getattr(x, "_dtype", None)
    return torch.float32 if dtype is None else to_torch(dtype)


def update_buffers(output: Any, quantizer: Any, data: Any, transpose: Callable[[Any], Any], put: Callable[[Any, Any], Any]) -> None:
    """Write ``data`` into the buffers of a quantized tensor, each by ``buffer = put(buffer or None, new)``, and its transpose where that is due.

    Written are the buffers that the quantizer asks for, and those that the tensor has; but a transpose beside data that nobody asks for goes stale.
    """
    rowwise, columnwise = usages(quantizer)
    has_data, has_transpose = output._data is not None, output._transpose is not None
    if rowwise or has_data:
        output._data = put(output._data, data)
    if columnwise or (has_transpose and not has_data):
        output._transpose = put(output._transpose, transpose(data))
        output._transpose_invalid = False
    elif has_transpose:
        output._transpose_invalid = True
    output._fp8_dtype = fp8_format(quantizer.dtype)


def logical_shape(x: Any) -> tuple[int, ...]:
    """The shape of a tensor, or the one that a quantized tensor stands for, from whichever buffer it has."""
    found = format_of(x)
    if found == "none":
        return tuple(x.shape)
    rowwise, columnwise = (x._data, transposed(x)) if found == "float8" else (x._rowwise_data, x._columnwise_data)
    data = rowwise if rowwise is not None else columnwise
    if data is None:
        raise _without_data()
    shape = tuple(data.shape)
    if found == "nvfp4":
        shape = (*shape[:-1], 2 * shape[-1])
    return shape if rowwise is not None or found == "mxfp8" else (*shape[1:], shape[0])
