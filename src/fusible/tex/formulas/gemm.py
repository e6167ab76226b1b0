"""The matrix product: product, epilogue, store."""

from __future__ import annotations

from typing import Any, ClassVar

from fusible.tex.calls.gemm import GemmBySteps, GemmJob, check_bias, check_gelu_input
from fusible.tex.formats import a_buffer, is_quantized
from fusible.tex.formulas.arrays import Array, ArrayKernels
from fusible.tex.formulas.pointwise import Pointwise
from fusible.tex.formulas.quantize import Quantizing
from fusible.tex.interface.arguments import DTypeLike

__all__ = ["GemmFormulas", "copy_of"]

_Job = GemmJob[Any]


class GemmFormulas(ArrayKernels, GemmBySteps):
    """A backend has the product of the operands' numbers, and what is special to it."""

    _gelu: ClassVar[Pointwise]
    _quantizing: ClassVar[Quantizing]

    def _bare_product(self, job: _Job, undo: bool) -> tuple[Any, Any, Any]:
        """``op(B) @ op(A)`` of what the operands hold, a wide matrix, and the factors that are still to be applied for A and for B: None, fp32
        ``[1]``, or one per line that is not contracted. ``undo``: Hadamard transforms are taken back."""
        raise NotImplementedError

    def _accumulated_product(self, result: Array, D: Array, beta: float) -> Any:
        """``result + beta * D``."""
        raise NotImplementedError

    def _gemm(
        self, job: _Job, bias: Array | None, bias_type: DTypeLike | None, gelu: bool, gelu_in: Array | None, grad: bool
    ) -> tuple[Any, Any, Any]:
        if grad:
            result, bias_grad, pre_gelu = self._backward_product(job, bias, gelu, gelu_in)
        else:
            result, bias_grad, pre_gelu = self._forward_product(job, bias, bias_type, gelu)
        return self._store_product(job, result), bias_grad, pre_gelu

    def _forward_product(self, job: _Job, bias: Array | None, bias_type: DTypeLike | None, gelu: bool) -> tuple[Any, None, Any]:
        """The result, before it is rounded, no gradient of a bias, and the input of a GELU."""
        xp, shape = self._arrays, job.shape.output
        if bias is not None:
            check_bias(bias, job)
        pre_gelu_dtype = xp.dtype(bias_type) if job.quantized and gelu and bias_type is not None else job.dtype
        result = self._whole_product(job)
        if bias is not None and not job.shape.empty:
            result = xp.plus(result, xp.wide(bias))
        pre_gelu = xp.reshape(xp.cast(result, pre_gelu_dtype), shape) if gelu else None
        return self._gelu.f(result) if gelu and not job.shape.empty else result, None, pre_gelu

    def _backward_product(self, job: _Job, bias: Array | None, gelu: bool, gelu_in: Array | None) -> tuple[Any, Any, None]:
        """The result, before it is rounded, and the gradient of a bias: B summed over its rows, or the result of a GELU's gradient."""
        xp = self._arrays
        if gelu:
            check_gelu_input(gelu_in, job)
        result = self._whole_product(job)
        if gelu and not job.shape.empty and gelu_in is not None:
            result = self._gelu.gradient(result, xp.wide(xp.reshape(gelu_in, result.shape)))
        if bias is None:
            return result, None, None
        summed = self._row_sum(result if gelu else self._dense(job.B) if is_quantized(job.B) else job.B)
        return result, xp.cast(summed, job.dtype), None

    def _whole_product(self, job: _Job) -> Any:
        """``alpha * op(B) @ op(A) + beta * D`` before it is rounded, a matrix. With an empty operand that is D times beta, or zeros."""
        xp = self._arrays
        if job.shape.empty:
            shape = (job.shape.rows, job.shape.columns)
            return xp.wide(xp.reshape(job.D, shape)) if job.beta else xp.full(shape, 0, xp.accumulator(job.dtype), a_buffer(job.A))
        undo = self._quantizing.blocks.reader.mixed_transform(job.A, copy_of(job.transA), job.B, copy_of(not job.transB))
        result, scale_a, scale_b = self._bare_product(job, undo)
        if scale_a is not None and scale_b is not None and len(scale_a) == len(scale_b) == 1:
            result = xp.times(result, scale_a * scale_b)
        else:
            for scale, shape in ((scale_b, (-1, 1)), (scale_a, (1, -1))):
                if scale is not None:
                    result = xp.times(result, xp.reshape(scale, shape))
        if job.alpha != 1.0:
            result = xp.times(result, job.alpha)
        return self._accumulated_product(result, xp.reshape(job.D, result.shape), job.beta) if job.beta else result

    def _store_product(self, job: _Job, result: Array) -> Any:
        xp = self._arrays
        result = xp.reshape(result, job.shape.output)
        if job.quantizer is None:
            return xp.cast(result, job.dtype) if job.D is None else xp.put(job.D, result)
        if job.per_tensor:
            return self._emit(result, job.quantizer, job.dtype, job.D)
        return self._quantizing.tensor(xp.cast(result, job.dtype), job.quantizer, job.dtype, job.D)


def copy_of(along_rows: bool) -> str:
    """The copy of an operand that is multiplied: ``along_rows`` says whether the contracted dimension is its last."""
    return "rowwise" if along_rows else "columnwise"
