"""Regular sub-blocks of a tensor, and reversal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fusible.lazy.dtypes import ALL, dtype
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.flat_ir.tensor import FlatIRTensor
from fusible.lazy.frontend.arguments import normalize_dims
from fusible.lazy.frontend.convert import TensorLike
from fusible.lazy.frontend.interface import constrained
from fusible.lazy.frontend.registry import TENSOR_METHOD_REGISTRY
from fusible.lazy.frontend.tensor import Tensor, record
from fusible.lazy.printing import Shape
from fusible.lazy.trace.op import TraceOp
from fusible.lazy.trace.tensor import TraceTensor

__all__ = ["Flip", "Slice", "flip"]


@dataclass(eq=False)
class Slice(TraceOp):
    """Elements ``start, start + stride, ...`` below ``limit`` of every dimension; the frontend keeps them within bounds."""

    start: tuple[int, ...]
    limit: tuple[int, ...]
    stride: tuple[int, ...]

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtype]:
        bounds = zip(self.start, self.limit, self.stride, strict=True)
        return tuple([len(range(a, b, s)) if type(a) is type(b) is int else -((a - b) // s) for a, b, s in bounds]), inputs[0].dtype

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        flat.SliceOp(list(inputs), list(outputs), start=list(self.start), limit=list(self.limit), stride=list(self.stride))


@dataclass(eq=False)
class Flip(TraceOp):
    """Elements in reverse order along ``dims``."""

    dims: tuple[int, ...]

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtype]:
        return inputs[0].shape, inputs[0].dtype

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        flat.FlipOp(list(inputs), list(outputs), dims=list(self.dims))


@TENSOR_METHOD_REGISTRY("flip")
@constrained(input="T1", returns="T1", T1=ALL)
def flip(input: TensorLike, dim: Any = None) -> Tensor:
    """``input`` reversed along ``dim`` (an int, a sequence, or all of them)."""
    return record(Flip(normalize_dims(dim, input.ndim, "flip")), input)
