"""Where a native kernel writes its result: a tensor of a dtype, or a quantized one."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusible.errors import DTypeError, expected
from fusible.tex.backends.cpu.layouts import HOST
from fusible.tex.backends.cpu.quantize import check_output, quantize_tensor, write_delayed
from fusible.tex.formats import scheme_of
from fusible.tex.protocol import QuantizerLike, check_shape
from fusible.tex.selection.dispatch import inner

__all__ = ["produce"]

_quantize = inner("quantize")


def produce(
    kernel: Callable[..., Any],
    operands: tuple[Any, ...],
    shape: Sequence[int],
    dtype: torch.dtype,
    quantizer: QuantizerLike | None,
    out: Any = None,
    like: Tensor | None = None,
) -> Any:
    """The result of a kernel as ``dtype``, or quantized; into ``out``, where given. ``like``: a contiguous tensor of the result's ``shape``, of which
    another is made for less than half of what a shape and a dtype cost.

    ``kernel(*operands, dst, dtype, dst_transposed, scale, amax, accumulate_amax)`` is what runs. Under delayed scaling it writes codes
    from fp32; under any other it writes ``dtype`` first, since the scales follow from the result, and formats in blocks are left to who quantizes to
    them.
    """
    if quantizer is None:
        if out is None and like is not None and like.dtype is dtype:
            y = torch.empty_like(like)
            kernel(*operands, y, dtype)
            return y
        return _plain(kernel, operands, shape, dtype, out)
    scheme = scheme_of(quantizer)
    if out is not None and scheme.per_tensor:
        check_output(out, shape)
    if scheme.delayed:
        return write_delayed(partial(kernel, *operands), shape, dtype, quantizer, out)
    rounded = _scratch(shape, dtype)
    kernel(*operands, rounded, dtype)
    return quantize_tensor(rounded, quantizer, out) if scheme.per_tensor else _quantize(rounded, quantizer, out, None)


_LARGE, _KEPT = 2**20, 2**26
"""Bytes: what the system's allocator would fetch anew for each call, and what may be kept from call to call."""


class _Local(threading.local):
    memory: Tensor | None = None


_local = _Local()


def _scratch(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor for the length of one call of ``produce``. The memory of a large one is this thread's, and kept: fetching it again and again would
    cost page faults, and leaves holes in the heap."""
    size = math.prod(shape) * dtype.itemsize
    if not _LARGE <= size <= _KEPT:
        return torch.empty(shape, dtype=dtype, device=HOST)
    if _local.memory is None or _local.memory.numel() < size:
        _local.memory = None
        _local.memory = torch.empty(size, dtype=torch.uint8, device=HOST)
    return _local.memory[:size].view(dtype).view(shape)


def _plain(kernel: Callable[..., Any], operands: tuple[Any, ...], shape: Sequence[int], dtype: torch.dtype, out: Tensor | None) -> Tensor:
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=HOST)
        kernel(*operands, out, dtype)
        return out
    check_shape(out, shape, "the given output")
    if out.dtype is not dtype:
        raise DTypeError(expected(f"{dtype}", of="the given output", got=out.dtype, do="pass a tensor of that dtype"))
    if out.is_contiguous():
        kernel(*operands, out, dtype)
        return out
    return out.copy_(_plain(kernel, operands, shape, dtype, None))
