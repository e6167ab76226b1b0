"""Dimensions in another order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fusible.errors import ArgumentError, expected
from fusible.lazy.dtypes import dtype
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.flat_ir.tensor import FlatIRTensor
from fusible.lazy.frontend.arguments import normalize_dim, normalize_dims
from fusible.lazy.frontend.convert import TensorLike, as_tensor
from fusible.lazy.frontend.registry import TENSOR_METHOD_REGISTRY
from fusible.lazy.frontend.tensor import Tensor, record
from fusible.lazy.printing import Shape
from fusible.lazy.trace.op import TraceOp
from fusible.lazy.trace.tensor import TraceTensor

__all__ = ["Permute", "permute", "transpose"]


@dataclass(eq=False)
class Permute(TraceOp):
    """Output dimension ``i`` is input dimension ``perm[i]``."""

    perm: tuple[int, ...]

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtype]:
        (x,) = inputs
        return tuple([x.shape[d] for d in self.perm]), x.dtype

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        flat.TransposeOp(list(inputs), list(outputs), perm=list(self.perm))


@TENSOR_METHOD_REGISTRY("permute")
def permute(x: TensorLike, *perm: Any) -> Tensor:
    """``x`` with output dimension ``i`` taken from dimension ``perm[i]``. Raises ``ArgumentError`` unless each dimension is named once."""
    x = as_tensor(x)
    order = normalize_dims(list(perm[0] if len(perm) == 1 and not hasattr(perm[0], "__index__") else perm), x.ndim, "permute")
    if len(order) != x.ndim:
        raise ArgumentError(expected(f"{x.ndim} dimensions", of="the order of a permute", got=order, do="name every dimension once"))
    return record(Permute(order), x)


@TENSOR_METHOD_REGISTRY("transpose")
def transpose(x: TensorLike, dim0: int = -2, dim1: int = -1) -> Tensor:
    """``x`` with two dimensions exchanged, by default the last two."""
    x = as_tensor(x)
    a, b = (normalize_dim(d, x.ndim, "transpose") for d in (dim0, dim1))
    order = list(range(x.ndim))
    order[a], order[b] = b, a
    return record(Permute(tuple(order)), x)
