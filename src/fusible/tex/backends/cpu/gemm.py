"""The matrix product with an FP8 operand, by the compiled kernel: it decodes while packing, and scales, adds, activates and rounds at the store."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusible import cpp_extensions as native
from fusible.tex.backends.cpu.blocks import StoredCodes, codes_of_blocks, fails_to_cancel, operand_of_blocks, stored_codes
from fusible.tex.backends.cpu.kernel_calls import call as kernel_call
from fusible.tex.backends.cpu.kernel_calls import specialized
from fusible.tex.backends.cpu.layouts import as_read
from fusible.tex.backends.cpu.output import produce
from fusible.tex.backends.cpu.quantize import dequantize, quantize_tensor, sums_of_columns
from fusible.tex.calls.gemm import GemmBySteps, GemmJob, GemmTypes, check_bias, check_gelu_input
from fusible.tex.enums import DType
from fusible.tex.formats import WAYS, format_of, is_quantized, nominal, scheme_of, transposed
from fusible.tex.formats.block_reading import Codes
from fusible.tex.interface.declare import CallArguments, Request, inherited, requires
from fusible.tex.interface.kernel_calls import Room
from fusible.tex.interface.specialize import SpecializedCall, specialized_by
from fusible.tex.protocol import to_torch

__all__ = ["GemmKernels", "products_gain"]

_Job = GemmJob[torch.dtype]
_BF16 = ("cpu", torch.bfloat16)
_BF16_NAMES = (None, torch.bfloat16, DType.kBFloat16)
_NO_GELU, _GELU, _GELU_GRADIENT = range(3)


def products_gain(A: Hashable, B: Hashable, is_plain: bool) -> str | None:
    """None where the kernel is the better one for operands of these kinds; otherwise what it is better for.

    ``is_plain``: torch's own product of bfloat16 serves what is wanted, which is as fast on tiles. For the rest torch has a product of float32.
    """
    if any(isinstance(kind, tuple) and len(kind) == 3 for kind in (A, B)):
        return None
    level = native.get_level()
    if A == B == _BF16 and (level == "avx512bf16" or (level == "amx" and not is_plain)):
        return None
    most = (
        "serves products with an FP8 operand; of bfloat16 where the CPU has dot products of it, and on tiles what is more than op(B) @ A in bfloat16"
    )
    return f"{most}; others are left to torch's own"


def _better_here(request: Request) -> str | None:
    gives_bf16 = request["D"] is None and request["output_dtype"] in _BF16_NAMES
    is_plain = gives_bf16 and request["bias"] in (None, _BF16) and not (request["gelu"] or request["transB"])
    return products_gain(request["A"], request["B"], is_plain)


def _stored(x: Any, transpose: bool, way: str) -> StoredCodes | None:
    """The operand ``x``, where it lies as it is read."""
    if as_read(x):
        return StoredCodes(x, transpose, x.dtype, None, False, 1.0)
    if not is_quantized(x):
        return None
    if format_of(x).per_tensor:
        if x._data is None or not as_read(x._data, x._scale_inv):
            return None
        return StoredCodes(x._data, transpose, int(x._fp8_dtype), None, False, x._scale_inv)
    stored = stored_codes(x, way)
    return None if stored is None else stored._replace(turned=transpose != stored.turned)


def _specialized(self: GemmKernels, call: CallArguments) -> SpecializedCall | None:
    """Of a product that is alone, or goes with a bias, a GELU, or what it is added to."""
    ways = WAYS[not call.transA], WAYS[call.transB]
    if any(x is not None for x in (call.quantizer, call.comm_overlap, call.extra_output)) or fails_to_cancel(call.A, ways[0], call.B, ways[1]):
        return None
    if not all(x is None or as_read(x) for x in (call.bias, call.D)) or (call.grad and (call.gelu or call.bias is not None)):
        return None
    job = self._gemm_types.check(call.A, call.transA, call.B, call.transB, call.D, None, call.output_dtype, call.accumulate, call.alpha, call.beta)
    if job.shape.empty or job.alpha != 1.0 or (job.D is not None and call.gelu):
        return None
    left, right = _stored(call.B, call.transB, ways[1]), _stored(call.A, call.transA, ways[0])
    if left is None or right is None or left.tiled:
        return None
    result, pre = Room(job.dtype, job.shape.output) if job.D is None else job.D, None
    if call.gelu:
        pre = Room(to_torch(call.bias_type) if job.quantized and call.bias_type is not None else job.dtype, job.shape.output)
    of_left = {"left": left.data, "left_transposed": left.turned, "left_dtype": left.dtype, "left_scale": left.factor, "left_scales": left.scales}
    of_right = {"right": right.data, "right_transposed": right.turned, "right_dtype": right.dtype, "right_scale": right.factor}
    of_right |= {"right_scales": right.scales, "right_tiled": right.tiled}
    epilogue = {"bias": call.bias, "addend": job.D, "beta": job.beta, "gelu": _GELU if call.gelu else _NO_GELU, "pre_gelu": pre}
    product = kernel_call("gemm", **of_left, **of_right, dst=result, dtype=job.dtype, **epilogue)
    return specialized([result, None, pre, None], *left.before, *right.before, product)


class GemmKernels(GemmBySteps):
    _gemm_types = GemmTypes(frozenset({torch.float32, torch.bfloat16, torch.float16}), nominal, to_torch)
    generic_gemm = specialized_by(_specialized)(requires(_better_here)(inherited(GemmBySteps.generic_gemm)))

    def _gemm(self, job: _Job, bias: Any, bias_type: Any, gelu: bool, gelu_in: Any, grad: bool) -> tuple[Any, Any, Any]:
        if grad:
            return _backward(job, bias, gelu, gelu_in)
        if bias is not None:
            check_bias(bias, job)
            bias = None if job.shape.empty else bias.contiguous()
        pre_gelu = None
        if gelu:
            pre_gelu_dtype = to_torch(bias_type) if job.quantized and bias_type is not None else job.dtype
            pre_gelu = torch.empty(job.shape.output, dtype=pre_gelu_dtype)
        epilogue: dict[str, Any] = {} if bias is None else {"bias": bias}
        if gelu:
            epilogue |= {"gelu": _GELU, "pre_gelu": pre_gelu}
        return _product(job, **epilogue), None, pre_gelu


def _backward(job: _Job, bias: Any, gelu: bool, gelu_in: Any) -> tuple[Any, Tensor | None, None]:
    if not gelu:
        return _product(job), None if bias is None else _row_sum(job.B, job.dtype), None
    check_gelu_input(gelu_in, job)
    sums = None if bias is None else torch.empty(job.shape.columns, dtype=torch.float32)
    step = _NO_GELU if job.shape.empty else _GELU_GRADIENT
    result = _product(job, gelu=step, pre_gelu=gelu_in.contiguous(), column_sums=sums)
    return result, None if sums is None else sums.to(job.dtype), None


def _product(job: _Job, **epilogue: Any) -> Any:
    """``D`` by the native kernel. Its left operand is ``B``: rows come first there, as in memory."""
    ways = WAYS[not job.transA], WAYS[job.transB]
    undo = fails_to_cancel(job.A, ways[0], job.B, ways[1])
    left, right = (None, None) if job.shape.empty else (_codes(job.B, ways[1], undo), _codes(job.A, ways[0], undo))
    left = None if left is not None and left.tiled else left
    if left is not None:
        epilogue["left_scales"] = left.scales
    if right is not None:
        epilogue |= {"right_scales": right.scales, "right_tiled": right.tiled}
    operands = (*_operand(job.B, job.transB, ways[1], undo, left), *_operand(job.A, job.transA, ways[0], undo, right))
    if job.D is not None and job.beta:
        epilogue |= {"addend": job.D.contiguous(), "beta": job.beta}
    if job.alpha != 1.0:
        epilogue["alpha"] = job.alpha

    kernel = partial(native.gemm, **epilogue)
    if job.quantizer is None or job.quantized or not scheme_of(job.quantizer).per_tensor:
        return produce(kernel, operands, job.shape.output, job.dtype, job.quantizer, job.D)
    return quantize_tensor(produce(kernel, operands, job.shape.output, job.dtype, None), job.quantizer, job.D)


def _codes(x: Any, way: str, undo: bool) -> Codes | None:
    """An operand in blocks as it is stored, where the kernel reads it so."""
    return None if not is_quantized(x) or format_of(x).per_tensor else codes_of_blocks(x, way, undo)


def _operand(x: Any, transpose: bool, way: str, undo: bool, codes: Codes | None) -> tuple[Tensor, bool, Any, Any]:
    """A stored matrix, whether it is transposed, what its elements are and their factor: as the kernel takes them. ``way``: the copy whose lines are
    contracted; ``undo`` takes back a transform of them; ``codes``: of an operand that is read as it lies."""
    if codes is not None:
        return codes.data, transpose != codes.turned, int(codes.dtype), codes.factor
    if not is_quantized(x):
        return x.contiguous(), transpose, x.dtype, 1.0
    if not format_of(x).per_tensor:
        values, turned, factor = operand_of_blocks(x, way, undo)
        return values, transpose != turned, values.dtype, factor
    if x._data is not None:
        return x._data.contiguous(), transpose, int(x._fp8_dtype), x._scale_inv
    data = transposed(x)
    return data.reshape(data.shape[0], -1), not transpose, int(x._fp8_dtype), x._scale_inv


def _row_sum(B: Any, dtype: torch.dtype) -> Tensor:
    """The bias gradient of a weight-gradient product: B summed over its rows."""
    return sums_of_columns(dequantize(B, torch.float32) if is_quantized(B) else B).to(dtype)
