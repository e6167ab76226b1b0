"""Rotary position embedding on lazy tensors."""

from __future__ import annotations

from fusible import lazy
from fusible.lazy import Tensor
from fusible.tex.backends.xla import native
from fusible.tex.backends.xla.kernels import LazyKernels
from fusible.tex.backends.xla.native import Result
from fusible.tex.backends.xla.segments import thd_segments
from fusible.tex.calls.checks import check_rope
from fusible.tex.calls.rope import starts_of
from fusible.tex.enums import NVTE_QKV_Format
from fusible.tex.formulas.rope import RopeFormulas
from fusible.tex.formulas.segments import Segments
from fusible.tex.interface.declare import CallArguments

__all__ = ["RopeKernels"]


class RopeKernels(LazyKernels, RopeFormulas):
    def _rotated(self, x: Tensor, call: CallArguments, function: str, *, backward: bool) -> Tensor:
        """By the native kernel, which makes each angle's sine and cosine once, but for packed sequences."""
        layout, start = int(call.qkv_format), call.start_positions
        if layout == NVTE_QKV_Format.NVTE_THD or call.freqs.dtype is not lazy.float32 or not native.serves(x):
            return super()._rotated(x, call, function, backward=backward)
        check_rope(x, call.freqs, layout, call.cu_seqlens, call.cp_size, call.cp_rank, function, lazy.float32)
        if start is not None:
            start = lazy.cast(starts_of(x, start, layout, None), lazy.int32)
        lies = {"sequence_first": layout == NVTE_QKV_Format.NVTE_SBHD, "interleaved": call.interleaved, "start_positions": start}
        context = {"cp_size": call.cp_size, "cp_rank": call.cp_rank}
        return native.call("rope", {"src": x, "dst": Result(x.shape, x.dtype), "freqs": call.freqs, "backward": backward, **lies, **context})["dst"]

    def _rank_segments(self, tokens: int, cu_seqlens: Tensor, cp_size: int) -> Segments[Tensor]:
        if cp_size != 1:  # each bound is a multiple of it, and float64 holds every int32 exactly
            cu_seqlens = lazy.cast(lazy.floor(lazy.cast(cu_seqlens, lazy.float64) / float(cp_size)), lazy.int32)
        return thd_segments(tokens, cu_seqlens)

    def _of_sequences(self, out: Tensor, inside: Tensor) -> Tensor:
        return lazy.where(inside[:, None, None], out, lazy.zeros((), out.dtype))
