"""The element types of lazy tensors, and their numpy, DLPack and StableHLO names."""

from __future__ import annotations

import builtins
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from fusible.errors import DTypeError, expected

__all__ = [
    "bfloat16",
    "bool",
    "dtype",
    "float16",
    "float32",
    "float64",
    "float8",
    "float8e5m2",
    "int32",
    "int64",
    "int8",
    "uint32",
    "uint64",
    "uint8",
]

DTYPES: dict[str, dtype] = {}
"""Every element type by its printed name."""

BY_NUMPY: dict[np.dtype[Any], dtype] = {}
"""The same by numpy dtype (with ``ml_dtypes`` for what numpy lacks)."""

BY_DLPACK: dict[tuple[int, int], dtype] = {}
"""The same by DLPack's (type code, bits)."""


@dataclass(frozen=True, eq=False)
class dtype:
    """One element type. ``repr`` is its name; ``numpy`` its numpy dtype; ``mlir`` its StableHLO spelling.

    ``kind`` is ``"float"``, ``"float8"``, ``"int"``, ``"uint"`` or ``"bool"``. ``float8`` (E4M3FN) and ``float8e5m2`` are storage
    types: they can be moved, cast, bitcast and multiplied as matrices, and take part in no other arithmetic.
    """

    name: str
    kind: str
    numpy: np.dtype[Any] = field(repr=False)
    mlir: str = field(repr=False)
    dlpack_code: int = field(repr=False)
    itemsize: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "itemsize", self.numpy.itemsize)
        DTYPES[self.name] = self
        BY_NUMPY[self.numpy] = self
        BY_DLPACK[(self.dlpack_code, 8 * self.itemsize)] = self

    def __repr__(self) -> str:
        return self.name

    __str__ = __repr__

    def __reduce__(self) -> tuple[Any, ...]:
        return DTYPES.__getitem__, (self.name,)

    @property
    def is_floating(self) -> builtins.bool:
        """Whether arithmetic on it is floating point (false for the float8 storage types)."""
        return self.kind == "float"

    @property
    def is_float8(self) -> builtins.bool:
        return self.kind == "float8"

    @property
    def is_integer(self) -> builtins.bool:
        return self.kind in ("int", "uint")

    @property
    def max(self) -> float | int:
        """The largest finite value."""
        if self.kind in ("int", "uint"):
            return int(np.iinfo(self.numpy).max)
        return 1 if self.kind == "bool" else float(ml_dtypes.finfo(self.numpy).max)

    @property
    def min(self) -> float | int:
        """The smallest finite value."""
        if self.kind in ("int", "uint"):
            return int(np.iinfo(self.numpy).min)
        return 0 if self.kind == "bool" else float(ml_dtypes.finfo(self.numpy).min)


def _np(of: Any) -> np.dtype[Any]:
    return np.dtype(of)


float32 = dtype("float32", "float", _np(np.float32), "f32", 2)
float16 = dtype("float16", "float", _np(np.float16), "f16", 2)
bfloat16 = dtype("bfloat16", "float", _np(ml_dtypes.bfloat16), "bf16", 4)
float64 = dtype("float64", "float", _np(np.float64), "f64", 2)
float8 = dtype("float8", "float8", _np(ml_dtypes.float8_e4m3fn), "f8E4M3FN", 10)
float8e5m2 = dtype("float8e5m2", "float8", _np(ml_dtypes.float8_e5m2), "f8E5M2", 12)
int8 = dtype("int8", "int", _np(np.int8), "i8", 0)
int32 = dtype("int32", "int", _np(np.int32), "i32", 0)
int64 = dtype("int64", "int", _np(np.int64), "i64", 0)
uint8 = dtype("uint8", "uint", _np(np.uint8), "ui8", 1)
uint32 = dtype("uint32", "uint", _np(np.uint32), "ui32", 1)
uint64 = dtype("uint64", "uint", _np(np.uint64), "ui64", 1)
bool = dtype("bool", "bool", _np(np.bool_), "i1", 6)

FLOATS = frozenset({float32, float16, bfloat16, float64})
INTEGERS = frozenset({int8, int32, int64, uint8, uint32, uint64})
FLOAT8S = frozenset({float8, float8e5m2})


def from_numpy(of: np.dtype[Any]) -> dtype:
    """The element type of a numpy dtype. Raises ``DTypeError`` for one that has none (int16, complex64, object)."""
    found = BY_NUMPY.get(of)
    if found is None:
        raise DTypeError(expected(f"one of {', '.join(DTYPES)}", of="the dtype of data for a tensor", got=str(of), do="convert the data first"))
    return found


def check_dtype(of: object) -> dtype:
    """``of`` itself when it is a ``dtype``; raises ``DTypeError`` else."""
    if isinstance(of, dtype):
        return of
    raise DTypeError(expected("a dtype of fusible.lazy", of="an argument named dtype", got=repr(of), do="pass for instance lazy.float32"))
