"""Quantize, dequantize."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from fusible.errors import DTypeError, expected
from fusible.tex.backends.torch_backend.block_formats import empty_blocks, quantize_blocks
from fusible.tex.backends.torch_backend.fp8 import encode, scale_from_amax, tensor_amax, transpose_bytes
from fusible.tex.backends.torch_backend.operands import dense, flat, plain
from fusible.tex.calls.inference_tensors import writing
from fusible.tex.calls.quantize import check_sections, given_amaxes, quantize_each
from fusible.tex.factories import build_quantized
from fusible.tex.formats import FLOAT8, PLAIN, format_of, is_quantized, logical_shape, scheme_of, update_buffers, usages
from fusible.tex.interface.quantize import Quantize
from fusible.tex.protocol import accumulator, check_same_device, check_shape, fp8_format, to_torch, transposed_shape

__all__ = ["QuantizeKernels", "emit", "quantize_tensor", "reduced"]


class QuantizeKernels(Quantize):
    def quantize(self, tensor: Any, quantizer: Any, output: Any = None, noop: Any = None) -> Any:
        x = plain(tensor)
        return quantize_tensor(x, quantizer, x.dtype, output, noop)

    def dequantize(self, input: Any, otype: Any) -> Any:
        if not is_quantized(input):
            raise DTypeError(expected("a quantized tensor", of="dequantize", got=type(input).__qualname__, do="quantize it first, or cast it"))
        return dense(input).to(to_torch(otype)).contiguous()

    def bgrad_quantize(self, input: Any, quantizer: Any) -> list[Any]:
        x = plain(input)
        bias_grad = flat(x).sum(0, dtype=accumulator(x.dtype)).to(x.dtype)
        return [bias_grad, input if quantizer is None else quantize_tensor(x, quantizer, x.dtype)]

    def multi_tensor_quantize(self, tensor_list: Sequence[Any], quantizer_list: Sequence[Any]) -> list[Any]:
        return quantize_each(self.quantize, tensor_list, quantizer_list, "multi_tensor_quantize")

    def split_quantize(
        self, tensor: Any, split_sections: Sequence[int], quantizer_list: Sequence[Any], disable_bulk_allocation: bool = False
    ) -> list[Any]:
        x, sections = plain(tensor), list(split_sections)
        check_sections(sections, x, quantizer_list)
        return self.multi_tensor_quantize(torch.split(x[: sum(sections)], sections), quantizer_list)

    def nvfp4_quantize_with_amax(self, tensor: Any, quantizer: Any, rowwise_amax: Any, columnwise_amax: Any) -> Any:
        x = plain(tensor)
        given = given_amaxes(x, quantizer, rowwise_amax, columnwise_amax)
        return quantize_blocks(x, quantizer, x.dtype, amaxes={way: amax.reshape(shape).clone() for way, (amax, shape) in given.items()})

    def create_empty_quantized_tensor(self, quantizer: Any, shape: Sequence[int], dtype: Any, device: Any, pin_memory: bool) -> Any:
        form = scheme_of(quantizer).format
        if form is PLAIN:
            return torch.empty(tuple(shape), dtype=to_torch(dtype), device=device, pin_memory=bool(pin_memory))
        if not form.per_tensor:
            return empty_blocks(quantizer, shape, to_torch(dtype), device, bool(pin_memory))
        rowwise, columnwise = usages(quantizer)

        def empty(shape: Sequence[int], dtype: torch.dtype = torch.uint8) -> Tensor:
            return torch.empty(tuple(shape), dtype=dtype, device=device, pin_memory=bool(pin_memory))

        return build_quantized(
            quantizer,
            shape=tuple(shape),
            dtype=to_torch(dtype),
            data=empty(shape) if rowwise else None,
            data_transpose=empty(transposed_shape(shape)) if columnwise else None,
            scale_inv=empty((1,), torch.float32),
            fp8_dtype=fp8_format(quantizer.dtype),
        )


def quantize_tensor(x: Tensor, quantizer: Any, dtype: torch.dtype, output: Any = None, noop: Tensor | None = None, amax: Tensor | None = None) -> Any:
    """``x`` quantized, its nominal dtype being ``dtype``; into ``output``, where given, unless ``noop[0] == 1``.

    ``amax``: that of current scaling, where it is known.
    """
    scheme = scheme_of(quantizer)
    if scheme.format is PLAIN:
        raise DTypeError(expected("a quantizer", of="quantize", got="None", do="pass a Float8 quantizer"))
    if not scheme.per_tensor:
        return quantize_blocks(x, quantizer, dtype, output, noop)
    if output is not None:
        _check_output(output, x)
    fp8 = fp8_format(quantizer.dtype)
    if scheme.delayed:
        scale = quantizer.scale if quantizer.scale.dim() == 1 else quantizer.scale.view(1)
        _raise_amax(quantizer, tensor_amax(x), noop)
    else:
        amax = reduced(tensor_amax(x), quantizer) if amax is None else amax
        scale = scale_from_amax(amax, fp8, quantizer.force_pow_2_scales, quantizer.amax_epsilon)
    scaled = x * scale if x.dtype is torch.float32 or not x.dim() else x.float().mul_(scale)
    data = encode(scaled.float(), fp8).view(x.shape)  # a scale has a dimension, and x may have none
    if output is not None:
        return _fill(output, quantizer, data, scale.reciprocal(), noop)
    rowwise, columnwise = usages(quantizer)
    return build_quantized(
        quantizer,
        shape=x.shape,
        dtype=dtype,
        data=data.contiguous() if rowwise else None,
        data_transpose=transpose_bytes(data) if columnwise else None,
        scale_inv=scale.reciprocal(),
        fp8_dtype=fp8,
    )


def emit(result: Tensor, quantizer: Any, dtype: torch.dtype, output: Any = None) -> Any:
    """A kernel's fp32 ``result`` quantized: by delayed scaling from fp32, by the others after rounding to ``dtype``."""
    if not scheme_of(quantizer).delayed:
        result = result.to(dtype)
    return quantize_tensor(result, quantizer, dtype, output)


