"""Rotary position embedding on lazy tensors."""

from __future__ import annotations

from typing import Any

from fusible import lazy
from fusible.lazy import Tensor
from fusible.tex.backends.xla.kernels import LazyKernels
from fusible.tex.backends.xla.segments import Segments, thd_segments
from fusible.tex.calls.checks import check_rope
from fusible.tex.calls.rope import starts_of
from fusible.tex.enums import NVTE_QKV_Format
from fusible.tex.formulas.rope import RopeFormulas

__all__ = ["RopeKernels"]

_SBHD = NVTE_QKV_Format.NVTE_SBHD
_THD = NVTE_QKV_Format.NVTE_THD


class RopeKernels(LazyKernels, RopeFormulas):
    def _rope_angles(self, x: Tensor, call: Any, function: str) -> tuple[Tensor, Tensor | None]:
        return _angles(x, call, function)

    def _of_sequences(self, out: Tensor, inside: Tensor) -> Tensor:
        return lazy.where(inside[:, None, None], out, lazy.zeros((), out.dtype))


def _angles(x: Tensor, call: Any, function: str) -> tuple[Tensor, Tensor | None]:
    """The angle of every token, broadcastable to ``x``; and for THD, which tokens belong to a sequence."""
    freqs, start, qkv_format, cu_seqlens = call.freqs, call.start_positions, int(call.qkv_format), call.cu_seqlens
    cp_size, cp_rank = call.cp_size, call.cp_rank
    check_rope(x, freqs, qkv_format, cu_seqlens, cp_size, cp_rank, function, lazy.float32)
    table = lazy.reshape(freqs, (freqs.shape[0], freqs.shape[3]))
    if qkv_format == _THD:
        assert cu_seqlens is not None
        segments = thd_segments(x.shape[0], _divided(cu_seqlens, cp_size))
        return _thd_angles(table, segments, start, cp_size, cp_rank), segments.inside
    along = 0 if qkv_format == _SBHD else 1
    length = x.shape[along]
    if start is None and cp_size == 1:
        angles = table[:length]
    else:
        position = _shifted(lazy.iota((length,), 0, lazy.int32), lazy.full((), length, lazy.int32), cp_size, cp_rank)
        if start is None:
            angles = lazy.gather(table, 0, position)
        else:
            start = lazy.cast(starts_of(x, start, qkv_format, cu_seqlens), lazy.int32)
            grid = position[:, None] + start[None, :] if along == 0 else position[None, :] + start[:, None]
            return lazy.unsqueeze(lazy.gather(table, 0, grid), 2), None
    return (angles[:, None, None] if along == 0 else angles[None, :, None]), None


def _divided(cu_seqlens: Tensor, cp_size: int) -> Tensor:
    """Each bound divided by ``cp_size``, of which it is a multiple: in float64, which holds every int32 exactly."""
    if cp_size == 1:
        return cu_seqlens
    return lazy.cast(lazy.floor(lazy.cast(cu_seqlens, lazy.float64) / float(cp_size)), lazy.int32)


def _thd_angles(table: Tensor, segments: Segments, start: Tensor | None, cp_size: int, cp_rank: int) -> Tensor:
    position = _shifted(segments.position, segments.length, cp_size, cp_rank)
    if start is not None:
        position = position + lazy.gather(lazy.cast(start, lazy.int32), 0, segments.sequence)
    inside = lazy.where(segments.inside, position, 0)
    return lazy.unsqueeze(lazy.gather(table, 0, lazy.maximum(lazy.minimum(inside, table.shape[0] - 1), 0)), 1)


def _shifted(position: Tensor, length: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """Where a rank's tokens stand in the whole sequence: it holds one chunk from the front and its mirror image from the back."""
    if cp_size == 1:
        return position
    half = lazy.shift_right_logical(length, 1)
    front, back = half * cp_rank, length * cp_size - half * (cp_rank + 1) - half
    return position + lazy.where(position < half, front, back)
