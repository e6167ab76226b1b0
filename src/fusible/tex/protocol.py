"""What every backend agrees on about the operands of tex: attributes of quantizers and quantized tensors, types, shapes, and their checks.

Nothing here computes on a tensor, so that backends of real and of lazy tensors share it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from fusible.errors import ArgumentError, DTypeError, ShapeError, expected
from fusible.tex.enums import DType

__all__ = [
    "FLT_MAX",
    "FP8_MAX",
    "GemmShape",
    "INT64",
    "Scaling",
    "check_amax_buffer",
    "check_beta",
    "check_bytes",
    "check_same_device",
    "check_shape",
    "fp8_format",
    "gemm_shape",
    "is_quantized",
    "logical_shape",
    "outer",
    "scaling",
    "to_dtype",
    "to_torch",
    "transposed_shape",
    "usages",
]

Scaling = Literal["none", "delayed", "current"]

FLT_MAX = 3.4028234663852886e38
"""The largest fp32, and so the largest scale."""

FP8_MAX: dict[int, float] = {DType.kFloat8E4M3: 448.0, DType.kFloat8E5M2: 57344.0}
"""The largest finite value of each FP8 format: an amax is scaled to it."""

INT16 = 1
INT64 = 3
"""Values that the C++ enumeration has and the exported ``DType`` lacks."""

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
}
_FROM_TORCH: dict[torch.dtype, int] = {dtype: value for value, dtype in _TO_TORCH.items()}


def to_torch(dtype: Any) -> torch.dtype:
    """The torch dtype of a ``torch.dtype``, a ``DType`` (NVIDIA's or ours) or its integer value."""
    if type(dtype) is torch.dtype:
        return dtype
    try:
        return _TO_TORCH[int(dtype)]
    except (KeyError, TypeError, ValueError):
        raise DTypeError(expected("a torch.dtype, a tex.DType or its value", of="a tex call", got=repr(dtype), do="pass one of those")) from None


def to_dtype(dtype: Any) -> DType | int:
    """The ``DType`` of a ``torch.dtype``, a ``DType`` or an integer; an integer for the types that ``DType`` lacks (int64: 3, int16: 1)."""
    value = _FROM_TORCH.get(dtype) if type(dtype) is torch.dtype else int(dtype)
    if value is None or (value not in _TO_TORCH and value != DType.kFloat4E2M1):
        raise DTypeError(expected("a type that tex has", of="a tex call", got=repr(dtype), do="cast to float32, bfloat16 or float16"))
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

    Delayed scaling has ``scale`` and ``amax``; current scaling has ``force_pow_2_scales`` and ``with_amax_reduction``.
    """
    known = _SCALING.get(type(quantizer))
    return known if known is not None else _recognise(quantizer)


def _recognise(quantizer: Any) -> Scaling:
    if hasattr(quantizer, "force_pow_2_scales") and hasattr(quantizer, "with_amax_reduction"):
        found: Scaling = "current"
    elif hasattr(quantizer, "scale") and hasattr(quantizer, "amax"):
        found = "delayed"
    else:
        raise DTypeError(
            expected("delayed or current scaling", of="a quantizer", got=type(quantizer).__qualname__, do="use a Float8 quantizer or another backend")
        )
    _SCALING[type(quantizer)] = found
    return found


def usages(quantizer: Any) -> tuple[bool, bool]:
    """``(rowwise, columnwise)`` of a quantizer; one of the two must be asked for."""
    if not (quantizer.rowwise_usage or quantizer.columnwise_usage):
        raise ArgumentError(expected("rowwise or columnwise usage", of="a quantizer", got="neither", do="set one of the two usages"))
    return quantizer.rowwise_usage, quantizer.columnwise_usage


def is_quantized(x: Any) -> bool:
    """Whether ``x`` is a per-tensor FP8 tensor or its bare storage: it has ``_data``, ``_fp8_dtype`` and ``_scale_inv``."""
    return type(x) is not torch.Tensor and hasattr(x, "_fp8_dtype") and hasattr(x, "_scale_inv") and hasattr(x, "_data")


def transposed(x: Any) -> Any:
    """The transposed data of a per-tensor FP8 tensor, or None where it has none that is up to date."""
    return None if getattr(x, "_transpose_invalid", False) else getattr(x, "_transpose", None)


def logical_shape(x: Any) -> tuple[int, ...]:
    """The shape of a tensor, or the one that a per-tensor FP8 tensor stands for, from whichever buffer it has."""
    if not is_quantized(x):
        return tuple(x.shape)
    if x._data is not None:
        return tuple(x._data.shape)
    data = transposed(x)
    if data is None:
        raise ArgumentError(expected("data or transposed data", of="a quantized tensor", got="neither", do="quantize it again"))
    return tuple(data.shape[1:]) + (data.shape[0],)


def transposed_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """``[*leading, last] -> [last, *leading]``: the shape of transposed data."""
    return (*shape[-1:], *shape[:-1])


def outer(shape: Sequence[int]) -> int:
    """The product of all dimensions but the last: the rows of the matrix that ``shape`` flattens to."""
    return math.prod(shape[:-1])


@dataclass(frozen=True)
class GemmShape:
    """``op(B) [rows, depth] @ op(A) [depth, columns]``, whose result is shown as ``output``."""

    rows: int
    columns: int
    depth: int
    output: tuple[int, ...]

    @property
    def empty(self) -> bool:
        """Whether an operand has no elements."""
        return not (self.rows and self.columns and self.depth)


def gemm_shape(a: Sequence[int], trans_a: bool, b: Sequence[int], trans_b: bool) -> GemmShape:
    """The shape rules of ``generic_gemm``; raises ``ShapeError`` where the contracted dimensions differ."""
    if len(a) < 1 or len(b) < 1:
        raise ShapeError(expected("at least one dimension", of="A and B of generic_gemm", got=f"{list(a)} and {list(b)}", do="pass matrices"))
    a0, a1, b0, b1 = outer(a), a[-1], outer(b), b[-1]
    depth_a, columns = (a1, a0) if trans_a else (a0, a1)
    rows, depth = (b1, b0) if trans_b else (b0, b1)
    if depth_a != depth:
        layout = f"{'T' if trans_a else 'N'}{'T' if trans_b else 'N'}"
        raise ShapeError(
            expected(
                f"equal contracted dimensions in layout {layout}",
                of="A and B of generic_gemm, where D = op(B) @ op(A)",
                got=f"{depth_a} of A {list(a)} and {depth} of B {list(b)}",
                do="exchange A and B, or change a transpose flag",
            )
        )
    return GemmShape(rows, columns, depth, (b1, columns) if trans_b else (*b[:-1], columns))


def check_beta(accumulate: bool, beta: float | None, has_output: bool) -> float:
    """The factor of D in ``generic_gemm``; raises ``ArgumentError`` for a combination that means nothing."""
    if not accumulate:
        if beta:
            raise ArgumentError(expected("beta 0 or None without accumulate", of="generic_gemm", got=beta, do="pass accumulate=True"))
        return 0.0
    if not has_output:
        raise ArgumentError(expected("a given D", of="an accumulating generic_gemm", got="None", do="pass D, or accumulate=False"))
    return 1.0 if beta is None else float(beta)


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
    if x.element_size() != 1:
        raise DTypeError(expected("uint8 data", of=of, got=x.dtype, do="pass the data of a quantized tensor"))


def check_amax_buffer(amax: Any, of: str) -> None:
    """Raise ``DTypeError`` unless ``amax`` is one fp32 number."""
    if amax.numel() != 1 or amax.dtype is not torch.float32:
        raise DTypeError(expected("fp32 [1]", of=of, got=f"{amax.dtype} {list(amax.shape)}", do="pass such a tensor"))
