"""Quantize, dequantize and transpose by the compiled kernels: one read of the input gives data, transposed data, amax and bias gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch import Tensor

from fusible import cpp_extensions as native
from fusible.errors import ArgumentError, DTypeError, ShapeError, expected
from fusible.tex.backends.cpu.blocks import quantize_blocks, takes, values_of_blocks
from fusible.tex.backends.cpu.layouts import HOST
from fusible.tex.backends.cpu.sums import sums_of_columns
from fusible.tex.calls.inference_tensors import writing
from fusible.tex.calls.layout import check_disjoint
from fusible.tex.factories import build_quantized
from fusible.tex.formats import format_of, is_quantized, logical_shape, nominal, scheme_of, transposed, usages
from fusible.tex.interface.declare import Request, requires
from fusible.tex.interface.quantize import Quantize
from fusible.tex.interface.recipe import Recipe
from fusible.tex.interface.transpose import Transpose
from fusible.tex.protocol import (
    FLT_MAX,
    FP8_MAX,
    QuantizerLike,
    check_amax_buffer,
    check_bytes,
    check_no_part,
    check_shape,
    fp8_format,
    process_group,
    to_torch,
    transposed_shape,
)
from fusible.tex.selection.dispatch import hand_over

__all__ = ["QuantizeKernels", "check_output", "dequantize", "quantize_tensor", "write_delayed"]

_LARGEST = {dtype: np.float32(largest) for dtype, largest in FP8_MAX.items()}


def _with_quantizer(request: Request) -> str | None:
    return "serves Float8 quantizers, and there is none" if request["quantizer"] is None else None


class QuantizeKernels(Quantize, Recipe, Transpose):
    @requires(_with_quantizer)
    def quantize(self, tensor: Any, quantizer: QuantizerLike | None, output: Any = None, noop: Any = None) -> Any:
        if not takes(quantizer):
            return hand_over(self, "quantize", tensor, quantizer, output, noop)  # type: ignore[arg-type]
        x = dequantize(tensor, nominal(tensor)) if is_quantized(tensor) else tensor
        return quantize_tensor(x, quantizer, output, noop)

    @requires(_with_quantizer)
    def bgrad_quantize(self, input: Tensor, quantizer: QuantizerLike | None) -> list[Any]:
        if not takes(quantizer):
            return hand_over(self, "bgrad_quantize", input, quantizer)  # type: ignore[arg-type]
        bias_grad = torch.empty(input.shape[-1], dtype=torch.float32, device=HOST)
        quantized = quantize_tensor(input, quantizer, bias_grad=bias_grad)
        return [bias_grad if input.dtype is torch.float32 else bias_grad.to(input.dtype), quantized]

    def dequantize(self, input: Any, otype: Any) -> Any:
        return dequantize(input, otype)

    def fp8_transpose(self, input: Tensor, dtype: Any, *, out: Any) -> Any:
        fp8_format(dtype)
        check_bytes(input, "input of fp8_transpose")
        shape = transposed_shape(input.shape)
        if out is None:
            out = torch.empty(shape, dtype=torch.uint8, device=HOST)
        else:
            check_bytes(out, "out of fp8_transpose")
            check_shape(out, shape, "out of fp8_transpose")
            check_disjoint(out, [input], "out of fp8_transpose")
        compact = out if out.is_contiguous() else torch.empty(shape, dtype=torch.uint8, device=HOST)
        native.transpose_bytes(input.contiguous().view(torch.uint8), compact.view(torch.uint8))
        return out if compact is out else out.copy_(compact.view(out.dtype))

    def compute_amax(self, input: Tensor, amax: Tensor) -> None:
        check_amax_buffer(amax, "amax of compute_amax")
        native.amax(input.contiguous(), amax.view(1))


def _rowwise(x: Any) -> Tensor:
    if x._data is not None:
        return x._data.contiguous()
    columnwise = transposed(x)
    if columnwise is None:
        raise ArgumentError(expected("data or transposed data", of="a quantized tensor", got="neither", do="quantize it again"))
    return columnwise.movedim(0, -1).contiguous()


def dequantize(x: Any, otype: Any) -> Tensor:
    """The values of a quantized tensor, rounded to ``otype``."""
    if not format_of(x).per_tensor:
        return values_of_blocks(x, to_torch(otype))
    result = torch.empty(logical_shape(x), dtype=to_torch(otype), device=HOST)
    native.dequantize(_rowwise(x), result, x._scale_inv, int(x._fp8_dtype))
    return result


def quantize_tensor(x: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None, bias_grad: Tensor | None = None) -> Any:
    """``x`` quantized; into ``output``, where given, unless ``noop[0] == 1``. ``bias_grad``, where given, gets the sum of ``x`` over its rows."""
    x = x.contiguous()
    if not scheme_of(quantizer).per_tensor:
        if bias_grad is not None:
            sums_of_columns(x, bias_grad)
        return quantize_blocks(x, quantizer, output, noop)
    fp8 = fp8_format(quantizer.dtype)
    if output is not None:
        check_output(output, x.shape)
    if scheme_of(quantizer).delayed:

        def write(data: Any, dtype: int, transpose: Any, scale: Any, amax: Any, keep: bool) -> None:
            native.quantize(x, data, scale, dtype, transpose, amax, keep, bias_grad, noop)

        return write_delayed(write, x.shape, x.dtype, quantizer, output, noop)
    data, transpose = _buffers(x.shape, quantizer, output)
    scale = _scale_of(_amax(x, quantizer), fp8, quantizer)
    native.quantize(x, data, float(scale), int(fp8), transpose, None, False, bias_grad, noop)
    scale_inv = torch.tensor([np.float32(1.0) / scale], dtype=torch.float32, device=HOST)
    if output is None:
        return build_quantized(quantizer, shape=x.shape, dtype=x.dtype, data=data, data_transpose=transpose, scale_inv=scale_inv, fp8_dtype=fp8)
    return _finish(output, data, transpose, scale_inv, fp8, noop)


def write_delayed(
    write: Callable[..., Any], shape: Sequence[int], dtype: torch.dtype, quantizer: Any, output: Any = None, noop: Tensor | None = None
) -> Any:
    """A tensor, or ``output``, filled by ``write(data, fp8_dtype, data_transpose, scale, amax, accumulate_amax)``, whose scale is known before.

    The quantizer's amax is raised, or set where it has none. ``dtype`` is the nominal one.
    """
    fp8 = fp8_format(quantizer.dtype)
    data, transpose = _buffers(shape, quantizer, output)
    scale = quantizer.scale.view(1)
    former = quantizer.amax
    recorded = former if former is not None and former.numel() else None  # an empty one is of a quantizer that nobody asks for it
    amax, keep = (torch.empty(1, dtype=torch.float32, device=HOST), False) if recorded is None else (recorded.view(1), True)
    write(data, int(fp8), transpose, scale, amax, keep)
    if former is None:
        quantizer.amax = amax
    scale_inv = scale.reciprocal()
    if output is None:
        return build_quantized(quantizer, shape=shape, dtype=dtype, data=data, data_transpose=transpose, scale_inv=scale_inv, fp8_dtype=fp8)
    return _finish(output, data, transpose, scale_inv, fp8, noop)


def _amax(x: Tensor, quantizer: Any) -> float:
    if not quantizer.with_amax_reduction:
        return native.amax(x)
    amax = torch.tensor([native.amax(x)], dtype=torch.float32, device=HOST)
    torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=process_group(quantizer.amax_reduction_group))
    return amax.item()


def _scale_of(amax: float, fp8: int, quantizer: Any) -> np.float32:
    """``fp8_max / max(amax, epsilon)`` in fp32, at most FLT_MAX; 1 where that amax is 0, infinite or NaN; perhaps rounded down to a power of two."""
    value = np.float32(max(amax, quantizer.amax_epsilon) if amax == amax else amax)
    if not 0 < value <= FLT_MAX:
        return np.float32(1.0)
    with np.errstate(over="ignore"):
        scale = np.minimum(_LARGEST[fp8] / value, np.float32(FLT_MAX))
    if quantizer.force_pow_2_scales:
        return (scale.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
    return scale


def _buffers(shape: Sequence[int], quantizer: QuantizerLike, output: Any) -> tuple[Tensor | None, Tensor | None]:
    """Where the data and the transposed data go: what the quantizer asks for and what the output has."""
    rowwise, columnwise = usages(quantizer)
    # Kernels write without gaps: where there are some, beside the buffer.
    data = output._data.contiguous() if output is not None and output._data is not None else None
    transpose = output._transpose.contiguous() if output is not None and output._transpose is not None else None
    if rowwise and data is None:
        data = torch.empty(tuple(shape), dtype=torch.uint8, device=HOST)
    if columnwise and transpose is None:
        transpose = torch.empty(transposed_shape(shape), dtype=torch.uint8, device=HOST)
    return data, transpose if columnwise or data is None else None


def check_output(output: Any, shape: Sequence[int]) -> None:
    """Raise unless ``output`` is a quantized tensor of ``shape``."""
    if not is_quantized(output):
        got = type(output).__qualname__
        raise DTypeError(expected("a quantized tensor", of="output of quantize", got=got, do="make one by quantizer.make_empty"))
    check_no_part(output, "output of quantize")
    found = logical_shape(output)
    if tuple(shape) != found:
        raise ShapeError(expected(f"shape {list(found)}", of="the tensor quantized into output", got=list(shape), do="pass a tensor of that shape"))


def _finish(output: Any, data: Tensor | None, transpose: Tensor | None, scale_inv: Tensor, fp8: Any, noop: Tensor | None) -> Any:
    """Put the results into ``output``: the kernel has written the buffers that it already had."""
    output._data = _in_place(output._data, data)
    output._transpose_invalid = transpose is None
    output._transpose = _in_place(output._transpose, transpose) if transpose is not None else output._transpose
    skip = noop is not None and noop.item() == 1
    if not skip:
        with writing(output._scale_inv):
            output._scale_inv.copy_(scale_inv)
    output._fp8_dtype = fp8
    return output


def _in_place(former: Tensor | None, written: Tensor | None) -> Tensor | None:
    """What was ``written``, in the buffer that there was."""
    if former is None or written is None or former is written:
        return written
    with writing(former):
        return former.copy_(written)
