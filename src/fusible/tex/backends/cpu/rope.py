"""Rotary position embedding by the compiled kernels: heads are read where they lie, be it in a packed qkv tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusible import cpp_extensions as native
from fusible.tex.backends.cpu.layouts import HOST
from fusible.tex.backends.cpu.operands import int32, unquantized
from fusible.tex.calls.checks import check_rope
from fusible.tex.calls.rope import starts_of
from fusible.tex.enums import NVTE_QKV_Format
from fusible.tex.interface.declare import CallArguments, by_name
from fusible.tex.interface.rope import Rope

__all__ = ["RopeKernels", "rotated"]

_SBHD, _THD = NVTE_QKV_Format.NVTE_SBHD, NVTE_QKV_Format.NVTE_THD


class RopeKernels(Rope):
    @by_name
    def fused_rope_forward(self, call: CallArguments) -> Any:
        return _rope(call, call.input, "fused_rope_forward", backward=False)

    @by_name
    def fused_rope_backward(self, call: CallArguments) -> Any:
        return _rope(call, call.output_grads, "fused_rope_backward", backward=True)


def rotated(
    parts: Sequence[Tensor], angles: Tensor, interleaved: bool, cu_seqlens: Tensor, start_positions: Tensor | None, function: str
) -> list[Tensor]:
    """Heads ``[t, heads, width]`` of the same packed sequences, all rotated as ``fused_rope_forward`` does; ``cu_seqlens`` is contiguous int32."""
    check_rope(parts[0], angles, _THD, cu_seqlens, 1, 0, function, torch.float32)
    start = None if start_positions is None else int32(starts_of(parts[0], start_positions, _THD, cu_seqlens), f"start_positions of {function}")
    found, frequencies = [torch.empty(x.shape, dtype=x.dtype, device=HOST) for x in parts], angles.contiguous()
    for x, y in zip(parts, found, strict=True):
        native.rope(x, y, frequencies, False, interleaved, False, start, cu_seqlens, 1, 0)
    return found


def _rope(call: CallArguments, input: Any, function: str, *, backward: bool) -> Tensor:
    x, layout = unquantized(input), int(call.qkv_format)
    check_rope(x, call.freqs, layout, call.cu_seqlens, call.cp_size, call.cp_rank, function, torch.float32)
    if x.stride(-1) != 1:
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=HOST)
    cu_seqlens = int32(call.cu_seqlens, f"cu_seqlens of {function}") if layout == _THD else None
    start = starts_of(x, call.start_positions, layout, cu_seqlens)
    start = None if start is None else int32(start, f"start_positions of {function}")
    freqs = call.freqs.contiguous()
    native.rope(x, out, freqs, layout == _SBHD, call.interleaved, backward, start, cu_seqlens, call.cp_size, call.cp_rank)
    return out
