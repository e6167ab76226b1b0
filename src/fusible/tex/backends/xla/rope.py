"""Rotary position embedding on lazy tensors."""

from __future__ import annotations

from typing import Any

from fusible import lazy
from fusible.lazy import Tensor
from fusible.tex.backends.xla.operands import fp32, plain
from fusible.tex.backends.xla.segments import Segments, thd_segments
from fusible.tex.calls.checks import check_rope
from fusible.tex.calls.rope import starts_of
from fusible.tex.enums import NVTE_QKV_Format
from fusible.tex.interface.declare import by_name
from fusible.tex.interface.rope import Rope

__all__ = ["RopeKernels"]

_SBHD = NVTE_QKV_Format.NVTE_SBHD
_THD = NVTE_QKV_Format.NVTE_THD


class RopeKernels(Rope):
    @by_name
    def fused_rope_forward(self, call: Any) -> Any:
        x = plain(call.input)
        angles, inside = _angles(
            x, call.freqs, call.start_positions, int(call.qkv_format), call.cu_seqlens, call.cp_size, call.cp_rank, "fused_rope_forward"
        )
        head = fp32(x[..., : angles.shape[-1]])
        return _finish(x, head * lazy.cos(angles) + _rotate(head, call.interleaved) * lazy.sin(angles), inside)

    @by_name
    def fused_rope_backward(self, call: Any) -> Any:
        g = plain(call.output_grads)
        angles, inside = _angles(
            g, call.freqs, call.start_positions, int(call.qkv_format), call.cu_seqlens, call.cp_size, call.cp_rank, "fused_rope_backward"
        )
        head = fp32(g[..., : angles.shape[-1]])
        return _finish(g, head * lazy.cos(angles) - _rotate(head * lazy.sin(angles), call.interleaved), inside)


def _rotate(x: Tensor, interleaved: bool) -> Tensor:
    """``R(x)``. R is antisymmetric: its transpose is ``-R``."""
    if interleaved:
        return lazy.reshape(lazy.stack([-x[..., 1::2], x[..., ::2]], -1), x.shape)
    half = x.shape[-1] // 2
    return lazy.concatenate([-x[..., half:], x[..., :half]], -1)


def _finish(x: Tensor, head: Tensor, inside: Tensor | None) -> Tensor:
    width = head.shape[-1]
    head = lazy.cast(head, x.dtype)
    out = head if width == x.shape[-1] else lazy.concatenate([head, x[..., width:]], -1)
    return out if inside is None else lazy.where(inside[:, None, None], out, lazy.zeros((), out.dtype))


def _angles(
    x: Tensor, freqs: Tensor, start: Tensor | None, qkv_format: int, cu_seqlens: Tensor | None, cp_size: int, cp_rank: int, function: str
) -> tuple[Tensor, Tensor | None]:
    """The angle of every token, broadcastable to ``x``; and for THD, which tokens belong to a sequence."""
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
