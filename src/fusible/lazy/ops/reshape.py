"""The same elements in another shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fusible.errors import ShapeError, expected
from fusible.lazy.assumptions import holds
from fusible.lazy.dims import bounds, product
from fusible.lazy.dtypes import ALL, dtype
from fusible.lazy.flat_ir import FlatIRTensor
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.frontend import Tensor, TensorLike, as_shape, constrained, record
from fusible.lazy.printing import Shape
from fusible.lazy.trace import TraceOp, TraceTensor

__all__ = ["Reshape", "reshape"]


class Reshape(TraceOp):
    """The elements in row-major order."""

    shape: Shape

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtype]:
        (x,) = inputs
        if math.prod(self.shape) != math.prod(x.shape) and not holds(math.prod(x.shape), "==", math.prod(self.shape), "reshape"):
            wanted = f"{math.prod(x.shape)} elements"
            raise ShapeError(expected(wanted, of=f"the new shape of {x}", got=self.shape, do="pass sizes with that product, or one -1"))
        return self.shape, x.dtype

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        flat.ReshapeOp(list(inputs), list(outputs))


@constrained("reshape", input="T1", returns="T1", T1=ALL)
def reshape(input: TensorLike, shape: Any) -> Tensor:
    """``input`` in another shape with as many elements, in row-major order; one size may be -1. Raises ``ShapeError`` where none fits."""
    sizes = [shape] if hasattr(shape, "__index__") else list(shape)
    unknown = [i for i, n in enumerate(sizes) if n == -1]
    if len(unknown) == 1:
        rest = product(as_shape([*sizes[: unknown[0]], *sizes[unknown[0] + 1 :]]))
        count = product(input.trace_tensor.shape)
        if bounds(rest)[0] <= 0 or not holds(count % rest, "==", 0, "the elements that reshape divides"):
            of, do = f"the new shape of {input.trace_tensor}", "pass sizes whose product divides its elements"
            raise ShapeError(expected("a size that -1 can stand for", of=of, got=tuple(sizes), do=do))
        sizes[unknown[0]] = count // rest
    target = as_shape(sizes)
    return input if target == input.trace_tensor.shape else record(Reshape(target), input)
