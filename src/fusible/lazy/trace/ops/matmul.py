"""Matrix products with a chosen result dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusible.errors import DTypeError, ShapeError, expected
from fusible.lazy import dtypes
from fusible.lazy.dtypes import check_dtype
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.flat_ir.op import emit
from fusible.lazy.flat_ir.tensor import FlatIRTensor
from fusible.lazy.frontend.convert import TensorLike, promote
from fusible.lazy.frontend.registry import TENSOR_METHOD_REGISTRY
from fusible.lazy.frontend.tensor import Tensor, record
from fusible.lazy.printing import Shape
from fusible.lazy.trace.broadcasting import broadcast_shapes, same_dtype
from fusible.lazy.trace.op import TraceOp
from fusible.lazy.trace.ops.reshape import reshape
from fusible.lazy.trace.tensor import TraceTensor

__all__ = ["DotGeneral", "MatrixMultiplication", "dot_general", "matmul"]

Dims = tuple[int, ...]


def _result(what: str, of: dtypes.dtype | None, a: TraceTensor, b: TraceTensor) -> dtypes.dtype:
    """The dtype of a product: ``of`` where it is given and of the operands' kind, else theirs (float32 for float8)."""
    if not (a.dtype.is_float8 and b.dtype.is_float8):
        same_dtype(what, a, b)
    if a.dtype.kind == "bool":
        raise DTypeError(expected("a numeric dtype", of=f"the operands of {what}", got=a, do="cast them first"))
    if of is None:
        return dtypes.float32 if a.dtype.is_float8 else a.dtype
    if of.is_floating == a.dtype.is_integer or of.kind in ("bool", "float8"):
        got = f"{of} for operands of {a.dtype}"
        raise DTypeError(
            expected("a floating dtype for floats or an integer one for integers", of=f"the result of {what}", got=got, do="cast the result")
        )
    return of


def _dot(a: FlatIRTensor, b: FlatIRTensor, out: FlatIRTensor, contracting: tuple[Dims, Dims], batch: tuple[Dims, Dims]) -> None:
    """Bind ``out``: a float8 operand decodes exactly to bfloat16; 16-bit floats accumulate in float32 and round once."""
    kind = out.dtype
    if a.dtype.is_float8:
        a, b = (emit(flat.ConvertOp, [t], t.shape, dtypes.bfloat16, "decode a float8 operand exactly") for t in (a, b))
    if a.dtype.is_floating and kind is not dtypes.float64:
        kind = a.dtype if a.dtype is dtypes.float64 else dtypes.float32
    if kind.itemsize > a.dtype.itemsize and kind not in (dtypes.float32, dtypes.int32):
        a, b = (emit(flat.ConvertOp, [t], t.shape, kind, "accumulate in the wider dtype of the result") for t in (a, b))
    attributes = {"contracting": (list(contracting[0]), list(contracting[1])), "batch": (list(batch[0]), list(batch[1]))}
    if kind is out.dtype:
        flat.DotOp([a, b], [out], **attributes)
    else:
        wide = emit(flat.DotOp, [a, b], out.shape, kind, "accumulate in a wider dtype", **attributes)
        flat.ConvertOp([wide], [out])


@dataclass(eq=False)
class MatrixMultiplication(TraceOp):
    """``[..., m, k] @ [..., k, n]`` where the leading dimensions broadcast."""

    dtype: dtypes.dtype | None

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtypes.dtype]:
        a, b = inputs
        if len(a.shape) < 2 or len(b.shape) < 2 or a.shape[-1] != b.shape[-2]:
            got = f"{a} and {b}"
            raise ShapeError(
                expected("shapes [..., m, k] and [..., k, n]", of="the operands of matmul", got=got, do="transpose or reshape one of them")
            )
        of = _result("matmul", self.dtype, a, b)
        if len(b.shape) == 2:
            return (*a.shape[:-1], b.shape[-1]), of
        heads = [TraceTensor(t.shape[:-2], t.dtype, t.device, t.producer, t.source) for t in (a, b)]
        return (*broadcast_shapes("matmul", *heads), a.shape[-2], b.shape[-1]), of

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        a, b = inputs
        rank = len(outputs[0].shape)
        if len(b.shape) == 2:
            _dot(a, b, outputs[0], ((rank - 1,), (0,)), ((), ()))
            return
        head = outputs[0].shape[:-2]
        reason = "expand the leading dimensions of a matrix product"
        a, b = (flat.broadcast(t, (*head, *t.shape[-2:]), reason) for t in (a, b))
        batch = tuple(range(rank - 2))
        _dot(a, b, outputs[0], ((rank - 1,), (rank - 2,)), (batch, batch))


