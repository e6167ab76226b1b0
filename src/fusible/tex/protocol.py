"""What every backend agrees on about the operands of tex: attributes of quantizers and quantized tensors, types, shapes, and their checks.

Nothing here computes on a tensor, so that backends of real and of lazy tensors share it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from fusible.errors import ArgumentError, DTypeError, ShapeError, expected
from fusible.tex.enums import DType

__all__ = [
    "FLOAT64",
    "FLT_MAX",
    "FP8_MAX",
    "Format",
    "INT64",
    "Scaling",
    "a_buffer",
    "accumulator",
    "check_amax_buffer",
    "check_bytes",
    "check_same_device",
    "check_shape",
    "format_of",
    "fp8_format",
    "is_quantized",
    "logical_shape",
    "nominal",
    "outer",
    "register_dtypes",
    "scaling",
    "to_dtype",
    "to_torch",
    "transposed_shape",
    "update_buffers",
    "usages",
]

Scaling = Literal["none", "delayed", "current", "block", "mxfp8", "nvfp4"]
Format = Literal["none", "float8", "block", "mxfp8", "nvfp4"]

FLT_MAX = 3.4028234663852886e38
"""The largest fp32, and so the largest scale."""

FP8_MAX: dict[int, float] = {DType.kFloat8E4M3: 448.0, DType.kFloat8E5M2: 57344.0}
"""The largest finite value of each FP8 format: an amax is scaled to it."""

INT16 = 1
INT64 = 3
"""Values that the C++ enumeration has and the exported ``DType`` lacks."""
FLOAT64 = 64
"""The value of float64, of which NVIDIA's enumerations know nothing: no future member of theirs comes near it."""

_TO_TORCH: dict[int, torch.dtype] = {
    DType.kByte: torch.uint8,
    INT16: torch.int16,
    DType.kInt32: torch.int32,
    INT64: torch.int64,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat8E4M3: torch.float8_e4m3fn,
    DType.kFloat8E5M2: torch.float8_e5m2,
    FLOAT64: torch.float64,
}
_FROM_TORCH: dict[torch.dtype, int] = {dtype: value for value, dtype in _TO_TORCH.items() if value != FLOAT64}


_OF_FRAMEWORKS: dict[Any, torch.dtype] = {}


def register_dtypes(dtypes: Mapping[Any, torch.dtype]) -> None:
    """Let ``to_torch`` take the dtypes of another framework."""
    if not isinstance(dtypes, Mapping) or not all(isinstance(dtype, torch.dtype) for dtype in dtypes.values()):
        got = type(dtypes).__name__ if not isinstance(dtypes, Mapping) else "others among its values"
        raise DTypeError(expected("a mapping to torch.dtype", of="dtypes of register_dtypes", got=got, do="say of each which of torch's it is"))
    _OF_FRAMEWORKS.update(dtypes)


def to_torch(dtype: Any) -> torch.dtype:
    """The torch dtype of a ``torch.dtype``, another framework's own, a ``DType`` (NVIDIA's or ours) or its integer value."""
    if type(dtype) is torch.dtype:
        return dtype
    if type(dtype) is DType and (found := _TO_TORCH.get(dtype)) is not None:
        return found
    try:
        if dtype in _OF_FRAMEWORKS:
            return _OF_FRAMEWORKS[dtype]
        if type(dtype) is not bool:
            return _TO_TORCH[operator.index(dtype)]
    except (KeyError, TypeError, ValueError):
        pass
    raise DTypeError(expected("a torch.dtype, a tex.DType or its value", of="a dtype", got=repr(dtype), do="pass one of those"))


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype that a function of operands of ``dtype`` computes and keeps statistics in: fp32, and fp64 for fp64."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def to_dtype(dtype: Any) -> DType | int:
    """The ``DType`` of a ``torch.dtype``, a ``DType`` or an integer; an integer for the types that ``DType`` lacks (int64: 3, int16: 1)."""
    value = _FROM_TORCH.get(dtype) if type(dtype) is torch.dtype else int(dtype)
    if value is None or (value not in _TO_TORCH and value != DType.kFloat4E2M1):
        raise DTypeError(expected("a type that tex has", of="a dtype", got=repr(dtype), do="cast to float32, bfloat16 or float16"))
    return value if value in (INT16, INT64) else DType(value)


def fp8_format(dtype: Any) -> DType:
    """``dtype`` as the FP8 format that it must be."""
    value = to_dtype(dtype)
    if value not in FP8_MAX:
        raise DTypeError(expected("kFloat8E4M3 or kFloat8E5M2", of="an FP8 format", got=repr(dtype), do="pass one of the two"))
    return DType(value)


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


def transposed_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """``[*leading, last] -> [last, *leading]``: the shape of transposed data."""
    return (*shape[-1:], *shape[:-1])


def outer(shape: Sequence[int]) -> int:
    """The product of all dimensions but the last: the rows of the matrix that ``shape`` flattens to."""
    return math.prod(shape[:-1])


def check_shape(x: Any, shape: Sequence[int], of: str) -> None:
    """Raise ``ShapeError`` unless ``x`` has exactly ``shape``."""
    if tuple(x.shape) != tuple(shape):
        raise ShapeError(expected(f"shape {list(shape)}", of=of, got=list(x.shape), do="pass a tensor of that shape"))


def check_same_device(x: Any, like: Any, of: str) -> None:
    """Raise ``ArgumentError`` unless ``x`` lives on the device of ``like``."""
    if x.device != like.device:
        raise ArgumentError(expected(f"a tensor on {like.device}", of=of, got=f"one on {x.device}", do="move it there"))


def check_bytes(x: Any, of: str) -> None:
    """Raise ``DTypeError`` unless the elements of ``x`` are bytes."""
    if x.dtype.itemsize != 1:
        raise DTypeError(expected("uint8 data", of=of, got=x.dtype, do="pass the data of a quantized tensor"))


def check_amax_buffer(amax: Any, of: str, fp32: Any = torch.float32) -> None:
    """Raise ``DTypeError`` unless ``amax`` is one fp32 number; ``fp32`` is the backend's value of that type."""
    if math.prod(amax.shape) != 1 or amax.dtype is not fp32:
        raise DTypeError(expected("fp32 [1]", of=of, got=f"{amax.dtype} {list(amax.shape)}", do="pass such a tensor"))
