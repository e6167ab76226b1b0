"""Repetition of dimensions of size 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusible.errors import ShapeError, expected
from fusible.lazy.assumptions import holds
from fusible.lazy.dtypes import ALL, dtype
from fusible.lazy.flat_ir import FlatIRTensor
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.frontend import Tensor, TensorLike, as_shape, constrained, record
from fusible.lazy.printing import Shape
from fusible.lazy.trace import TraceOp, TraceTensor

__all__ = ["Expand", "broadcast_to", "expand"]


class Expand(TraceOp):
    """The operand repeated to ``shape`` by numpy's rules."""

    shape: Shape

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtype]:
        (x,) = inputs
        lead = len(self.shape) - len(x.shape)
        if lead < 0 or any(n not in (1, self.shape[lead + i]) and not holds(n, "==", self.shape[lead + i], "expand") for i, n in enumerate(x.shape)):
            wanted = "sizes that repeat dimensions of size 1 only"
            raise ShapeError(expected(wanted, of=f"the expansion of {x}", got=self.shape, do="keep its other sizes"))
        return self.shape, x.dtype

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        lead = len(self.shape) - len(inputs[0].shape)
        flat.BroadcastOp(list(inputs), list(outputs), broadcast_dim=list(range(lead, len(self.shape))))


@constrained("broadcast_to", input="T1", returns="T1", T1=ALL)
def broadcast_to(input: TensorLike, shape: Any) -> Tensor:
    """``input`` repeated to ``shape`` by numpy's rules. Raises ``ShapeError`` where a size that is not 1 would change."""
    target = as_shape(shape)
    return input if target == input.trace_tensor.shape else record(Expand(target), input)


@constrained("expand", input="T1", returns="T1", T1=ALL)
def expand(input: TensorLike, sizes: Any) -> Tensor:
    """``broadcast_to`` where -1 keeps the size of a dimension."""
    wanted = [sizes] if hasattr(sizes, "__index__") else list(sizes)
    lead = len(wanted) - input.ndim
    return broadcast_to(input, [input.shape[i - lead] if n == -1 and i >= lead else n for i, n in enumerate(wanted)])
