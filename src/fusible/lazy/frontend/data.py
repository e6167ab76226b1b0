"""From what a user has to a stored value: numbers, lists, numpy arrays and exporters of DLPack."""

from __future__ import annotations

from typing import Any

import numpy as np

from fusible.errors import ArgumentError, expected
from fusible.lazy import dtypes
from fusible.lazy.device import DEFAULT, device
from fusible.lazy.dtypes import dtype
from fusible.lazy.engine.host import Array, aligned, from_dlpack, pointer
from fusible.lazy.source import user_line
from fusible.lazy.trace import Storage, TraceTensor

__all__ = ["host_array", "stored"]


def stored(array: Array, place: device = DEFAULT, name: str | None = None) -> TraceTensor:
    """A stored value: ``array`` itself, which is contiguous and aligned."""
    return Storage(array.shape, dtypes.from_numpy(array.dtype), array).output(place, user_line(), name)


_PYTHON = {"f": dtypes.float32, "i": dtypes.int32, "b": dtypes.bool}


def host_array(data: Any, of: dtype | None) -> Array:
    """The contiguous, aligned host array of ``data``, converted to ``of`` where that is given."""
    if of is not None:
        dtypes.check_dtype(of)
    if isinstance(data, np.ndarray | np.generic):
        array = np.asarray(data)
        dtypes.from_numpy(array.dtype)
        return aligned(array if of is None else array.astype(of.numpy))
    if hasattr(data, "__dlpack__"):
        array = from_dlpack(data)
        if of is not None and array.dtype != of.numpy:
            return aligned(array.astype(of.numpy))
        return aligned(array) if pointer(array) % 64 else array
    try:
        array = np.array(data)
    except ValueError as error:
        raise ArgumentError(expected("equal lengths", of="nested lists", got=str(error).split(".")[0], do="pad or split the data")) from error
    kind = _PYTHON.get(array.dtype.kind)
    if kind is None:
        wanted = "numbers, lists of numbers, a numpy array or an object with __dlpack__"
        raise ArgumentError(expected(wanted, of="tensor data", got=type(data).__name__, do="convert it"))
    target = of or kind
    if array.dtype.kind == "i" and target.is_integer and array.size and not target.min <= array.min() <= array.max() <= target.max:
        raise ArgumentError(expected(f"integers that fit {target}", of="tensor data", got=f"a value up to {array.max()}", do="pass a wider dtype"))
    with np.errstate(over="ignore"):
        return aligned(array.astype(target.numpy))