@dataclass(eq=False)
class DotGeneral(TraceOp):
    """A contraction over named dimensions."""

    contracting: tuple[Dims, Dims]
    batch: tuple[Dims, Dims]
    dtype: dtypes.dtype | None

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtypes.dtype]:
        a, b = inputs
        of = _result("dot_general", self.dtype, a, b)
        free = []
        for t, contracted, batched in zip(inputs, self.contracting, self.batch, strict=True):
            named = (*contracted, *batched)
            if len(set(named)) != len(named) or not all(0 <= d < len(t.shape) for d in named):
                got = f"{named} of {t}"
                raise ShapeError(expected("distinct dimensions of the operand, from 0", of="dot_general", got=got, do="name each dimension once"))
            free += [n for d, n in enumerate(t.shape) if d not in named]
        for left, right in (self.contracting, self.batch):
            if [a.shape[d] for d in left] != [b.shape[d] for d in right]:
                got = f"dimensions {left} of {a} and {right} of {b}"
                raise ShapeError(expected("equal sizes", of="the paired dimensions of dot_general", got=got, do="pair the dimensions in order"))
        return (*(a.shape[d] for d in self.batch[0]), *free), of

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        _dot(inputs[0], inputs[1], outputs[0], self.contracting, self.batch)


@TENSOR_METHOD_REGISTRY("matmul", "__matmul__")
def matmul(a: TensorLike, b: TensorLike, dtype: dtypes.dtype | None = None) -> Tensor:
    """The matrix product ``[..., m, k] @ [..., k, n] -> [..., m, n]`` by numpy's rules (a 1-dimensional operand is a row or a column).

    16-bit floats accumulate in float32 and round once. float8 operands (E4M3 and E5M2 may mix) decode exactly. ``dtype`` is that of the
    result; by default the operands', and float32 for float8. Integers accumulate in the dtype of the result, and wrap around. Raises
    ``ShapeError`` where the inner sizes differ and ``DTypeError`` for mixed or bool operands.
    """
    a, b = promote(a, b)
    if dtype is not None:
        check_dtype(dtype)
    left = reshape(a, (1, *a.shape)) if a.ndim == 1 else a
    right = reshape(b, (*b.shape, 1)) if b.ndim == 1 else b
    product = record(MatrixMultiplication(dtype), left, right)
    if a.ndim != 1 and b.ndim != 1:
        return product
    head = product.shape[:-2]
    return reshape(product, (*head, *product.shape[-2:-1][: a.ndim != 1], *product.shape[-1:][: b.ndim != 1]))


@TENSOR_METHOD_REGISTRY("__rmatmul__")
def _rmatmul(b: TensorLike, a: TensorLike) -> Tensor:
    return matmul(a, b)


def dot_general(
    a: TensorLike, b: TensorLike, contracting: tuple[Dims, Dims], batch: tuple[Dims, Dims] = ((), ()), dtype: dtypes.dtype | None = None
) -> Tensor:
    """The contraction of ``a`` and ``b`` over paired dimensions: ``contracting=((a's,), (b's,))``, and ``batch`` alike.

    The result has the batch dimensions, then what is left of ``a``, then of ``b``. ``contracting=((1,), (1,))`` is ``a @ b.T`` without a
    transpose. Dtypes and accumulation are as for ``matmul``. Raises ``ShapeError`` where paired sizes differ.
    """
    a, b = promote(a, b)
    if dtype is not None:
        check_dtype(dtype)
    pairs = [(tuple(left), tuple(right)) for left, right in (contracting, batch)]
    return record(DotGeneral(pairs[0], pairs[1], dtype), a, b)
