"""What every backend agrees on about the operands of tex: element types, shapes, and their checks. ``fusible.tex.formats`` tells of quantized ones.

Nothing here computes on a tensor, so that backends of real and of lazy tensors share it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from fusible.errors import ArgumentError, DTypeError, ShapeError, ValuesError, expected
from fusible.tex.enums import DType

__all__ = [
    "FLOAT64",
    "FLT_MAX",
    "FP8_MAX",
    "INT64",
    "PlannedGroup",
    "QuantizerLike",
    "TensorLike",
    "accumulator",
    "check_amax_buffer",
    "check_bytes",
    "check_given_output",
    "check_no_part",
    "check_same_device",
    "check_shape",
    "fp8_format",
    "outer",
    "process_group",
    "register_dtypes",
    "to_dtype",
    "to_torch",
    "transposed_shape",
]


class PlannedGroup(NamedTuple):
    """A group of ``size`` processes that nobody has started: of tensors on the device ``meta`` a collective gives the shape of what would come."""

    size: int


def process_group(group: Any) -> Any:
    """A group of processes as ``torch.distributed`` takes it, from one or its name. Models name their groups: a name can be copied, and saved.

    Raises ``ArgumentError`` where no group has that name.
    """
    if not isinstance(group, str):
        return group
    try:
        return torch.distributed.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]  # pyright: ignore
    except RuntimeError:
        wanted, do = "the name of a group of this process", "make it by torch.distributed first, as the process that made the model did"
        raise ArgumentError(expected(wanted, of="a group of processes", got=repr(group), do=do)) from None


class TensorLike(Protocol):
    """A plain tensor, one of torch's or a lazy one: what checks of arguments and shape rules read of it."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def ndim(self) -> int: ...

    @property
    def dtype(self) -> Any:
        """Of the tensor's own framework."""

    @property
    def device(self) -> Any:
        """Of the tensor's own framework."""


class QuantizerLike(Protocol):
    """What every quantizer has, ours or NVIDIA's. Everything else depends on its format (``tex.formats.scheme_of``)."""

    rowwise_usage: bool
    columnwise_usage: bool
    internal: bool
    """Whether it makes bare storages instead of torch tensors."""
    optimize_for_gemm: bool
    """Whether it stores scales in the order that NVIDIA's products read."""


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
    if type(dtype) is DType and dtype in FP8_MAX:
        return dtype
    value = to_dtype(dtype)
    if value not in FP8_MAX:
        raise DTypeError(expected("kFloat8E4M3 or kFloat8E5M2", of="an FP8 format", got=repr(dtype), do="pass one of the two"))
    return DType(value)


def transposed_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """``[*leading, last] -> [last, *leading]``: the shape of transposed data."""
    return (*shape[-1:], *shape[:-1])


def outer(shape: Sequence[int]) -> int:
    """The product of all dimensions but the last: the rows of the matrix that ``shape`` flattens to."""
    return math.prod(shape[:-1])


def check_shape(x: TensorLike, shape: Sequence[int], of: str) -> None:
    """Raise ``ShapeError`` unless ``x`` has exactly ``shape``."""
    if tuple(x.shape) != tuple(shape):
        raise ShapeError(expected(f"shape {list(shape)}", of=of, got=list(x.shape), do="pass a tensor of that shape"))


def check_given_output(out: TensorLike, result: TensorLike, dtype: object) -> None:
    """Raise ``ShapeError`` or ``DTypeError`` unless ``out`` has the shape of ``result``, and ``dtype``."""
    if out.shape != result.shape:
        raise ShapeError(expected(f"shape {list(result.shape)}", of="the given output", got=list(out.shape), do="pass a tensor of that shape"))
    if out.dtype is not dtype:
        raise DTypeError(expected(f"{dtype}", of="the given output", got=out.dtype, do="pass a tensor of that dtype"))


def check_no_part(output: Any, of: str) -> None:
    """Raise ``ValuesError`` where ``output``, which a call writes values and scales to, is a part of a quantized tensor. Its scale is that of the
    whole tensor, whose other values a new one would change; or it is a copy, and the tensor would not see what is written."""
    if getattr(output, "_part", None) is not None:
        got, do = f"a part of a {type(output).__name__}", "assign by an index of the tensor itself, w[0:2] = values"
        raise ValuesError(expected("a tensor that holds its scales itself", of=of, got=got, do=do))


def check_same_device(x: TensorLike, like: TensorLike, of: str) -> None:
    """Raise ``ArgumentError`` unless ``x`` lives on the device of ``like``."""
    if x.device != like.device:
        raise ArgumentError(expected(f"a tensor on {like.device}", of=of, got=f"one on {x.device}", do="move it there"))


def check_bytes(x: TensorLike, of: str) -> None:
    """Raise ``DTypeError`` unless the elements of ``x`` are bytes."""
    if x.dtype.itemsize != 1:
        raise DTypeError(expected("uint8 data", of=of, got=x.dtype, do="pass the data of a quantized tensor"))


def check_amax_buffer(amax: TensorLike, of: str, fp32: object = torch.float32) -> None:
    """Raise ``DTypeError`` unless ``amax`` is one fp32 number; ``fp32`` is the backend's value of that type."""
    if math.prod(amax.shape) != 1 or amax.dtype is not fp32:
        raise DTypeError(expected("fp32 [1]", of=of, got=f"{amax.dtype} {list(amax.shape)}", do="pass such a tensor"))
