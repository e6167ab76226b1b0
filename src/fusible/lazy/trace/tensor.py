"""The values of a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusible.lazy.device import device
from fusible.lazy.dtypes import dtype
from fusible.lazy.printing import Shape
from fusible.lazy.source import Source, describe

if TYPE_CHECKING:
    from fusible.lazy.trace.op import TraceOp

__all__ = ["TraceTensor"]


class TraceTensor:
    """A value of the implicit graph: its shape, dtype and device, the operation that makes it, and the user's line."""

    __slots__ = ("device", "dtype", "name", "producer", "shape", "source")

    def __init__(self, shape: Shape, dtype: dtype, device: device, producer: TraceOp, source: Source) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.producer = producer
        self.source = source
        self.name: str | None = None

    def __str__(self) -> str:
        """``float32 [2, 3] (made at file:line)``: how an error names it."""
        name = f" {self.name!r}" if self.name else ""
        return f"{self.dtype} {list(self.shape)}{name} (made at {describe(self.source)})"
