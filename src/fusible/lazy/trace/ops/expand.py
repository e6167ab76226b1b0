"""Repetition of dimensions of size 1."""

from __future__ import annotations

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

__all__ = ["Expand", "broadcast_to", "expand"]


@dataclass(eq=False)
class Expand(TraceOp):
    """The operand repeated to ``shape`` by numpy's rules."""

    shape: Shape

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtype]:
        (x,) = inputs
        lead = len(self.shape) - len(x.shape)
        if lead < 0 or any(n not in (1, self.shape[lead + i]) for i, n in enumerate(x.shape)):
            raise ShapeError(
                expected("sizes that repeat dimensions of size 1 only", of=f"the expansion of {x}", got=self.shape, do="keep its other sizes")
            )
        return self.shape, x.dtype

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        lead = len(self.shape) - len(inputs[0].shape)
        flat.BroadcastOp(list(inputs), list(outputs), broadcast_dim=list(range(lead, len(self.shape))))


@TENSOR_METHOD_REGISTRY("broadcast_to")
def broadcast_to(x: TensorLike, shape: Any) -> Tensor:
    """``x`` repeated to ``shape`` by numpy's rules. Raises ``ShapeError`` where a size that is not 1 would change."""
    x = as_tensor(x)
    target = as_shape(shape)
    return x if target == x.shape else record(Expand(target), x)


@TENSOR_METHOD_REGISTRY("expand")
def expand(x: TensorLike, *sizes: Any) -> Tensor:
    """``broadcast_to`` where -1 keeps the size of a dimension."""
    x = as_tensor(x)
    given = list(sizes[0] if len(sizes) == 1 and not hasattr(sizes[0], "__index__") else sizes)
    lead = len(given) - x.ndim
    return broadcast_to(x, [x.shape[i - lead] if n == -1 and i >= lead else n for i, n in enumerate(given)])
