"""Host arrays: reading the data that a user passes, without a copy where that is safe.

An array is *safe* when it is C-contiguous and starts at a multiple of 64 bytes. Other arrays are copied, so that engines need not handle strides or
alignment.
"""

from __future__ import annotations

import ctypes
import math
import struct
from typing import Any

import numpy as np

from fusible.errors import ArgumentError, DTypeError, expected
from fusible.lazy.dtypes import BY_DLPACK, BY_NUMPY

__all__ = ["ALIGNMENT", "aligned", "export", "from_dlpack", "pointer", "read", "view"]

ALIGNMENT = 64

Array = np.ndarray[Any, Any]


class _Memory:
    """Foreign memory with numpy's array interface; ``owner`` keeps it alive."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, address: int, shape: tuple[int, ...], typestr: str, owner: object) -> None:
        self.owner = owner
        self.__array_interface__ = {"data": (address, False), "shape": shape, "typestr": typestr, "version": 3}


_NUMPY_CODES = (0, 1, 2, 6)
"""DLPack type codes that numpy has: signed and unsigned integers, floats, bool."""

_TYPESTR = {of: of.str if t.dlpack_code in _NUMPY_CODES else f"<u{of.itemsize}" for of, t in BY_NUMPY.items()}


def view(address: int, shape: tuple[int, ...], of: np.dtype[Any], owner: object) -> Array:
    """The contiguous array at ``address``, which keeps ``owner`` alive."""
    if not math.prod(shape):
        return np.empty(shape, of)
    array = np.asarray(_Memory(address, shape, _TYPESTR[of], owner))
    return array if array.dtype == of else array.view(of)


def pointer(array: Array) -> int:
    """The address of an array's first element."""
    return array.__array_interface__["data"][0]


def aligned(array: Array) -> Array:
    """A C-contiguous copy that starts at a multiple of 64 bytes."""
    raw = np.empty(array.nbytes + ALIGNMENT, np.uint8)
    start = -pointer(raw) % ALIGNMENT
    copy = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


_DLTENSOR = struct.Struct("=QiiiBBHQQQ")
"""DLPack's tensor: data, device type and index, rank, type code, bits and lanes, addresses of shape and strides, byte offset."""

_CODE_OFFSET = 20
"""The offset of the type code in it."""

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)

_HOST_KINDS = (1, 3)
"""DLPack device types whose memory the host reads: CPU, and CUDA's pinned host memory."""


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def _integers(address: int, count: int) -> tuple[int, ...]:
    return struct.unpack(f"={count}q", ctypes.string_at(address, 8 * count)) if count else ()


def from_dlpack(data: Any, strided: bool = True, name: str | None = None) -> Array:
    """The numpy array that shares the memory of a DLPack exporter on the host; a strided one is copied, or refused without ``strided``.

    ``name`` is what errors call it.

    numpy's own importer knows neither bfloat16 nor float8, so the capsule is read here. It is never marked as consumed: its destructor frees
    the exporter's memory when the array dies. Raises ``ArgumentError`` for memory that the host cannot read and ``DTypeError`` for an element
    type that has no lazy dtype.
    """
    of_what = name or f"a {type(data).__name__}"
    try:
        capsule = data.__dlpack__()
    except (RuntimeError, BufferError) as error:
        do = "detach it or copy it to the host first"
        raise ArgumentError(expected("an exporter that gives its memory", of=of_what, got=str(error), do=do)) from error
    record = ctypes.string_at(_capsule_pointer(capsule, b"dltensor"), _DLTENSOR.size)
    data_address, device_type, _, ndim, code, bits, lanes, shape_address, strides_address, offset = _DLTENSOR.unpack(record)
    if device_type not in _HOST_KINDS:
        raise ArgumentError(expected("host memory", of=of_what, got=f"DLPack device type {device_type}", do="move it to the CPU first"))
    of = BY_DLPACK.get((code, bits))
    if of is None or lanes != 1:
        got = f"DLPack type code {code} of {bits} bits"
        raise DTypeError(expected("an element type with a lazy dtype", of=of_what, got=got, do="convert it first"))
    address = data_address + offset
    shape = _integers(shape_address, ndim)
    strides = _integers(strides_address, ndim) if ndim and strides_address else None
    if strides is None or 0 in shape or _is_contiguous(shape, strides):
        return view(address, shape, of.numpy, capsule)
    if not strided:
        raise _not_contiguous(of_what, strides)
    return _strided(address, shape, strides, of.numpy, capsule)


def _not_contiguous(what: str, strides: object) -> ArgumentError:
    do = "make it contiguous first, which copies it"
    return ArgumentError(expected("contiguous memory", of=what, got=f"strides {strides}", do=do))


def _strided(address: int, shape: tuple[int, ...], strides: tuple[int, ...], of: np.dtype[Any], owner: object) -> Array:
    """A contiguous copy of strided foreign memory (strides count elements, and may be negative)."""
    low = sum(min(0, (n - 1) * s) for n, s in zip(shape, strides, strict=True))
    high = sum(max(0, (n - 1) * s) for n, s in zip(shape, strides, strict=True))
    flat = view(address + low * of.itemsize, (high - low + 1,), of, owner)
    steps = [s * of.itemsize for s in strides]
    return aligned(np.lib.stride_tricks.as_strided(flat[-low:], shape, steps))


def export(array: Array) -> Any:
    """A DLPack capsule that shares the memory of a writable array.

    numpy exports no bfloat16 and no float8: those go out as unsigned integers, whose type code is then corrected in the capsule.
    """
    of = BY_NUMPY[array.dtype]
    if of.bits < 8:
        raise DTypeError(expected("elements of whole bytes", of="a DLPack export", got=of, do="dequantize it, or cast it to int8 first"))
    if of.dlpack_code in _NUMPY_CODES:
        return array.__dlpack__()
    capsule = array.view(f"u{array.itemsize}").__dlpack__()
    ctypes.c_uint8.from_address(_capsule_pointer(capsule, b"dltensor") + _CODE_OFFSET).value = of.dlpack_code
    return capsule


def read(data: Any, of: np.dtype[Any] | None = None, strided: bool = True, name: str | None = None) -> Array:
    """The host array of numpy data or of a DLPack exporter: its own memory where that is contiguous, a copy otherwise.

    Without ``strided`` memory that is not contiguous is refused. ``name`` is what errors call the data.

    ``of`` is the dtype that the caller expects: where numpy has it, numpy's own importer is tried first, being faster.
    """
    if isinstance(data, np.ndarray):
        if data.dtype not in BY_NUMPY:
            got = str(data.dtype)
            raise DTypeError(expected("an element type with a lazy dtype", of=name or "a numpy array", got=got, do="convert it first"))
        if not data.flags.c_contiguous and not strided:
            raise _not_contiguous(name or "a numpy array", data.strides)
        return data if data.flags.c_contiguous else aligned(data)
    if not hasattr(data, "__dlpack__"):
        wanted, got = "a lazy tensor, a numpy array or an object with __dlpack__", type(data).__name__
        raise ArgumentError(expected(wanted, of=name or "tensor data", got=got, do="convert it first"))
    if of is not None and BY_NUMPY[of].dlpack_code in _NUMPY_CODES:
        try:
            array = np.from_dlpack(data)
        except (AttributeError, BufferError, RuntimeError, TypeError):
            return from_dlpack(data, strided, name)
        if array.dtype in BY_NUMPY and array.flags.c_contiguous:
            return array
    return from_dlpack(data, strided, name)
