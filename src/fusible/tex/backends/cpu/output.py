"""Where a native kernel writes its result: a tensor of a dtype, or a quantized one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusible.errors import DTypeError, ShapeError, expected
from fusible.tex.backends.cpu.quantize import buffers, finish, quantize_tensor
from fusible.tex.factories import build_quantized
from fusible.tex.protocol import check_shape, fp8_format, is_quantized, logical_shape, scaling

__all__ = ["produce"]


def produce(write: Callable[..., Any], shape: Sequence[int], dtype: torch.dtype, quantizer: Any, out: Any = None) -> Any:
    """The result of a kernel as ``dtype``, or quantized; into ``out``, where given.

    ``write(dst, dtype, dst_transposed, scale, amax, accumulate_amax)`` runs the kernel. Under delayed scaling it writes codes from fp32; under
    current scaling it writes ``dtype`` first, since the scale follows from the result.
    """
    if quantizer is None:
        return _plain(write, shape, dtype, out)
    if out is not None and not is_quantized(out):
        raise DTypeError(expected("a quantized tensor", of="the given output, with a quantizer", got=type(out).__qualname__, do="pass None"))
    if scaling(quantizer) != "delayed":
        return quantize_tensor(_plain(write, shape, dtype, None), quantizer, out)
    if out is not None:
        _check_logical_shape(out, shape)
    fp8 = fp8_format(quantizer.dtype)
    data, transpose = buffers(shape, quantizer, out)
    scale = quantizer.scale.view(1)
    amax, keep = (torch.empty(1), False) if quantizer.amax is None else (quantizer.amax.view(1), True)
    write(data, int(fp8), transpose, scale, amax, keep)
    if not keep:
        quantizer.amax = amax
    scale_inv = scale.reciprocal()
    if out is None:
        return build_quantized(quantizer, shape=shape, dtype=dtype, data=data, data_transpose=transpose, scale_inv=scale_inv, fp8_dtype=fp8)
    return finish(out, data, transpose, scale_inv, fp8, None)


def _plain(write: Callable[..., Any], shape: Sequence[int], dtype: torch.dtype, out: Tensor | None) -> Tensor:
    if out is None:
        out = torch.empty(shape, dtype=dtype)
        write(out, dtype, None, 1.0, None, False)
        return out
    check_shape(out, shape, "the given output")
    if out.dtype is not dtype:
        raise DTypeError(expected(f"{dtype}", of="the given output", got=out.dtype, do="pass a tensor of that dtype"))
    if out.is_contiguous():
        write(out, dtype, None, 1.0, None, False)
        return out
    return out.copy_(_plain(write, shape, dtype, None))


def _check_logical_shape(out: Any, shape: Sequence[int]) -> None:
    found = logical_shape(out)
    if tuple(found) != tuple(shape):
        raise ShapeError(expected(f"shape {list(shape)}", of="the given output", got=list(found), do="pass a tensor of that shape"))
