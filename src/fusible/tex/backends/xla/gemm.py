"""The matrix product on lazy tensors: checks, product, epilogue, store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fusible import lazy
from fusible.errors import ArgumentError, DTypeError, NotServedError, ShapeError, expected
from fusible.lazy import Tensor
from fusible.tex.backends.xla.activation import POINTWISE
from fusible.tex.backends.xla.fp8 import as_float8
from fusible.tex.backends.xla.operands import dense, flat, fp32, nominal, row_sum, to_lazy
from fusible.tex.backends.xla.quantize import emit, quantize_tensor
from fusible.tex.interface.gemm import GEMM
from fusible.tex.protocol import GemmShape, check_beta, gemm_shape, is_quantized, logical_shape, scaling, transposed

__all__ = ["GemmKernels"]

_FLOATING = frozenset({lazy.float32, lazy.bfloat16, lazy.float16})


@dataclass(frozen=True)
class _Job:
    """A checked call."""

    shape: GemmShape
    dtype: lazy.dtype
    quantized: bool
    alpha: float
    beta: float


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
        workspace: Any,
        workspace_size: int,
        accumulate: bool,
        use_split_accumulator: bool,
        comm_overlap: Any = None,
        comm_type: Any = None,
        extra_output: Any = None,
        bulk_overlap: bool = False,
        alpha: float = 1.0,
        beta: float | None = None,
    ) -> list[Any]:
        if comm_overlap is not None:
            raise NotServedError(expected("no comm_overlap", of="generic_gemm of lazy tensors", got=type(comm_overlap).__name__, do="pass None"))
        job = _check(A, transA, B, transB, D, quantizer, output_dtype, accumulate, alpha, beta)
        if quantizer is None and D is not None and is_quantized(D):
            quantizer = D._quantizer
        if grad:
            result, bias_grad, pre_gelu = _backward(job, A, transA, B, transB, D, bias, gelu, gelu_in)
        else:
            result, bias_grad, pre_gelu = _forward(job, A, transA, B, transB, D, bias, bias_type, gelu)
        return [_store(job, result, D, quantizer), bias_grad, pre_gelu, extra_output]


def _check(A: Any, transA: bool, B: Any, transB: bool, D: Any, quantizer: Any, output_dtype: Any, accumulate: bool, alpha: float, beta: Any) -> _Job:
    shape = gemm_shape(logical_shape(A), transA, logical_shape(B), transB)
    factor = check_beta(accumulate, beta, D is not None)
    for name, x in (("A", A), ("B", B)):
        if nominal(x) not in _FLOATING:
            raise DTypeError(expected("float32, bfloat16, float16 or FP8", of=f"{name} of generic_gemm", got=nominal(x), do="cast it"))
    dtype = nominal(A) if output_dtype is None else to_lazy(output_dtype)
    if dtype not in _FLOATING:
        raise DTypeError(expected("float32, bfloat16 or float16", of="output_dtype of generic_gemm", got=dtype, do="pass a quantizer for FP8"))
    if D is not None:
        dtype = _check_output(D, shape, dtype, output_dtype is not None, factor)
    if quantizer is not None:
        scaling(quantizer)
        if accumulate:
            raise ArgumentError(expected("no quantizer", of="an accumulating generic_gemm", got="one", do="accumulate in high precision"))
    return _Job(shape, dtype, is_quantized(A) and is_quantized(B), float(alpha), factor)


def _check_output(D: Any, shape: GemmShape, dtype: lazy.dtype, dtype_given: bool, factor: float) -> lazy.dtype:
    if logical_shape(D) != shape.output:
        got = list(logical_shape(D))
        raise ShapeError(expected(f"shape {list(shape.output)}", of="D of generic_gemm", got=got, do="pass a tensor of that shape"))
    if is_quantized(D):
        if factor:
            raise ArgumentError(expected("an unquantized D", of="an accumulating generic_gemm", got="FP8", do="accumulate in high precision"))
        return dtype
    if dtype_given and D.dtype is not dtype:
        raise DTypeError(expected(f"output_dtype {D.dtype}, that of D", of="generic_gemm", got=dtype, do="pass None or D's dtype"))
    if D.dtype not in _FLOATING:
        raise DTypeError(expected("float32, bfloat16 or float16", of="D of generic_gemm", got=D.dtype, do="pass such a tensor"))
    return D.dtype


def _operand(x: Any) -> tuple[Tensor, bool, Tensor | None]:
    """``x`` as a matrix of what it holds, whether that is its transpose, and the factor still to be applied to it."""
    if not is_quantized(x):
        return flat(x), False, None
    if x._data is not None:
        return flat(as_float8(x._data, x._fp8_dtype)), False, x._scale_inv
    data = as_float8(transposed(x), x._fp8_dtype)
    return lazy.reshape(data, (data.shape[0], -1)), True, x._scale_inv


def _product(job: _Job, A: Any, transA: bool, B: Any, transB: bool, D: Any) -> Tensor:
    """``alpha * op(B) @ op(A) + beta * D`` in fp32, a matrix."""
    (a, a_lies, scale_a), (b, b_lies, scale_b) = _operand(A), _operand(B)
    if a.dtype is not b.dtype and not (a.dtype.is_float8 and b.dtype.is_float8):
        a, b = fp32(a), fp32(b)
    contracting = ((0 if transB != b_lies else 1,), (1 if transA != a_lies else 0,))
    result = lazy.dot_general(b, a, contracting, dtype=lazy.float32)
    if scale_a is not None and scale_b is not None:
        result = result * (scale_a * scale_b)
    elif scale_a is not None or scale_b is not None:
        result = result * (scale_a if scale_b is None else scale_b)
    if job.alpha != 1.0:
        result = result * job.alpha
    return result + fp32(lazy.reshape(D, result.shape)) * job.beta if job.beta else result


def _forward(
    job: _Job, A: Any, transA: bool, B: Any, transB: bool, D: Any, bias: Tensor | None, bias_type: Any, gelu: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    if bias is not None and tuple(bias.shape) != (job.shape.columns,):
        got = list(bias.shape)
        raise ShapeError(expected(f"shape [{job.shape.columns}]", of="bias of generic_gemm", got=got, do="pass one value per column of D"))
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
    return POINTWISE["gelu"][0](result), None, pre_gelu


def _backward(
    job: _Job, A: Any, transA: bool, B: Any, transB: bool, D: Any, bias: Tensor | None, gelu: bool, gelu_in: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    if gelu and (gelu_in is None or tuple(gelu_in.shape) != job.shape.output):
        got = "None" if gelu_in is None else list(gelu_in.shape)
        raise ShapeError(expected(f"shape {list(job.shape.output)}", of="gelu_in with grad", got=got, do="pass the input of the GELU"))
    empty = job.shape.empty
    result = _of_empty(job, D) if empty else _product(job, A, transA, B, transB, D)
    if gelu and not empty and gelu_in is not None:
        result = POINTWISE["gelu"][1](result, fp32(lazy.reshape(gelu_in, result.shape)))
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
    if job.quantized:
        return emit(result, quantizer, job.dtype, D)
    return quantize_tensor(lazy.cast(result, job.dtype), quantizer, job.dtype, D)
