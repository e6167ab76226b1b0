"""The same elements in another shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fusible.errors import ShapeError, expected
from fusible.lazy.dtypes import dtype
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.flat_ir.tensor import FlatIRTensor
from fusible.lazy.frontend.arguments import as_shape
from fusible.lazy.frontend.convert import TensorLike, as_tensor
from fusible.lazy.frontend.registry import TENSOR_METHOD_REGISTRY
from fusible.lazy.frontend.tensor import Tensor, record
from fusible.lazy.printing import Shape
from fusible.lazy.trace.op import TraceOp
from fusible.lazy.trace.tensor import TraceTensor

__all__ = ["Reshape", "reshape"]


@dataclass(eq=False)
class Reshape(TraceOp):
    """The elements in row-major order."""

    shape: Shape

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtype]:
        (x,) = inputs
        if math.prod(self.shape) != math.prod(x.shape):
            raise ShapeError(
                expected(f"{math.prod(x.shape)} elements", of=f"the new shape of {x}", got=self.shape, do="pass sizes with that product, or one -1")
            )
        return self.shape, x.dtype

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        flat.ReshapeOp(list(inputs), list(outputs))


@TENSOR_METHOD_REGISTRY("reshape")
def reshape(x: TensorLike, *shape: Any) -> Tensor:
    """``x`` in another shape with as many elements, in row-major order; one size may be -1. Raises ``ShapeError`` where none fits."""
    x = as_tensor(x)
    sizes = list(shape[0] if len(shape) == 1 and not hasattr(shape[0], "__index__") else shape)
    unknown = [i for i, n in enumerate(sizes) if n == -1]
    if len(unknown) == 1:
        rest = math.prod(sizes[: unknown[0]]) * math.prod(sizes[unknown[0] + 1 :])
        if rest <= 0 or x.size % rest:
            raise ShapeError(
                expected(
                    "a size that -1 can stand for",
                    of=f"the new shape of {x.trace_tensor}",
                    got=tuple(sizes),
                    do="pass sizes whose product divides its elements",
                )
            )
        sizes[unknown[0]] = x.size // rest
    target = as_shape(sizes)
    return x if target == x.shape else record(Reshape(target), x)
