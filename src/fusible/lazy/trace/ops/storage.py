"""Values that exist already: stored data, and arguments of a function that is being compiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fusible.lazy.dtypes import dtype
from fusible.lazy.printing import Shape
from fusible.lazy.trace.op import TraceOp
from fusible.lazy.trace.tensor import TraceTensor

__all__ = ["Input", "Storage"]


@dataclass(eq=False)
class Storage(TraceOp):
    """A stored tensor. It is an input of the programs that read it: its data is no part of their printed form."""

    HIDDEN: ClassVar[frozenset[str]] = frozenset({"data"})
    is_input: ClassVar[bool] = True

    shape: Shape
    dtype: dtype
    data: np.ndarray[Any, Any]

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtype]:
        return self.shape, self.dtype


@dataclass(eq=False)
class Input(TraceOp):
    """Argument ``index`` of a function that is being compiled."""

    is_input: ClassVar[bool] = True

    index: int
    shape: Shape
    dtype: dtype

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtype]:
        return self.shape, self.dtype
