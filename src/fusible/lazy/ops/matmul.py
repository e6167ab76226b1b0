"""Matrix products with a chosen result dtype."""

from __future__ import annotations

from collections.abc import Sequence

from fusible.errors import DTypeError, ShapeError, expected
from fusible.lazy import dtypes
from fusible.lazy.assumptions import holds
from fusible.lazy.dtypes import FLOAT8S, NUMBERS, check_dtype
from fusible.lazy.flat_ir import FlatIRTensor, emit
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.frontend import TENSOR_METHOD_REGISTRY, Tensor, TensorLike, constrained, located, record
from fusible.lazy.ops.lowering.convert import bind
from fusible.lazy.ops.reshape import reshape
from fusible.lazy.printing import Shape
from fusible.lazy.trace import TraceOp, TraceTensor, broadcast_shapes

__all__ = ["DotGeneral", "MatrixMultiplication", "dot_general", "matmul"]

Dims = tuple[int, ...]


def _result(what: str, of: dtypes.dtype | None, a: TraceTensor, b: TraceTensor) -> dtypes.dtype:
    """The dtype of a product: ``of`` where it is given and of the operands' kind, else theirs (float32 for float8)."""
    if of is None:
        return dtypes.float32 if a.dtype.is_float8 else a.dtype
    check_dtype(of)
    if of.is_floating == a.dtype.is_integer or of.kind in ("bool", "float8"):
        got = f"{of} for operands of {a.dtype}"
        wanted = "a floating dtype for floats or an integer one for integers"
        raise DTypeError(expected(wanted, of=f"the result of {what}", got=got, do="cast the result"))
    return of


def _dot(a: FlatIRTensor, b: FlatIRTensor, out: FlatIRTensor, contracting: tuple[Dims, Dims], batch: tuple[Dims, Dims]) -> None:
    """Bind ``out``: a float8 operand decodes exactly to bfloat16; 16-bit floats accumulate in float32 and round once."""
    kind = out.dtype
    if a.dtype.is_float8:
        a, b = (emit(flat.ConvertOp, [t], t.shape, dtypes.bfloat16, "decode a float8 operand exactly") for t in (a, b))
    if a.dtype.is_floating and kind is not dtypes.float64:
        kind = a.dtype if a.dtype is dtypes.float64 else dtypes.float32
    # A dot accumulates narrow operands in float32 or int32 itself. For any other wider dtype the operands are converted first.
    if kind.itemsize > a.dtype.itemsize and kind not in (dtypes.float32, dtypes.int32):
        a, b = (emit(flat.ConvertOp, [t], t.shape, kind, "accumulate in the wider dtype of the result") for t in (a, b))
    attributes = {"contracting": (list(contracting[0]), list(contracting[1])), "batch": (list(batch[0]), list(batch[1]))}
    bind(emit(flat.DotOp, [a, b], out.shape, kind, "accumulate in a wider dtype", **attributes), out)


class MatrixMultiplication(TraceOp):
    """``[..., m, k] @ [..., k, n]`` where the leading dimensions broadcast."""

    dtype: dtypes.dtype | None

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtypes.dtype]:
        a, b = inputs
        if len(a.shape) < 2 or len(b.shape) < 2 or not holds(a.shape[-1], "==", b.shape[-2], "matmul"):
            raise _mismatch("shapes [..., m, k] and [..., k, n]", a, b)
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
            if len(left) != len(right) or not all(holds(a.shape[i], "==", b.shape[j], "dot_general") for i, j in zip(left, right, strict=True)):
                got = f"dimensions {left} of {a} and {right} of {b}"
                raise ShapeError(expected("equal sizes", of="the paired dimensions of dot_general", got=got, do="pair the dimensions in order"))
        return (*(a.shape[d] for d in self.batch[0]), *free), of

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        _dot(inputs[0], inputs[1], outputs[0], self.contracting, self.batch)


def _mismatch(wanted: str, a: TraceTensor, b: TraceTensor) -> ShapeError:
    return ShapeError(expected(wanted, of="the operands of matmul", got=f"{a} and {b}", do="transpose or reshape one of them"))


_MULTIPLIED = NUMBERS | FLOAT8S


@constrained("matmul", "__matmul__", lhs="T1", rhs="T1", T1=_MULTIPLIED, mixes=[FLOAT8S])
def matmul(lhs: TensorLike, rhs: TensorLike, dtype: dtypes.dtype | None = None) -> Tensor:
    """The matrix product ``[..., m, k] @ [..., k, n] -> [..., m, n]`` by numpy's rules (a 1-dimensional operand is a row or a column).

    16-bit floats accumulate in float32 and round once. float8 operands (E4M3 and E5M2 may mix) decode exactly. ``dtype`` is that of the
    result; by default the operands', and float32 for float8. Integers accumulate in the dtype of the result, and wrap around. Raises
    ``ShapeError`` where the inner sizes differ and ``DTypeError`` for mixed or bool operands.
    """
    a, b = lhs.trace_tensor, rhs.trace_tensor
    if 1 in (lhs.ndim, rhs.ndim) and not (a.shape and b.shape and holds(a.shape[-1], "==", b.shape[-2:][0], "matmul")):
        raise _mismatch("shapes [..., k] and [k], [k] and [..., k, n], or [k] twice", a, b)
    left = reshape(lhs, (1, *lhs.shape)) if lhs.ndim == 1 else lhs
    right = reshape(rhs, (*rhs.shape, 1)) if rhs.ndim == 1 else rhs
    product = record(MatrixMultiplication(dtype), left, right)
    if lhs.ndim != 1 and rhs.ndim != 1:
        return product
    head = product.shape[:-2]
    return reshape(product, (*head, *product.shape[-2:-1][: lhs.ndim != 1], *product.shape[-1:][: rhs.ndim != 1]))


@TENSOR_METHOD_REGISTRY("__rmatmul__")
@located
def _rmatmul(rhs: TensorLike, lhs: TensorLike) -> Tensor:
    return matmul(lhs, rhs)


@constrained(lhs="T1", rhs="T1", T1=_MULTIPLIED, mixes=[FLOAT8S])
def dot_general(
    lhs: TensorLike, rhs: TensorLike, contracting: tuple[Dims, Dims], batch: tuple[Dims, Dims] = ((), ()), dtype: dtypes.dtype | None = None
) -> Tensor:
    """The contraction of ``lhs`` and ``rhs`` over paired dimensions: ``contracting=((of lhs,), (of rhs,))``, ``batch`` likewise.

    The result has the batch dimensions, then the other ones of ``lhs``, then those of ``rhs``. ``contracting=((1,), (1,))`` is ``lhs @ rhs.T``
    without a transpose. Dtypes and accumulation are as for ``matmul``. Raises ``ShapeError`` where paired sizes differ.
    """
    pairs = [(tuple(left), tuple(right)) for left, right in (contracting, batch)]
    return record(DotGeneral(pairs[0], pairs[1], dtype), lhs, rhs)
