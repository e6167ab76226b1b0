"""Quantize, dequantize, on lazy tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusible import lazy
from fusible.errors import DTypeError, NotServedError, expected
from fusible.lazy import Tensor
from fusible.tex.backends.xla.block_formats import quantize_blocks
from fusible.tex.backends.xla.dtypes import to_lazy
from fusible.tex.backends.xla.fp8 import encode, scale_from_amax, tensor_amax, transpose_bytes, unless
from fusible.tex.backends.xla.number_formats import reciprocal
from fusible.tex.backends.xla.operands import dense, fp32, plain, row_sum
from fusible.tex.calls.quantize import check_sections, given_amaxes, quantize_each
from fusible.tex.factories import build_quantized
from fusible.tex.formats import FLOAT8, PLAIN, format_of, is_quantized, logical_shape, scheme_of, update_buffers, usages
from fusible.tex.interface.quantize import Quantize
from fusible.tex.protocol import check_shape, fp8_format, to_torch

__all__ = ["QuantizeKernels", "emit", "quantize_tensor"]


class QuantizeKernels(Quantize):
    def quantize(self, tensor: Any, quantizer: Any, output: Any = None, noop: Any = None) -> Any:
        x = plain(tensor)
        return quantize_tensor(x, quantizer, x.dtype, output, noop)

    def dequantize(self, input: Any, otype: Any) -> Any:
        if not is_quantized(input):
            raise DTypeError(expected("a quantized tensor", of="dequantize", got=type(input).__qualname__, do="quantize it first, or cast it"))
        return lazy.cast(dense(input), to_lazy(otype))

    def bgrad_quantize(self, input: Any, quantizer: Any) -> list[Any]:
        x = plain(input)
        bias_grad = lazy.cast(row_sum(x), x.dtype)
        return [bias_grad, input if quantizer is None else quantize_tensor(x, quantizer, x.dtype)]

    def multi_tensor_quantize(self, tensor_list: Sequence[Any], quantizer_list: Sequence[Any]) -> list[Any]:
        return quantize_each(self.quantize, tensor_list, quantizer_list, "multi_tensor_quantize")

    def split_quantize(
        self, tensor: Any, split_sections: Sequence[int], quantizer_list: Sequence[Any], disable_bulk_allocation: bool = False
    ) -> list[Any]:
        x, sections = plain(tensor), list(split_sections)
        check_sections(sections, x, quantizer_list)
        return self.multi_tensor_quantize(list(lazy.split(x[: sum(sections)], sections, 0)), quantizer_list)

    def nvfp4_quantize_with_amax(self, tensor: Any, quantizer: Any, rowwise_amax: Any, columnwise_amax: Any) -> Any:
        x = plain(tensor)
        given = given_amaxes(x, quantizer, rowwise_amax, columnwise_amax, lazy.float32)
        return quantize_blocks(x, quantizer, x.dtype, amaxes={way: lazy.reshape(amax, shape) for way, (amax, shape) in given.items()})


def quantize_tensor(x: Tensor, quantizer: Any, dtype: lazy.dtype, output: Any = None, noop: Tensor | None = None) -> Any:
    """``x`` quantized, its nominal dtype being ``dtype``; into ``output``, where given, unless ``noop[0] == 1``."""
    scheme = scheme_of(quantizer)
    if scheme.format is PLAIN:
        raise DTypeError(expected("a quantizer", of="quantize", got="None", do="pass a Float8 quantizer"))
    if not scheme.per_tensor:
        return quantize_blocks(x, quantizer, dtype, output, noop)
    if output is not None:
        _check_output(output, x)
    fp8 = fp8_format(quantizer.dtype)
    amax = tensor_amax(x)
    if scheme.delayed:
        scale = lazy.reshape(quantizer.scale, (1,))
        _raise_amax(quantizer, amax, noop)
    else:
        if quantizer.with_amax_reduction:
            raise NotServedError(
                expected("no amax reduction", of="quantizing a lazy tensor", got="with_amax_reduction", do="reduce amaxes outside of the program")
            )
        scale = scale_from_amax(amax, fp8, quantizer.force_pow_2_scales, quantizer.amax_epsilon)
    data = encode(fp32(x) * scale, fp8)
    scale_inv = reciprocal(scale)
    if output is not None:
        return _fill(output, quantizer, data, scale_inv, noop)
    rowwise, columnwise = usages(quantizer)
    return build_quantized(
        quantizer,
        shape=x.shape,
        dtype=to_torch(dtype),
        data=data if rowwise else None,
        data_transpose=transpose_bytes(data) if columnwise else None,
        scale_inv=scale_inv,
        fp8_dtype=fp8,
    )


def emit(result: Tensor, quantizer: Any, dtype: lazy.dtype, output: Any = None) -> Any:
    """A kernel's fp32 ``result`` quantized: by delayed scaling from fp32, by the others after rounding to ``dtype``."""
    if not scheme_of(quantizer).delayed:
        result = lazy.cast(result, dtype)
    return quantize_tensor(result, quantizer, dtype, output)


def _raise_amax(quantizer: Any, amax: Tensor, noop: Tensor | None) -> None:
    former = quantizer.amax
    if former is None:
        quantizer.amax = amax
        return
    amax = lazy.maximum(former, lazy.reshape(amax, former.shape))
    quantizer.amax = amax if noop is None else unless(noop, former, amax)


def _check_output(output: Any, x: Tensor) -> None:
    if format_of(output) is not FLOAT8:
        got = type(output).__qualname__
        raise DTypeError(expected("a quantized tensor", of="output of quantize", got=got, do="quantize into one that quantize gave"))
    shape = logical_shape(output)
    if shape != tuple(x.shape):
        check_shape(x, shape, "the tensor quantized into output")


def _fill(output: Any, quantizer: Any, data: Tensor, scale_inv: Tensor, noop: Tensor | None) -> Any:
    def put(old: Tensor | None, new: Tensor) -> Tensor:
        if old is None:
            return new
        return old.assign_(new if noop is None else unless(noop, old, new))

    update_buffers(output, quantizer, data, transpose_bytes, put)
    put(output._scale_inv, lazy.reshape(scale_inv, output._scale_inv.shape))
    return output
