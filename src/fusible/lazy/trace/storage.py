"""Values that exist already: stored data, and arguments of a function that is being compiled."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from fusible.errors import ArgumentError, expected
from fusible.lazy.dims import SizeLike
from fusible.lazy.dtypes import dtype
from fusible.lazy.engine import pjrt
from fusible.lazy.printing import Shape
from fusible.lazy.trace.op import TraceOp
from fusible.lazy.trace.tensor import TraceTensor

__all__ = ["DimensionInput", "Input", "Storage"]


class Storage(TraceOp):
    """A stored tensor. It is an input of the programs that read it, and its data is not part of their printed form.

    It holds a host array, the engine's buffer, or both. Each is made from the other when it is first needed, and both share memory.
    """

    OWN_INIT: ClassVar[bool] = True

    is_input: ClassVar[bool] = True

    shape: Shape
    dtype: dtype

    def __init__(self, shape: Shape, dtype: dtype, data: np.ndarray[Any, Any] | None = None, buffer: Any = None) -> None:
        self.shape = shape
        self.dtype = dtype
        self.buffer = buffer
        self._data = data

    @property
    def data(self) -> np.ndarray[Any, Any]:
        """The host array. Raises ``ArgumentError`` where the tensor was donated, so that a call used its memory for results."""
        if self._data is None:
            buffer = self.buffer
            if buffer is None:
                got, do = "one whose memory was donated to an executable", "copy the tensor before the call that takes it"
                raise ArgumentError(expected("a tensor with a value", of="an evaluation", got=got, do=do))
            self._data = pjrt.host_view(buffer, self.shape, self.dtype)
        return self._data

    def placed(self) -> Any:
        """The engine's buffer, kept for later calls."""
        buffer = self.buffer
        if buffer is None:
            buffer = self.buffer = pjrt.place(self.data, self.dtype)
        return buffer

    def donate(self) -> Any:
        """A buffer that results may overwrite; the tensor has no value afterwards.

        Where a host array exists its memory is copied, so that no array of the user's is overwritten.
        """
        data, buffer = self._data, self.buffer
        if data is not None or buffer is None:
            buffer = pjrt.place(self.data.copy(), self.dtype)
        self._data = self.buffer = None
        return buffer

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtype]:
        return self.shape, self.dtype


class Input(TraceOp):
    """Argument ``index`` of a function that is being compiled."""

    is_input: ClassVar[bool] = True

    index: int
    shape: Shape
    dtype: dtype

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtype]:
        return self.shape, self.dtype


class DimensionInput(Input):
    """An argument that is a size: ``expression`` names it in shapes."""

    expression: SizeLike
