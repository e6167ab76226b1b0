"""The checks of the functions that move attention's tokens from one layout to another."""

from __future__ import annotations

import torch

from fusible.errors import DTypeError, ShapeError, expected
from fusible.tex.protocol import TensorLike

__all__ = ["check_convert", "check_interleaved", "check_parts"]


def check_convert(tensor: TensorLike, cu_seqlens: TensorLike, b: int, leading: int, function: str) -> None:
    """Raise ``ShapeError`` unless ``tensor`` has its ``leading`` dimensions and there are lengths of ``b`` sequences."""
    if tensor.ndim < leading:
        wanted = "[t, ..]" if leading == 1 else "[b, s, ..]"
        raise ShapeError(expected(wanted, of=f"tensor of {function}", got=list(tensor.shape), do="reshape it"))
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] <= b:
        got = list(cu_seqlens.shape)
        raise ShapeError(expected(f"[{b + 1}]", of=f"cu_seqlens of {function}", got=got, do="pass the cumulative lengths of b sequences"))


def check_interleaved(qkvi: torch.Tensor, stored: int) -> None:
    """Raise ``ShapeError`` unless ``qkvi`` is Q in a contiguous ``[s, b, n, 3h]``, whose memory of ``stored`` elements holds K and V too."""
    if qkvi.ndim != 4:
        raise ShapeError(expected("[s, b, n, h]", of="qkvi of fa_prepare_fwd", got=list(qkvi.shape), do="pass Q as a view of the packed buffer"))
    s, b, n, h = qkvi.shape
    steps = (b * n * 3 * h, n * 3 * h, 3 * h, 1)
    strided = all(size <= 1 or step == wanted for size, step, wanted in zip(qkvi.shape, qkvi.stride(), steps, strict=True))
    if not strided or (qkvi.numel() and qkvi.storage_offset() + s * steps[0] > stored):
        got = f"strides {list(qkvi.stride())} in {stored} elements"
        raise ShapeError(expected(f"strides {list(steps)}", of="qkvi of fa_prepare_fwd", got=got, do="pass Q as a view of [s, b, n, 3h]"))


def check_parts(q: TensorLike, k: TensorLike, v: TensorLike) -> None:
    """Raise unless dQ, dK, dV are ``[b, s, n, h]`` of one shape and dtype."""
    shapes = [list(x.shape) for x in (q, k, v)]
    if q.ndim != 4 or shapes[1] != shapes[0] or shapes[2] != shapes[0]:
        raise ShapeError(expected("three equal shapes [b, s, n, h]", of="q, k, v of fa_prepare_bwd", got=shapes, do="pass gradients of one shape"))
    if not q.dtype == k.dtype == v.dtype:
        got = [x.dtype for x in (q, k, v)]
        raise DTypeError(expected("one dtype", of="q, k, v of fa_prepare_bwd", got=got, do="cast them"))
