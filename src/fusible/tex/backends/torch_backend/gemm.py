"""The matrix product: checks, product, epilogue, store."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from fusible.tex.backends.torch_backend.block_formats import BLOCKS
from fusible.tex.backends.torch_backend.exact_sums import exact_sums
from fusible.tex.backends.torch_backend.fp8 import decode
from fusible.tex.backends.torch_backend.gpu_products import fp8_product, half_of, wide_product
from fusible.tex.backends.torch_backend.kernels import TorchKernels
from fusible.tex.backends.torch_backend.operands import flat, wide
from fusible.tex.backends.torch_backend.pointwise import POINTWISE
from fusible.tex.calls.gemm import GemmJob, GemmTypes, check_bias
from fusible.tex.calls.layout import check_disjoint
from fusible.tex.formats import PLAIN, a_buffer, format_of, nominal, transposed
from fusible.tex.formulas.gemm import GemmFormulas, copy_of
from fusible.tex.protocol import accumulator, check_same_device, to_torch

__all__ = ["GemmKernels"]

_HALF = frozenset({torch.bfloat16, torch.float16})
_WIDE = frozenset({torch.float32, torch.float64})
_FLOATING = frozenset({torch.float32, torch.float64, *_HALF})
_PLAIN = (Tensor, torch.nn.Parameter)
_Job = GemmJob[torch.dtype]


@functools.cache
def _plain_kernel(transA: bool, transB: bool, gelu: bool, grad: bool, dtype: torch.dtype, on_cpu: bool) -> Callable[[Tensor, Tensor, Any], list[Any]]:
    """``[D, bias_grad, pre_gelu_out, None]`` of ``(A, B, bias)``, matrices of ``dtype`` that fit."""
    in_fp32 = dtype is torch.float32
    if on_cpu and transA and not transB:

        def multiply(A: Tensor, B: Tensor, bias: Tensor | None) -> Tensor:
            return linear(B, A, bias)  # the same two kernels, without the object of a transpose
    else:

        def multiply(A: Tensor, B: Tensor, bias: Tensor | None) -> Tensor:
            a, b = A.t() if transA else A, B.t() if transB else B
            if on_cpu:  # where products are exact, without the object of a context
                return _product(b, a, bias)
            with exact_sums(a):
                return _product(b, a, bias)

    def forward(A: Tensor, B: Tensor, bias: Tensor | None) -> list[Any]:
        return [multiply(A, B, bias), None, None, None]

    def with_gelu(A: Tensor, B: Tensor, bias: Tensor | None) -> list[Any]:
        result = multiply(A, B, bias)
        return [POINTWISE["gelu"].f(result), None, result, None]

    def backward(A: Tensor, B: Tensor, bias: Tensor | None) -> list[Any]:
        return [multiply(A, B, None), None if bias is None else B.sum(0) if in_fp32 else _row_sum_of(B, dtype), None, None]

    return backward if grad else with_gelu if gelu else forward


def _result_of(A: Tensor, transA: bool, B: Tensor, transB: bool) -> tuple[int, int]:
    """The shape of the product of two matrices that fit and have elements, else ``(0, 0)``."""
    if A.dim() != 2 or B.dim() != 2:
        return 0, 0
    columns, depth = A.shape if transA else (A.size(1), A.size(0))
    depth_of_b, rows = B.shape if transB else (B.size(1), B.size(0))
    return (rows, columns) if depth_of_b == depth and depth else (0, 0)


class GemmKernels(TorchKernels, GemmFormulas):
    _gemm_types = GemmTypes(_FLOATING, nominal, to_torch)
    _gelu = POINTWISE["gelu"]

    def _plain_gemm(
        self, A: Any, transA: bool, B: Any, transB: bool, output_dtype: Any, bias: Tensor | None, gelu: bool, grad: bool
    ) -> Callable[[Tensor, Tensor, Any], list[Any]] | None:
        """Of unquantized matrices of one dtype, with as few Python steps as it takes; None where it is another case, or a mistake."""
        if type(A) not in _PLAIN or type(B) not in _PLAIN:
            return None
        dtype = A.dtype
        if B.dtype is not dtype or dtype not in _FLOATING or not ((A.is_cpu and B.is_cpu) or A.device == B.device):
            return None
        if output_dtype is not dtype and output_dtype is not None and to_torch(output_dtype) is not dtype:
            return None
        rows, columns = _result_of(A, transA, B, transB)
        if not (columns and rows) or (gelu and (grad or dtype is not torch.float32)):
            return None
        if bias is not None and not grad and (bias.dtype is not dtype or bias.dim() != 1 or bias.size(0) != columns):
            return None
        return _plain_kernel(transA, transB, gelu, grad, dtype, A.is_cpu)

    def _gemm_added_at_once(self, A: Any, transA: bool, B: Any, transB: bool, D: Any, output_dtype: Any) -> list[Any] | None:
        if type(A) not in _PLAIN or type(B) not in _PLAIN or type(D) not in _PLAIN:
            return None
        if not (A.dtype is B.dtype is D.dtype and A.dtype in _WIDE and A.is_cpu and B.is_cpu and D.is_cpu and D.is_contiguous()):
            return None
        if output_dtype is not None and to_torch(output_dtype) is not D.dtype:
            return None
        rows, columns = _result_of(A, transA, B, transB)
        if not (rows and columns) or D.shape != (rows, columns):
            return None
        check_disjoint(D, (A, B), "D of generic_gemm")
        return [D.addmm_(B.t() if transB else B, A.t() if transA else A), None, None, None]

    def _gemm(self, job: _Job, bias: Tensor | None, bias_type: Any, gelu: bool, gelu_in: Tensor | None, grad: bool) -> tuple[Any, Any, Any]:
        A, B, D = job.A, job.B, job.D
        _check_devices(A, B, D)
        if D is not None:
            check_disjoint(D, [x for x in (A, B) if type(x) in _PLAIN], "D of generic_gemm")
        if not gelu and job.quantizer is None and type(A) in _PLAIN and type(B) in _PLAIN and A.dtype is B.dtype is job.dtype:
            result = _native(job, None if grad else bias)
            if result is not None:
                return result, self._row_sum(B).to(job.dtype) if grad and bias is not None else None, None
        if bias is not None and not grad:
            check_same_device(bias, a_buffer(A), "bias of generic_gemm")
        if job.quantizer is None and D is None and not gelu and not grad and job.alpha == 1.0 and (bias is None or bias.dtype is job.dtype in _HALF):
            result = fp8_product(job, bias, job.dtype)
            if result is not None:
                return result.view(job.shape.output), None, None
        return super()._gemm(job, bias, bias_type, gelu, gelu_in, grad)

    def _bare_product(self, job: _Job, undo: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        result = fp8_product(job, None, torch.float32)
        if result is not None:
            return result, None, None
        half = half_of(job.A)
        half = half if half is half_of(job.B) else None
        (a, scale_a), (b, scale_b) = _operand(job.A, job.transA, job.transA, undo, half), _operand(job.B, job.transB, not job.transB, undo, half)
        return torch.mm(b, a) if half is None else wide_product(b, a), scale_a, scale_b

    def _accumulated_product(self, result: Tensor, D: Tensor, beta: float) -> Tensor:
        return result.add_(D, alpha=beta)


def _check_devices(A: Any, B: Any, D: Any) -> None:
    if type(A) in _PLAIN and type(B) in _PLAIN and A.device != B.device:
        check_same_device(A, B, "A of generic_gemm")
    if D is not None:
        check_same_device(a_buffer(D), a_buffer(A), "D of generic_gemm")


def _product(b: Tensor, a: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(b, a) if bias is None else torch.addmm(bias.contiguous(), b, a)


def _row_sum_of(B: Tensor, dtype: torch.dtype) -> Tensor:
    return B.sum(0, dtype=accumulator(dtype)).to(dtype)


def _native(job: _Job, bias: Tensor | None) -> Tensor | None:
    """One torch kernel, where it accumulates in fp32 and rounds once (measured for bf16, fp16 and fp32, with and without bias); else None."""
    if job.alpha != 1.0 or job.shape.empty or (bias is not None and bias.dtype is not job.dtype):
        return None
    if bias is not None:
        check_bias(bias, job)
        bias = bias.contiguous()
    with exact_sums(job.B):
        return _one_kernel(job, bias)


def _one_kernel(job: _Job, bias: Tensor | None) -> Tensor | None:
    a, b, D = flat(job.A), flat(job.B), job.D
    a, b = a.t() if job.transA else a, b.t() if job.transB else b
    if D is None:
        result = torch.mm(b, a) if bias is None else torch.addmm(bias, b, a)
        return result if len(job.shape.output) == 2 else result.view(job.shape.output)
    if not D.is_contiguous() or job.beta not in (0.0, 1.0) or (job.beta and (bias is not None or job.dtype is not accumulator(job.dtype))):
        return None
    matrix = D.view(job.shape.rows, job.shape.columns)
    if job.beta:
        matrix.addmm_(b, a)
    elif bias is None:
        torch.mm(b, a, out=matrix)
    else:
        torch.addmm(bias, b, a, out=matrix)
    return D


def _operand(x: Any, transpose: bool, along_rows: bool, undo: bool, half: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
    """``op(x)`` as a wide matrix, or one of ``half``, and the factor still to be applied to it: fp32 ``[1]``, or one per line that is not contracted.

    ``along_rows``: whether the contracted dimension is the last of ``x``, so that its row-wise copy is multiplied; ``undo`` takes back a Hadamard
    transform; ``half``: the half precision that holds the numbers of both operands.
    """
    form, to = format_of(x), half or torch.float32
    if form is PLAIN:
        matrix, factor = flat(x) if half else wide(flat(x)), None
    elif not form.per_tensor:
        matrix, factor = BLOCKS.reader.values(x, copy_of(along_rows), undo)
    elif x._data is not None:
        matrix, factor = flat(decode(x._data, x._fp8_dtype, to)), x._scale_inv
    else:
        data = decode(transposed(x), x._fp8_dtype, to)
        matrix, factor = data.reshape(data.shape[0], -1).t(), x._scale_inv
    return (matrix.t() if transpose else matrix), factor
