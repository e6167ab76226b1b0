"""The element types of lazy tensors, and their numpy, DLPack and StableHLO names."""

from __future__ import annotations

import builtins
import functools
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
    "floating",
    "int16",
    "int32",
    "int4",
    "int64",
    "int8",
    "integer",
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


class dtype(type):
    """An element type: a class that is never instantiated, so that ``issubclass(tensor.dtype, floating)`` asks for a kind.

    ``repr`` is its ``name``; ``numpy`` its numpy dtype; ``mlir`` its StableHLO spelling; ``itemsize`` in bytes (0.5 for int4). ``kind`` is
    ``"float"``, ``"float8"``, ``"int"``, ``"uint"`` or ``"bool"``. ``float8`` (E4M3FN) and ``float8e5m2`` are storage types: they can be moved,
    cast, bitcast, compared, quantized to and multiplied as matrices, and little else; so is int4, which is not multiplied either.
    """

    name: str
    kind: str
    numpy: np.dtype[Any]
    mlir: str
    dlpack_code: int
    itemsize: float

    def __repr__(cls) -> str:
        return cls.__name__

    def __str__(cls) -> str:
        return cls.__name__

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise DTypeError(expected("no call", of=f"the dtype {cls}", got="one", do=f"use cast(tensor, {cls}) or Tensor(data, dtype={cls})"))

    @property
    def bits(cls) -> int:
        """Bits of an element as it is counted, 4 of int4."""
        return int(8 * cls.itemsize)

    @property
    def is_floating(cls) -> builtins.bool:
        """Whether arithmetic on it is floating point (false for the float8 storage types)."""
        return cls.kind == "float"

    @property
    def is_float8(cls) -> builtins.bool:
        return cls.kind == "float8"

    @property
    def is_integer(cls) -> builtins.bool:
        return cls.kind in ("int", "uint")

    @property
    def max(cls) -> float | int:
        """The largest finite value."""
        return _extreme(cls, "max", 1)

    @property
    def min(cls) -> float | int:
        """The smallest finite value."""
        return _extreme(cls, "min", 0)


@functools.cache
def _extreme(of: dtype, which: str, boolean: int) -> float | int:
    if of.is_integer:
        return int(getattr(ml_dtypes.iinfo(of.numpy), which))
    return boolean if of.kind == "bool" else float(getattr(ml_dtypes.finfo(of.numpy), which))


class floating(metaclass=dtype):
    """The element types with a fraction."""


class integer(metaclass=dtype):
    """The element types of whole numbers."""


_KINDS = {"float": "floating point", "float8": "floating point, for storage", "int": "integer", "uint": "unsigned integer", "bool": "truth value"}


def _make(name: str, kind: str, of: Any, mlir: str, dlpack_code: int, bits: int | None = None) -> dtype:
    bases = {"float": (floating,), "float8": (floating,), "int": (integer,), "uint": (integer,)}.get(kind, ())
    doc = f"{bits or 8 * np.dtype(of).itemsize}-bit {_KINDS[kind]}."
    made = dtype(name, bases, {"__module__": __name__, "__slots__": (), "__doc__": doc})
    made.name, made.kind, made.numpy, made.mlir, made.dlpack_code = name, kind, np.dtype(of), mlir, dlpack_code
    made.itemsize = made.numpy.itemsize if bits is None else bits / 8
    DTYPES[name] = made
    BY_NUMPY[made.numpy] = made
    if bits is None:
        BY_DLPACK[dlpack_code, made.bits] = made
    return made


float32 = _make("float32", "float", np.float32, "f32", 2)
float16 = _make("float16", "float", np.float16, "f16", 2)
bfloat16 = _make("bfloat16", "float", ml_dtypes.bfloat16, "bf16", 4)
float64 = _make("float64", "float", np.float64, "f64", 2)
float8 = _make("float8", "float8", ml_dtypes.float8_e4m3fn, "f8E4M3FN", 10)
float8e5m2 = _make("float8e5m2", "float8", ml_dtypes.float8_e5m2, "f8E5M2", 12)
int4 = _make("int4", "int", ml_dtypes.int4, "i4", 0, bits=4)
int8 = _make("int8", "int", np.int8, "i8", 0)
int16 = _make("int16", "int", np.int16, "i16", 0)
int32 = _make("int32", "int", np.int32, "i32", 0)
int64 = _make("int64", "int", np.int64, "i64", 0)
uint8 = _make("uint8", "uint", np.uint8, "ui8", 1)
uint32 = _make("uint32", "uint", np.uint32, "ui32", 1)
uint64 = _make("uint64", "uint", np.uint64, "ui64", 1)
bool = _make("bool", "bool", np.bool_, "i1", 6)

FLOATS = frozenset({float32, float16, bfloat16, float64})
SIGNED = frozenset({int8, int16, int32, int64})
UNSIGNED = frozenset({uint8, uint32, uint64})
INTEGERS = SIGNED | UNSIGNED
FLOAT8S = frozenset({float8, float8e5m2})
NUMBERS = FLOATS | INTEGERS
"""The dtypes that arithmetic takes."""
COMPUTED = NUMBERS | {bool}
"""The dtypes that most functions take: numbers and bools."""
ALL = frozenset(DTYPES.values())
"""The dtypes that can be moved and cast: all, the storage types included."""


def from_numpy(of: np.dtype[Any]) -> dtype:
    """The element type of a numpy dtype. Raises ``DTypeError`` for one that has none (uint16, complex64, object)."""
    found = BY_NUMPY.get(of)
    if found is None:
        raise DTypeError(expected(f"one of {', '.join(DTYPES)}", of="the dtype of data for a tensor", got=str(of), do="convert the data first"))
    return found


def check_dtype(of: object) -> dtype:
    """``of`` itself when it is an element type; raises ``DTypeError`` else."""
    if isinstance(of, dtype) and of.__name__ in DTYPES:
        return of
    raise DTypeError(expected("a dtype of fusible.lazy", of="an argument named dtype", got=repr(of), do="pass for instance lazy.float32"))
