"""The matrix product: product, epilogue, store."""

from __future__ import annotations

from typing import Any, ClassVar

from fusible.tex.calls.gemm import GemmBySteps, GemmJob, check_bias, check_gelu_input
from fusible.tex.formats import a_buffer, is_quantized
from fusible.tex.formulas.arrays import ArrayKernels
from fusible.tex.formulas.pointwise import Pointwise
from fusible.tex.formulas.quantize import Quantizing

__all__ = ["GemmFormulas", "copy_of"]

_Job = GemmJob[Any]


class GemmFormulas(ArrayKernels, GemmBySteps):
    """A backend has the product of the operands' numbers, and what is special to it."""

    _gelu: ClassVar[Pointwise]
    _quantizing: ClassVar[Quantizing]

    def _bare_product(self, A: Any, transA: bool, B: Any, transB: bool, undo: bool) -> tuple[Any, Any, Any]:
        """``op(B) @ op(A)`` of what the operands hold, a wide matrix, and the factors that are still to be applied for A and for B: None, fp32
        ``[1]``, or one per line that is not contracted. ``undo``: Hadamard transforms are taken back."""
        raise NotImplementedError

    def _accumulated_product(self, result: Any, D: Any, beta: float) -> Any:
        """``result + beta * D``."""
        raise NotImplementedError

    def _product_of_nothing(self, job: _Job, A: Any, D: Any) -> Any:
        """The wide result of a product with an empty operand: D times beta, or zeros."""
        xp, shape = self._arrays, (job.shape.rows, job.shape.columns)
        return xp.wide(xp.reshape(D, shape)) if job.beta else xp.full(shape, 0, xp.accumulator(job.dtype), a_buffer(A))

    def _gemm(
        self, job: _Job, A: Any, transA: bool, B: Any, transB: bool, D: Any, quantizer: Any, bias: Any, bias_type: Any, gelu: bool, gelu_in: Any,
        grad: bool,
    ) -> tuple[Any, Any, Any]:  # fmt: skip
        if grad:
            result, bias_grad, pre_gelu = self._backward_product(job, A, transA, B, transB, D, bias, gelu, gelu_in)
        else:
            result, bias_grad, pre_gelu = self._forward_product(job, A, transA, B, transB, D, bias, bias_type, gelu)
        return self._store_product(job, result, D, quantizer), bias_grad, pre_gelu

    def _forward_product(
        self, job: _Job, A: Any, transA: bool, B: Any, transB: bool, D: Any, bias: Any, bias_type: Any, gelu: bool
    ) -> tuple[Any, None, Any]:
        """The result, before it is rounded, no gradient of a bias, and the input of a GELU."""
        xp, shape = self._arrays, job.shape.output
        if bias is not None:
            check_bias(bias, job)
        pre_gelu_dtype = xp.dtype(bias_type) if job.quantized and gelu and bias_type is not None else job.dtype
        result = self._product_of_nothing(job, A, D) if job.shape.empty else self._whole_product(job, A, transA, B, transB, D)
        if bias is not None and not job.shape.empty:
            result = xp.plus(result, xp.wide(bias))
        pre_gelu = xp.reshape(xp.cast(result, pre_gelu_dtype), shape) if gelu else None
        return self._gelu.f(result) if gelu and not job.shape.empty else result, None, pre_gelu

    def _backward_product(
        self, job: _Job, A: Any, transA: bool, B: Any, transB: bool, D: Any, bias: Any, gelu: bool, gelu_in: Any
    ) -> tuple[Any, Any, None]:
        """The result, before it is rounded, and the gradient of a bias: B summed over its rows, or the result of a GELU's gradient."""
        xp, empty = self._arrays, job.shape.empty
        if gelu:
            check_gelu_input(gelu_in, job)
        result = self._product_of_nothing(job, A, D) if empty else self._whole_product(job, A, transA, B, transB, D)
        if gelu and not empty and gelu_in is not None:
            result = self._gelu.gradient(result, xp.wide(xp.reshape(gelu_in, result.shape)))
        if bias is None:
            return result, None, None
        summed = self._row_sum(result if gelu else self._dense(B) if is_quantized(B) else B)
        return result, xp.cast(summed, job.dtype), None

    def _whole_product(self, job: _Job, A: Any, transA: bool, B: Any, transB: bool, D: Any) -> Any:
        """``alpha * op(B) @ op(A) + beta * D`` before it is rounded, a matrix."""
        xp = self._arrays
        undo = self._quantizing.blocks.reader.mixed_transform(A, copy_of(transA), B, copy_of(not transB))
        result, scale_a, scale_b = self._bare_product(A, transA, B, transB, undo)
        if scale_a is not None and scale_b is not None and len(scale_a) == len(scale_b) == 1:
            result = xp.times(result, scale_a * scale_b)
        else:
            for scale, shape in ((scale_b, (-1, 1)), (scale_a, (1, -1))):
                if scale is not None:
                    result = xp.times(result, xp.reshape(scale, shape))
        if job.alpha != 1.0:
            result = xp.times(result, job.alpha)
        return self._accumulated_product(result, xp.reshape(D, result.shape), job.beta) if job.beta else result

    def _store_product(self, job: _Job, result: Any, D: Any, quantizer: Any) -> Any:
        xp = self._arrays
        result = xp.reshape(result, job.shape.output)
        if quantizer is None:
            return xp.cast(result, job.dtype) if D is None else xp.put(D, result)
        if job.per_tensor:
            return self._emit(result, quantizer, job.dtype, D)
        return self._quantizing.tensor(xp.cast(result, job.dtype), quantizer, job.dtype, D)


def copy_of(along_rows: bool) -> str:
    """The copy of an operand that is multiplied: ``along_rows`` says whether the contracted dimension is its last."""
    return "rowwise" if along_rows else "columnwise"
