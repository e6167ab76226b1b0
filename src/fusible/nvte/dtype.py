"""Element types and the richer types that a tensor can be asked for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

from fusible.errors import DTypeError, expected

__all__ = ["DType", "QuantizedType", "Type", "bit_width", "dtype_name", "element", "is_fp8", "is_quantized_type"]


class DType(IntEnum):
    """Element types, numbered as in NVIDIA's C++ interface, so that tex takes them as they are."""

    Byte = 0
    Int32 = 2
    Int64 = 3
    Float32 = 4
    Float16 = 5
    BFloat16 = 6
    Float8E4M3 = 7
    Float8E5M2 = 8

    def __str__(self) -> str:
        return _NAMES[self]


_NAMES = {
    DType.Byte: "byte",
    DType.Int32: "int32",
    DType.Int64: "int64",
    DType.Float32: "fp32",
    DType.Float16: "fp16",
    DType.BFloat16: "bf16",
    DType.Float8E4M3: "e4m3",
    DType.Float8E5M2: "e5m2",
}
_BITS = {DType.Int32: 32, DType.Int64: 64, DType.Float32: 32, DType.Float16: 16, DType.BFloat16: 16}
_FP8 = frozenset({DType.Float8E4M3, DType.Float8E5M2})


@dataclass(frozen=True)
class QuantizedType:
    """An 8-bit element type together with how it is scaled.

    ``scaling`` is ``"delayed"`` (by the scale that the running pass holds under the name ``slot``) or ``"current"`` (by the tensor's own amax).
    """

    dtype: DType
    scaling: str
    slot: str = ""
    power_2_scale: bool = False
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        if self.dtype not in _FP8:
            raise DTypeError(expected("an 8-bit element type", of="a QuantizedType", got=str(self.dtype), do="use Float8E4M3 or Float8E5M2"))
        if self.scaling not in ("delayed", "current") or (self.scaling == "delayed") != bool(self.slot):
            raise DTypeError(
                expected(
                    "'delayed' with a slot, or 'current' without",
                    of="a QuantizedType's scaling",
                    got=f"{self.scaling!r} with slot {self.slot!r}",
                    do="give one of the two",
                )
            )

    def __str__(self) -> str:
        return f"{self.dtype}[{self.slot or self.scaling}]"


Type: TypeAlias = DType | QuantizedType
"""What a tensor can be asked for: an element type, or one with its scaling. A bare 8-bit ``DType`` asks for current scaling."""


def element(type: Type) -> DType:
    """The element type of a type."""
    return type.dtype if isinstance(type, QuantizedType) else type


def is_quantized_type(type: Type) -> bool:
    """Whether tensors of ``type`` are 8-bit floating point with a scale."""
    return type.__class__ is QuantizedType or type in _FP8


def is_fp8(of: object) -> bool:
    """Whether a type, or a tensor with a ``dtype``, is 8-bit floating point."""
    return element(getattr(of, "dtype", of)) in _FP8  # type: ignore[arg-type]


def bit_width(dtype: DType) -> int:
    """Bits per element."""
    return _BITS.get(dtype, 8)


def dtype_name(dtype: DType) -> str:
    """The name of an element type: ``"BFloat16"``."""
    return dtype.name
