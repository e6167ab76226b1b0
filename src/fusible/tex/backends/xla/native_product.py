"""The matrix product by the native kernel of a program: it decodes while packing, and scales, adds, activates and rounds at the store."""

from __future__ import annotations

from typing import Any, NamedTuple

from fusible import lazy
from fusible.lazy import Tensor
from fusible.tex.backends.xla import native
from fusible.tex.backends.xla.block_formats import BLOCKS
from fusible.tex.backends.xla.dtypes import to_lazy
from fusible.tex.backends.xla.native import Result
from fusible.tex.backends.xla.native_blocks import codes_of_blocks
from fusible.tex.backends.xla.operands import dense, flat, row_sum
from fusible.tex.backends.xla.quantizing import QUANTIZING, produce
from fusible.tex.calls.gemm import GemmJob, check_bias, check_gelu_input
from fusible.tex.formats import PLAIN, format_of, is_quantized, scheme_of, transposed
from fusible.tex.formulas.gemm import copy_of
from fusible.tex.protocol import fp8_format

__all__ = ["operands", "product"]

_Job = GemmJob[lazy.dtype]
_GELU, _GELU_GRADIENT = 1, 2


class _Operand(NamedTuple):
    """A stored matrix, transposed or not; what its elements are, their factor, and where they are in blocks the scales of these."""

    data: Tensor
    turned: bool
    dtype: int
    factor: Tensor | float
    scales: Tensor | None = None
    tiled: bool = False
    scale_type: int | None = None
    """What the bytes of scales stand for, where it is not what they are for codes of that type."""

    def arguments(self, side: str, transpose: bool) -> dict[str, Any]:
        """As the kernel takes it."""
        named = {side: self.data, f"{side}_transposed": transpose != self.turned, f"{side}_dtype": self.dtype, f"{side}_scale": self.factor}
        named |= {} if self.scales is None else {f"{side}_scales": self.scales}
        named |= {} if self.scale_type is None else {f"{side}_scales_bytes_are": self.scale_type}
        return named | ({f"{side}_tiled": True} if self.tiled else {})


def operands(job: _Job) -> tuple[_Operand, _Operand] | None:
    """B and A as the kernel reads them, rows first as in memory; None where it does not make this product."""
    if job.shape.empty or (job.D is not None and is_quantized(job.D)) or (_is_plain(job) and not native.multiplies_halves(job.A, job.B)):
        return None
    ways = copy_of(job.transA), copy_of(not job.transB)
    undo = BLOCKS.reader.mixed_transform(job.A, ways[0], job.B, ways[1])
    left, right = _operand(job.B, ways[1], undo), _operand(job.A, ways[0], undo)
    if left is None or right is None or left.tiled or not native.serves(left.data, right.data):
        return None
    return left, right


def _is_plain(job: _Job) -> bool:
    return format_of(job.A) is PLAIN and format_of(job.B) is PLAIN


def product(
    job: _Job, of: tuple[_Operand, _Operand], bias: Tensor | None, bias_type: Any, gelu: bool, gelu_in: Tensor | None, grad: bool
) -> tuple[Any, Any, Any]:
    """``(D, bias_grad, pre_gelu_out)`` of a job with these operands."""
    if grad:
        return _backward(job, of, bias, gelu, gelu_in)
    epilogue: dict[str, Any] = {}
    if bias is not None:
        check_bias(bias, job)
        epilogue["bias"] = bias
    if gelu:
        pre_gelu_dtype = to_lazy(bias_type) if job.quantized and bias_type is not None else job.dtype
        epilogue |= {"gelu": _GELU, "pre_gelu": Result(job.shape.output, pre_gelu_dtype)}
    result, written = _product(job, of, epilogue)
    return result, None, written.get("pre_gelu")


def _backward(job: _Job, of: tuple[_Operand, _Operand], bias: Tensor | None, gelu: bool, gelu_in: Tensor | None) -> tuple[Any, Tensor | None, None]:
    if not gelu:
        sums = None if bias is None else row_sum(dense(job.B) if is_quantized(job.B) else job.B)
        return _product(job, of, {})[0], None if sums is None else lazy.cast(sums, job.dtype), None
    check_gelu_input(gelu_in, job)
    epilogue: dict[str, Any] = {"gelu": _GELU_GRADIENT, "pre_gelu": gelu_in}
    if bias is not None:
        epilogue["column_sums"] = Result((job.shape.columns,), lazy.float32)
    result, written = _product(job, of, epilogue)
    return result, None if bias is None else lazy.cast(written["column_sums"], job.dtype), None


def _product(job: _Job, of: tuple[_Operand, _Operand], epilogue: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """``D`` by the native kernel, and what else it writes."""
    arguments = {**of[0].arguments("left", job.transB), **of[1].arguments("right", job.transA), "alpha": job.alpha, **epilogue}
    if job.D is not None and job.beta:
        arguments |= {"addend": job.D, "beta": job.beta}
    writes_codes = job.quantizer is not None and scheme_of(job.quantizer).delayed and job.quantized
    result, written = produce("gemm", arguments, job.shape.output, job.dtype, job.quantizer if writes_codes else None)
    if job.quantizer is not None and not writes_codes:
        result = QUANTIZING.tensor(result, job.quantizer, job.dtype)
    return (result if job.D is None else job.D.assign_(result)), written


def _operand(x: Any, way: str, undo: bool) -> _Operand | None:
    """``way``: the copy whose lines are contracted; ``undo`` takes back a transform of them."""
    form = format_of(x)
    if form is PLAIN:
        return _Operand(flat(x), False, native.dtype_number(x.dtype), 1.0) if native.takes(x) else None
    if not form.per_tensor:
        codes = codes_of_blocks(BLOCKS.reader, x, way, undo)
        if codes is None:
            return None
        told = native.E8M0 if form.packed > 1 and form.scales_are_exponents else None
        return _Operand(codes.data, codes.turned, int(codes.dtype), codes.factor, codes.scales, codes.tiled, told)
    if x._data is not None:
        return _Operand(flat(x._data), False, int(fp8_format(x._fp8_dtype)), x._scale_inv)
    data = transposed(x)
    return _Operand(lazy.reshape(data, (data.shape[0], -1)), True, int(fp8_format(x._fp8_dtype)), x._scale_inv)
