"""The results of ``Executable.run``."""

from __future__ import annotations

from typing import Any

import numpy as np

from fusible.lazy.dtypes import BY_NUMPY, dtype
from fusible.lazy.engine.host import export

__all__ = ["Output"]


class Output:
    """A computed array: ``.numpy()``, or ``torch.from_dlpack(output)`` and the like, share its memory."""

    __slots__ = ("_array",)

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array

    @property
    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    @property
    def dtype(self) -> dtype:
        return BY_NUMPY[self._array.dtype]

    def numpy(self) -> np.ndarray[Any, Any]:
        """The host array itself, writable."""
        return self._array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self._array, dtype=dtype, copy=copy)

    def __dlpack__(self, *, stream: None = None, max_version: Any = None, dl_device: Any = None, copy: bool | None = None) -> Any:
        """A DLPack capsule of host memory (bfloat16 and float8 included)."""
        return export(self._array.copy() if copy else self._array)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __repr__(self) -> str:
        return f"Output(shape={self.shape}, dtype={self.dtype})"
