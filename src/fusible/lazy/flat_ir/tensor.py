"""The values of a FlatIR."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusible.lazy.device import DEFAULT, device
from fusible.lazy.dtypes import dtype
from fusible.lazy.printing import Shape, print_type
from fusible.lazy.source import UNKNOWN, Source

if TYPE_CHECKING:
    from fusible.lazy.flat_ir.op import FlatIROp

__all__ = ["FlatIRTensor"]


class FlatIRTensor:
    """A value: its type, its producer (``None`` for an input), and the user's line that it belongs to.

    Where lowering introduced the tensor, ``reason_details`` says why; it is ``None`` for a tensor of the trace. ``name`` is empty until the tensor is
    inlined into a FlatIR.
    """

    __slots__ = ("device", "dtype", "name", "producer", "reason_details", "shape", "source")

    def __init__(
        self, shape: Shape, dtype: dtype, *, name: str = "", device: device = DEFAULT, source: Source = UNKNOWN, reason: str | None = None
    ) -> None:
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.source = source
        self.producer: FlatIROp | None = None
        self.reason_details = reason

    def __str__(self) -> str:
        return f"{self.name}: {print_type(self.shape, self.dtype, self.device)}"
