"""The matrix product on lazy tensors: checks, product, epilogue, store."""

from __future__ import annotations

from typing import Any

from fusible import lazy
from fusible.lazy import Tensor
from fusible.tex.backends.xla import native_product
from fusible.tex.backends.xla.activation import POINTWISE
from fusible.tex.backends.xla.block_formats import BLOCKS
from fusible.tex.backends.xla.dtypes import to_lazy
from fusible.tex.backends.xla.fp8 import as_float8
from fusible.tex.backends.xla.kernels import LazyKernels
from fusible.tex.backends.xla.operands import flat, fp32, nominal
from fusible.tex.calls.gemm import GemmJob, GemmTypes
from fusible.tex.formats import PLAIN, format_of, transposed
from fusible.tex.formulas.gemm import GemmFormulas, copy_of

__all__ = ["GemmKernels"]


class GemmKernels(LazyKernels, GemmFormulas):
    _gemm_types = GemmTypes(frozenset({lazy.float32, lazy.bfloat16, lazy.float16}), nominal, to_lazy)
    _gelu = POINTWISE["gelu"]

    def _gemm(self, job: GemmJob[Any], bias: Any, bias_type: Any, gelu: bool, gelu_in: Any, grad: bool) -> tuple[Any, Any, Any]:
        operands = native_product.operands(job)
        if operands is not None:
            return native_product.product(job, operands, bias, bias_type, gelu, gelu_in, grad)
        return super()._gemm(job, bias, bias_type, gelu, gelu_in, grad)

    def _bare_product(self, job: GemmJob[Any], undo: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        (a, a_lies, scale_a), (b, b_lies, scale_b) = _operand(job.A, job.transA, undo), _operand(job.B, not job.transB, undo)
        if a.dtype is not b.dtype and not (a.dtype.is_float8 and b.dtype.is_float8):
            a, b = fp32(a), fp32(b)
        contracting = ((0 if job.transB != b_lies else 1,), (1 if job.transA != a_lies else 0,))
        return lazy.dot_general(b, a, contracting, dtype=lazy.float32), scale_a, scale_b

    def _accumulated_product(self, result: Tensor, D: Tensor, beta: float) -> Tensor:
        return result + fp32(D) * beta


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
        matrix, factor = BLOCKS.reader.values(x, copy_of(along_rows), undo)
        return matrix, False, factor
    if x._data is not None:
        return flat(as_float8(x._data, x._fp8_dtype)), False, x._scale_inv
    data = as_float8(transposed(x), x._fp8_dtype)
    return lazy.reshape(data, (data.shape[0], -1)), True, x._scale_inv
