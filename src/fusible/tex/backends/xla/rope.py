"""Rotary position embedding on lazy tensors."""

from __future__ import annotations

from fusible import lazy
from fusible.lazy import Tensor
from fusible.tex.backends.xla.kernels import LazyKernels
from fusible.tex.backends.xla.segments import thd_segments
from fusible.tex.formulas.rope import RopeFormulas
from fusible.tex.formulas.segments import Segments

__all__ = ["RopeKernels"]


class RopeKernels(LazyKernels, RopeFormulas):
    def _rank_segments(self, tokens: int, cu_seqlens: Tensor, cp_size: int) -> Segments[Tensor]:
        if cp_size != 1:  # each bound is a multiple of it, and float64 holds every int32 exactly
            cu_seqlens = lazy.cast(lazy.floor(lazy.cast(cu_seqlens, lazy.float64) / float(cp_size)), lazy.int32)
        return thd_segments(tokens, cu_seqlens)

    def _of_sequences(self, out: Tensor, inside: Tensor) -> Tensor:
        return lazy.where(inside[:, None, None], out, lazy.zeros((), out.dtype))
