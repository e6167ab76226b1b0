"""Sums over rows by the compiled kernel: those of bias gradients, alone and with what is computed beside them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusible import cpp_extensions as native
from fusible.tex.backends.cpu.kernel_calls import call as kernel_call
from fusible.tex.backends.cpu.kernel_calls import specialized
from fusible.tex.backends.cpu.layouts import HOST, as_read
from fusible.tex.interface.arguments import DTypeLike
from fusible.tex.interface.declare import CallArguments
from fusible.tex.interface.kernel_calls import Buffer, KernelCall
from fusible.tex.interface.specialize import SpecializedCall, specialized_by
from fusible.tex.protocol import to_torch

__all__ = ["SumKernels", "rounded", "sums_as_data", "sums_of_columns"]


def sums_of_columns(x: Tensor, out: Tensor | None = None) -> Tensor:
    """``x`` summed over its rows in fp32, in one order for all who sum here: fused passes are held to the bits of those that are not."""
    sums = torch.empty(x.shape[-1], dtype=torch.float32, device=HOST) if out is None else out
    native.column_sums(x.contiguous(), sums)
    return sums


def sums_as_data(x: Tensor, dtype: torch.dtype) -> tuple[Buffer, list[KernelCall]] | None:
    """The calls that sum ``x`` over its rows and round to ``dtype``, and what comes of them."""
    if not as_read(x):
        return None
    sums = Buffer(torch.float32, (x.shape[-1],))
    summed = kernel_call("column_sums", src=x, dst=sums)
    if (result := rounded(sums, dtype)) is None:
        return None
    return result[0], [summed, *result[1]]


def rounded(sums: Buffer, dtype: torch.dtype) -> tuple[Buffer, list[KernelCall]] | None:
    """``sums``, of fp32, in ``dtype``; None where no kernel rounds to it."""
    if dtype is torch.float32:
        return sums, []
    if dtype is not torch.bfloat16:
        return None
    result = Buffer(dtype, sums.shape)
    return result, [kernel_call("round", src=sums, dst=result)]


def _specialized(self: Any, call: CallArguments) -> SpecializedCall | None:
    found = sums_as_data(call.x, call.x.dtype if call.dtype is None else to_torch(call.dtype))
    return None if found is None else specialized(found[0], *found[1])


class SumKernels:
    """The sum over rows."""

    @specialized_by(_specialized)
    def prim_row_sum(self, x: Tensor, dtype: DTypeLike | None = None) -> Any:
        sums, wanted = sums_of_columns(x), x.dtype if dtype is None else to_torch(dtype)
        return sums if wanted is torch.float32 else sums.to(wanted)
