"""What GPUs have for products of narrow operands: torch's product of two FP8 matrices, and products of half precision whose result is fp32."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fusible.tex.backends.torch_backend.exact_sums import exact_sums
from fusible.tex.backends.torch_backend.fp8 import ON_TORCH
from fusible.tex.backends.torch_backend.operands import flat
from fusible.tex.calls.gemm import GemmJob, check_bias
from fusible.tex.enums import DType
from fusible.tex.formats import FLOAT8, PLAIN, format_of, transposed
from fusible.tex.protocol import fp8_format

__all__ = ["fp8_product", "half_of", "wide_product"]

_VECTOR = 16
"""Elements of FP8, bytes, that are loaded at once: what is contracted, and rows and columns of the result, are multiples of it."""
_ADA = (8, 9)
_scaled_mm: Any = torch.ops.aten._scaled_mm.default
_HALF = frozenset({torch.float16, torch.bfloat16})
_STORED = frozenset({torch.float32, *_HALF})


@functools.cache
def _multiplies_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= _ADA


def fp8_product(job: GemmJob[torch.dtype], bias: Tensor | None, out_dtype: torch.dtype) -> Tensor | None:
    """``op(B) @ op(A) + bias`` of two operands of FP8 on a GPU that multiplies them, in ``out_dtype`` with the scales in it; None of others.

    Sums are kept in fp32 (torch's ``use_fast_accum`` is off). Both operands are read along what is contracted; of one that lacks that copy, its bytes
    are transposed first.
    """
    A, B, shape = job.A, job.B, job.shape
    if format_of(A) is not FLOAT8 or format_of(B) is not FLOAT8 or shape.empty or out_dtype not in _STORED:
        return None
    formats = fp8_format(A._fp8_dtype), fp8_format(B._fp8_dtype)
    if formats == (DType.kFloat8E5M2,) * 2 or any(length % _VECTOR for length in (shape.rows, shape.columns, shape.depth)):
        return None
    if not _multiplies_fp8(A._scale_inv.device):
        return None
    a, b = _along_rows(A, job.transA), _along_rows(B, not job.transB)
    a, b = a.view(ON_TORCH[formats[0]]), b.view(ON_TORCH[formats[1]])
    if bias is not None:
        check_bias(bias, job)
    return _scaled_mm(b, a.t(), scale_a=_aligned(B._scale_inv), scale_b=_aligned(A._scale_inv), bias=bias, out_dtype=out_dtype)


def _aligned(scale: Tensor) -> Tensor:
    """A scale where cuBLAS takes it from: one of a group's need not begin at 16 bytes."""
    return scale.clone() if scale.data_ptr() % _VECTOR else scale


def _along_rows(x: Any, rowwise: bool) -> Tensor:
    """The bytes of a tensor as a contiguous matrix whose rows are contracted, which those of its data are where ``rowwise``."""
    data, other = x._data, transposed(x)
    if rowwise:
        if data is not None:
            return flat(data).contiguous()
        return other.reshape(other.shape[0], -1).t().contiguous()
    if other is not None:
        return other.reshape(other.shape[0], -1).contiguous()
    return flat(data).t().contiguous()


def half_of(x: Any) -> torch.dtype | None:
    """The half precision that holds the numbers of an operand on a GPU exactly: bf16 those of FP8. None where there is none."""
    form = format_of(x)
    if form is PLAIN:
        return x.dtype if x.device.type == "cuda" and x.dtype in _HALF else None
    return torch.bfloat16 if form.per_tensor and x._scale_inv.device.type == "cuda" else None


def wide_product(b: Tensor, a: Tensor) -> Tensor:
    """``b @ a`` in fp32, of matrices of one half precision on a GPU."""
    with exact_sums(a):
        return torch.mm(b, a, out_dtype=torch.float32)
