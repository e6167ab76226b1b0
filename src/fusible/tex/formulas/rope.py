"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864)."""

from __future__ import annotations

from typing import Any

from fusible.tex.calls.checks import check_rope
from fusible.tex.calls.rope import starts_of
from fusible.tex.enums import NVTE_QKV_Format
from fusible.tex.formulas.arrays import Array, ArrayKernels
from fusible.tex.formulas.segments import Segments
from fusible.tex.interface.declare import CallArguments, by_name
from fusible.tex.interface.rope import Rope

__all__ = ["RopeFormulas"]


class RopeFormulas(ArrayKernels, Rope):
    """A backend says which tokens of packed sequences belong to one."""

    def _check_places(self, x: Array, call: CallArguments, function: str) -> None:
        """Raise for lengths and starts that reach beyond the angles, where they can be read."""

    def _rank_segments(self, tokens: int, cu_seqlens: Array, cp_size: int) -> Segments[Any]:
        """Of each token of a rank its ``sequence``, its ``position`` in that, the ``length`` of the part here, and whether it is ``inside``."""
        raise NotImplementedError

    def _of_sequences(self, out: Array, inside: Array) -> Any:
        """``out`` where tokens belong to a sequence, 0 elsewhere."""
        raise NotImplementedError

    @by_name
    def fused_rope_forward(self, call: CallArguments) -> Any:
        return self._rotated(self._plain(call.input), call, "fused_rope_forward", backward=False)

    @by_name
    def fused_rope_backward(self, call: CallArguments) -> Any:
        return self._rotated(self._plain(call.output_grads), call, "fused_rope_backward", backward=True)

    def _rotated(self, x: Array, call: CallArguments, function: str, *, backward: bool) -> Any:
        """``x`` rotated by the angles of its tokens, or back."""
        xp = self._arrays
        angles, inside = self._rope_angles(x, call, function)
        head = xp.wide(x[..., : angles.shape[-1]])
        if backward:
            rotated = self._rope_rotated(head * xp.sin(angles), call.interleaved)
            return self._rope_result(x, xp.product_minus(rotated, head, xp.cos(angles)), inside)
        rotated = xp.times(self._rope_rotated(head, call.interleaved), xp.sin(angles))
        return self._rope_result(x, xp.plus_product(rotated, head, xp.cos(angles)), inside)

    def _rope_angles(self, x: Array, call: CallArguments, function: str) -> tuple[Any, Any]:
        """The angle of every token, broadcastable to ``x``; and for THD, which tokens belong to a sequence."""
        xp, freqs, start, cu_seqlens = self._arrays, call.freqs, call.start_positions, call.cu_seqlens
        qkv_format, cp_size, cp_rank = int(call.qkv_format), call.cp_size, call.cp_rank
        check_rope(x, freqs, qkv_format, cu_seqlens, cp_size, cp_rank, function, xp.accumulator(x.dtype))
        self._check_places(x, call, function)
        table = xp.reshape(freqs, (freqs.shape[0], freqs.shape[3]))
        if qkv_format == NVTE_QKV_Format.NVTE_THD:
            found = self._rank_segments(x.shape[0], cu_seqlens, cp_size)
            position = self._in_whole(found.position, found.length, cp_size, cp_rank)
            if start is not None:
                position = position + xp.take(xp.cast(start, xp.index), found.sequence)
            return xp.take(table, xp.clip(xp.where(found.inside, position, 0), 0, table.shape[0] - 1))[:, None], found.inside
        along = 0 if qkv_format == NVTE_QKV_Format.NVTE_SBHD else 1
        length = x.shape[along]
        if start is None and cp_size == 1:
            angles = table[:length]
        else:
            position = self._in_whole(xp.arange(length, xp.index, x), xp.full((), length, xp.index, x), cp_size, cp_rank)
            if start is not None:
                first = xp.cast(starts_of(x, start, qkv_format, cu_seqlens), xp.index)
                return xp.take(table, position[:, None] + first[None] if along == 0 else position[None] + first[:, None])[:, :, None], None
            angles = xp.take(table, position)
        return (angles[:, None, None] if along == 0 else angles[None, :, None]), None

    def _in_whole(self, position: Array, length: Array, cp_size: int, cp_rank: int) -> Any:
        """Where a rank's tokens stand in the whole sequence: it holds one chunk from the front and its mirror image from the back."""
        if cp_size == 1:
            return position
        half = self._arrays.shift_right(length, 1)
        front, back = half * cp_rank, length * cp_size - half * (cp_rank + 1) - half
        return position + self._arrays.where(position < half, front, back)

    def _rope_rotated(self, x: Array, interleaved: bool) -> Any:
        """``R(x)``, a new tensor. R is antisymmetric: its transpose is ``-R``."""
        xp = self._arrays
        if interleaved:
            return xp.reshape(xp.stack([-x[..., 1::2], x[..., ::2]], -1), x.shape)
        half = x.shape[-1] // 2
        return xp.concatenate([-x[..., half:], x[..., :half]], -1)

    def _rope_result(self, x: Array, head: Array, inside: Array | None) -> Any:
        """``x`` with its first columns replaced by ``head``; 0 for tokens that belong to no sequence."""
        xp, width = self._arrays, head.shape[-1]
        head = xp.cast(head, x.dtype)
        out = head if width == x.shape[-1] else xp.concatenate([head, x[..., width:]], -1)
        return out if inside is None else self._of_sequences(out, inside)
