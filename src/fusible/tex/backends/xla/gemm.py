"""The matrix product on lazy tensors: checks, product, epilogue, store."""

from __future__ import annotations

from typing import Any

from fusible import lazy
from fusible.errors import NotServedError, expected
from fusible.lazy import Tensor
from fusible.tex.backends.xla.activation import POINTWISE
from fusible.tex.backends.xla.block_formats import block_values, mixed_transform
from fusible.tex.backends.xla.dtypes import to_lazy
from fusible.tex.backends.xla.fp8 import as_float8
from fusible.tex.backends.xla.operands import dense, flat, fp32, nominal, row_sum
from fusible.tex.backends.xla.quantizing import emit, quantize_tensor
from fusible.tex.calls.gemm import GemmJob, GemmTypes, check_bias, check_gelu_input
from fusible.tex.formats import PLAIN, format_of, is_quantized, transposed
from fusible.tex.interface.gemm import GEMM

__all__ = ["GemmKernels"]

_TYPES = GemmTypes(frozenset({lazy.float32, lazy.bfloat16, lazy.float16}), nominal, to_lazy)
_Job = GemmJob[lazy.dtype]


class GemmKernels(GEMM):
    def generic_gemm(
        self,
        A: Any,
        transA: bool,
        B: Any,
        transB: bool,
        D: Any,
        quantizer: Any,
        output_dtype: Any,
        bias: Any,
        bias_type: Any,
        gelu: bool,
        gelu_in: Any,
        grad: bool,
        accumulate: bool,
        comm_overlap: Any = None,
        extra_output: Any = None,
        alpha: float = 1.0,
        beta: float | None = None,
    ) -> list[Any]:
        if comm_overlap is not None:
            raise NotServedError(expected("no comm_overlap", of="generic_gemm of lazy tensors", got=type(comm_overlap).__name__, do="pass None"))
        job = _TYPES.check(A, transA, B, transB, D, quantizer, output_dtype, accumulate, alpha, beta)
        if quantizer is None and D is not None and is_quantized(D):
            quantizer = D._quantizer
        if grad:
            result, bias_grad, pre_gelu = _backward(job, A, transA, B, transB, D, bias, gelu, gelu_in)
        else:
            result, bias_grad, pre_gelu = _forward(job, A, transA, B, transB, D, bias, bias_type, gelu)
        return [_store(job, result, D, quantizer), bias_grad, pre_gelu, extra_output]


def _operand(x: Any, along_rows: bool, undo: bool) -> tuple[Tensor, bool, Tensor | None]:
    """``x`` as a matrix of what it holds, whether that is its transpose, and the factor still to be applied to it: fp32 ``[1]``, or one per line that
    is not contracted.

    ``along_rows``: whether the contracted dimension is the last of ``x``, so that its row-wise copy is multiplied; ``undo`` takes back a Hadamard
    transform.
    """
    form = format_of(x)
    if form is PLAIN:
        return flat(x), False, None
    if not form.per_tensor:
        matrix, factor = block_values(x, _copy(along_rows), undo)
        return matrix, False, factor
    if x._data is not None:
        return flat(as_float8(x._data, x._fp8_dtype)), False, x._scale_inv
    data = as_float8(transposed(x), x._fp8_dtype)
    return lazy.reshape(data, (data.shape[0], -1)), True, x._scale_inv


def _copy(along_rows: bool) -> str:
    return "rowwise" if along_rows else "columnwise"


def _product(job: _Job, A: Any, transA: bool, B: Any, transB: bool, D: Any) -> Tensor:
    """``alpha * op(B) @ op(A) + beta * D`` in fp32, a matrix."""
    undo = mixed_transform(A, _copy(transA), B, _copy(not transB))
    (a, a_lies, scale_a), (b, b_lies, scale_b) = _operand(A, transA, undo), _operand(B, not transB, undo)
    if a.dtype is not b.dtype and not (a.dtype.is_float8 and b.dtype.is_float8):
        a, b = fp32(a), fp32(b)
    contracting = ((0 if transB != b_lies else 1,), (1 if transA != a_lies else 0,))
    result = lazy.dot_general(b, a, contracting, dtype=lazy.float32)
    if scale_a is not None and scale_b is not None and scale_a.size == scale_b.size == 1:
        result = result * (scale_a * scale_b)
    else:
        for scale, shape in ((scale_b, (-1, 1)), (scale_a, (1, -1))):
            if scale is not None:
                result = result * lazy.reshape(scale, shape)
    if job.alpha != 1.0:
        result = result * job.alpha
    return result + fp32(lazy.reshape(D, result.shape)) * job.beta if job.beta else result


def _forward(
    job: _Job, A: Any, transA: bool, B: Any, transB: bool, D: Any, bias: Tensor | None, bias_type: Any, gelu: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    if bias is not None:
        check_bias(bias, job)
    pre_gelu_dtype = to_lazy(bias_type) if job.quantized and gelu and bias_type is not None else job.dtype
    if job.shape.empty:
        result = _of_empty(job, D)
        return result, None, lazy.reshape(lazy.cast(result, pre_gelu_dtype), job.shape.output) if gelu else None
    result = _product(job, A, transA, B, transB, D)
    if bias is not None:
        result = result + fp32(bias)
    if not gelu:
        return result, None, None
    pre_gelu = lazy.reshape(lazy.cast(result, pre_gelu_dtype), job.shape.output)
    return POINTWISE["gelu"].f(result), None, pre_gelu


def _backward(
    job: _Job, A: Any, transA: bool, B: Any, transB: bool, D: Any, bias: Tensor | None, gelu: bool, gelu_in: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    if gelu:
        check_gelu_input(gelu_in, job)
    empty = job.shape.empty
    result = _of_empty(job, D) if empty else _product(job, A, transA, B, transB, D)
    if gelu and not empty and gelu_in is not None:
        result = POINTWISE["gelu"].gradient(result, fp32(lazy.reshape(gelu_in, result.shape)))
    if bias is None:
        return result, None, None
    summed = row_sum(result if gelu else dense(B) if is_quantized(B) else B)
    return result, lazy.cast(summed, job.dtype), None


def _of_empty(job: _Job, D: Any) -> Tensor:
    """The result of a product with an empty operand: D times beta, or zeros."""
    shape = (job.shape.rows, job.shape.columns)
    return fp32(lazy.reshape(D, shape)) if job.beta else lazy.zeros(shape)


def _store(job: _Job, result: Tensor, D: Any, quantizer: Any) -> Any:
    result = lazy.reshape(result, job.shape.output)
    if quantizer is None:
        rounded = lazy.cast(result, job.dtype)
        return rounded if D is None else D.assign_(rounded)
    if job.per_tensor:
        return emit(result, quantizer, job.dtype, D)
    return quantize_tensor(lazy.cast(result, job.dtype), quantizer, job.dtype, D)