def reduced(amax: Tensor, quantizer: Any) -> Tensor:
    """The amaxes of current scaling, the largest of all processes where ``quantizer`` asks for it."""
    if quantizer.with_amax_reduction:
        torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=quantizer.amax_reduction_group)
    return amax


def _raise_amax(quantizer: Any, amax: Tensor, noop: Tensor | None) -> None:
    former = quantizer.amax
    if former is None:
        quantizer.amax = amax
        return
    if not former.numel():  # of a quantizer that nobody asks for it
        return
    with writing(former):
        if noop is None:
            torch.maximum(former, amax if former.dim() else amax[0], out=former)
        else:
            former.copy_(torch.where(noop == 1, former, torch.maximum(former, amax)))


def _check_output(output: Any, x: Tensor) -> None:
    if format_of(output) is not FLOAT8:
        got = type(output).__qualname__
        raise DTypeError(expected("a quantized tensor", of="output of quantize", got=got, do="make one by quantizer.make_empty"))
    shape = logical_shape(output)
    if shape != tuple(x.shape):
        check_shape(x, shape, "the tensor quantized into output")
    check_same_device(output._scale_inv, x, "output of quantize")


def _fill(output: Any, quantizer: Any, data: Tensor, scale_inv: Tensor, noop: Tensor | None) -> Any:
    skip = None if noop is None else noop == 1

    def put(old: Tensor | None, new: Tensor) -> Tensor:
        if old is None:
            return new
        with writing(old):
            return old.copy_(new if skip is None else torch.where(skip, old, new))

    update_buffers(output, quantizer, data, transpose_bytes, put)
    put(output._scale_inv, scale_inv)
    return output
