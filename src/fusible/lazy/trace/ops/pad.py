"""A border around a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusible.errors import ArgumentError, expected
from fusible.lazy.dtypes import dtype
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.flat_ir.tensor import FlatIRTensor
from fusible.lazy.frontend.convert import TensorLike, as_tensor
from fusible.lazy.frontend.registry import TENSOR_METHOD_REGISTRY
from fusible.lazy.frontend.tensor import Tensor, record
from fusible.lazy.printing import Shape
from fusible.lazy.trace.op import TraceOp
from fusible.lazy.trace.ops.fill import literal
from fusible.lazy.trace.tensor import TraceTensor

__all__ = ["Pad", "pad"]


@dataclass(eq=False)
class Pad(TraceOp):
    """``low[d]`` elements of ``value`` before and ``high[d]`` after the operand in every dimension."""

    low: tuple[int, ...]
    high: tuple[int, ...]
    value: float | int | bool

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtype]:
        (x,) = inputs
        return tuple([a + n + b for a, n, b in zip(self.low, x.shape, self.high, strict=True)]), x.dtype

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        value = flat.constant(self.value, inputs[0].dtype, "hold the value that pads")
        flat.PadOp([inputs[0], value], list(outputs), low=list(self.low), high=list(self.high))


@TENSOR_METHOD_REGISTRY("pad")
def pad(x: TensorLike, pad: Sequence[tuple[int, int]], value: float | bool | None = None) -> Tensor:
    """``x`` with ``pad[d] = (before, after)`` elements of ``value`` (default: zero) added to dimension ``d``.

    Raises ``ArgumentError`` unless there is one pair of counts of at least 0 for every dimension.
    """
    x = as_tensor(x)
    pairs = [tuple(pair) for pair in pad]
    if len(pairs) != x.ndim or any(len(p) != 2 or min(p) < 0 for p in pairs):
        raise ArgumentError(expected(f"{x.ndim} pairs of counts of at least 0", of="pad", got=pairs, do="pass (before, after) for every dimension"))
    fill = literal((False if x.dtype.kind == "bool" else 0) if value is None else value, x.dtype)
    return record(Pad(tuple(p[0] for p in pairs), tuple(p[1] for p in pairs), fill), x)
