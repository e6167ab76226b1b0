"""Checks of the indices of a call against its other arguments, for functions that several backends compute.

The reference backend checks before it computes. A native kernel also checks what it reads, with messages of its own; when a backend refuses a call,
dispatch asks here for the message, so that it is the same whichever backend serves the call. Indices on a device are not read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from fusible.errors import ArgumentError, FusibleError, ShapeError, expected
from fusible.tex.calls.attention import PADDING, bounds, check_counts, check_within
from fusible.tex.calls.attention_layout import QKVLayout, format_name, layout
from fusible.tex.calls.index_checks import check_cumulative, check_indices, check_lengths, check_positions
from fusible.tex.calls.kv_cache import check_cache_call, check_cache_indices, check_step, copy_of_step
from fusible.tex.enums import NVTE_QKV_Format
from fusible.tex.interface.declare import CallArguments
from fusible.tex.protocol import TensorLike

__all__ = ["RopeIndices", "check_attention_indices", "check_rope_indices", "key_limit", "wrong_indices"]


def wrong_indices(function: str, named: Mapping[str, Any]) -> FusibleError | None:
    """The error in the indices of a call that a backend refused; None where there is none, or where the indices cannot be read on the host."""
    check = _CHECKS.get(function)
    indices = [named.get(name) for name in _INDICES if named.get(name) is not None]
    if check is None or not all(isinstance(x, torch.Tensor) and x.is_cpu for x in indices):
        return None
    try:
        check(SimpleNamespace(**named), function)
    except FusibleError as error:
        return error
    except (AttributeError, IndexError, TypeError, ValueError):  # what else is wrong with the call is told by others
        return None
    return None


def key_limit(call: CallArguments, lay: QKVLayout) -> int:
    """The tokens that K has in memory: all of them for THD, else those of a sequence."""
    if lay.paged:
        sizes = ((call.K, call.page_table_k), (call.V, call.page_table_v))
        reached = min(table.shape[1] * x.shape[lay.kv.index("S")] for x, table in sizes)
        return min(reached, call.max_seqlen_kv) if call.max_seqlen_kv > 0 else reached
    return call.K.shape[0] if lay.kv == "THD" else call.K.shape[lay.kv.index("S")]


def check_attention_indices(call: CallArguments, function: str) -> None:
    """Raise ``ArgumentError`` or ``ShapeError`` for lengths and pages that are not those of Q, K and V.

    No two sequences of packed tokens may share one, for a gradient is written to each.
    """
    lay = layout(call.qkv_layout)
    assert lay is not None
    dense = "THD" not in (lay.q, lay.kv)
    batch = call.Q.shape[lay.q.index("B")] if dense else -1
    limit = key_limit(call, lay)
    lengths = [limit] * batch
    if not dense or int(call.attn_mask_type) in PADDING:
        _check_side(call, "q", batch, lay.q, call.Q.shape[0 if lay.q == "THD" else lay.q.index("S")], function)
        lengths = _check_side(call, "kv", batch, lay.kv, limit, function)
        if not dense:
            check_counts(bounds(call.cu_seqlens_q, "q").numel(), bounds(call.cu_seqlens_kv, "kv").numel())
    for table, x in ((call.page_table_k, call.K), (call.page_table_v, call.V)) if lay.paged else ():
        name = f"page_table_{'k' if table is call.page_table_k else 'v'}"
        size = max(x.shape[lay.kv.index("S")], 1)
        for i, length in enumerate(lengths):
            check_indices(table[i, : -(-length // size)].tolist(), x.shape[lay.kv.index("B")], "pages", f"{name} of {function}")


def _check_side(call: CallArguments, side: str, batch: int, dims: str, limit: int, function: str) -> list[int]:
    """The lengths of the sequences of queries or of keys, which may be of ``limit`` tokens each, or together where they are packed."""
    name = f"cu_seqlens_{side}"
    cu = bounds(getattr(call, name), side)
    if cu.numel() <= batch:
        got, do = list(cu.shape), "pass the cumulative lengths of all sequences"
        raise ShapeError(expected(f"[{batch + 1}]", of=f"{name} of {function}", got=got, do=do))
    cu = cu[: batch + 1] if batch >= 0 else cu
    check_lengths(cu, f"{name} of {function}", None if dims == "THD" else limit)
    ends = cu.tolist()
    lengths = [after - before for before, after in itertools.pairwise(ends)]
    padded = getattr(call, f"{name}_padded")
    starts = ends[:-1]
    if padded is not None and batch < 0:
        if padded.numel() < len(lengths):
            got = list(padded.shape)
            raise ShapeError(expected(f"[{len(ends)}]", of=f"{name}_padded of {function}", got=got, do="pass where each sequence begins"))
        check_lengths(padded[: len(lengths)], f"{name}_padded of {function}")
        starts = padded.tolist()[: len(lengths)]
    if dims == "THD":
        check_within([start + length for start, length in zip(starts, lengths, strict=True)], limit, side)
        _check_disjoint(starts, lengths, f"{name}_padded of {function}")
    return lengths


def _check_disjoint(starts: Sequence[int], lengths: Sequence[int], of: str) -> None:
    end = 0
    for start, length in zip(starts, lengths, strict=True):
        if length and start < end:
            wanted = "sequences that begin past the ones before"
            raise ArgumentError(expected(wanted, of=of, got=f"{start} before {end}", do="check the cumulative lengths"))
        end = start + length if length else end


class RopeIndices(NamedTuple):
    """What decides about the positions of the tokens ``x``, for which there are ``angles``."""

    x: TensorLike
    angles: int
    start_positions: Any
    qkv_format: int
    cu_seqlens: Any
    cp_size: int
    cp_rank: int
    name: str = "freqs"
    """What the function calls the angles."""


def check_rope_indices(call: RopeIndices, function: str) -> None:
    """Raise ``ArgumentError`` or ``ShapeError`` for sequences that are not in the tokens, or positions that have no angle."""
    start = call.start_positions
    if not 0 <= call.cp_rank < call.cp_size:
        return  # another fault of the call, of which others tell
    if call.qkv_format == NVTE_QKV_Format.NVTE_THD:
        # Bounds are of all ranks' tokens, and divided by their number, which drops what is left.
        check_cumulative(call.cu_seqlens, (call.x.shape[0] + 1) * call.cp_size - 1, f"cu_seqlens of {function}")
        if not call.cu_seqlens.is_cpu:
            return
        ends = [end // call.cp_size for end in call.cu_seqlens.tolist()]
        lengths = [after - before for before, after in itertools.pairwise(ends)]
    else:
        along = 0 if call.qkv_format == NVTE_QKV_Format.NVTE_SBHD else 1
        lengths = [call.x.shape[along]] * (call.x.shape[1 - along] if start is not None else 1)
    if start is not None and start.numel() < len(lengths):
        of, got = f"start_positions of {function}", list(start.shape)
        raise ShapeError(expected(f"[{len(lengths)}], or more that are not read", of=of, got=got, do="pass one a sequence"))
    if start is not None and not start.is_cpu:
        return
    first = [0] * len(lengths) if start is None else start.flatten().tolist()[: len(lengths)]
    places = [place for at, length in zip(first, lengths, strict=True) if length for place in _ends_of(at, length, call.cp_size, call.cp_rank)]
    check_positions(places, call.angles, f"{call.name if start is None else 'start_positions'} of {function}")


def _ends_of(first: int, length: int, cp_size: int, cp_rank: int) -> tuple[int, int]:
    """The least and the largest position of a rank's tokens: a chunk from the front of a sequence, and its mirror image from the back."""
    half = length // 2 if cp_size > 1 else 0
    return first + cp_rank * half, first + length * cp_size - 1 - cp_rank * half


def _check_rope(call: CallArguments, function: str) -> None:
    x = call.output_grads if function == "fused_rope_backward" else call.input
    check_rope_indices(
        RopeIndices(x, call.freqs.shape[0], call.start_positions, int(call.qkv_format), call.cu_seqlens, call.cp_size, call.cp_rank), function
    )


def _check_cache(call: CallArguments, function: str) -> None:
    check_cache_call(call)
    check_cache_indices(call, format_name(call.kv_format, "THD" if call.new_k.ndim == 3 else "BSHD"))


def _check_step(call: CallArguments, function: str) -> None:
    check_step(call)
    check_cache_indices(SimpleNamespace(**copy_of_step(call, call.k)), "THD", function)
    if call.angles is not None:
        rope = RopeIndices(call.q, call.angles.shape[0], call.start_positions, NVTE_QKV_Format.NVTE_THD, call.cu_new_lens, 1, 0, "angles")
        check_rope_indices(rope, function)


_INDICES = (
    "cu_cached_lens", "cu_new_lens", "cu_seqlens", "cu_seqlens_kv", "cu_seqlens_kv_padded", "cu_seqlens_q", "cu_seqlens_q_padded", "page_table",
    "page_table_k", "page_table_v", "start_positions",
)  # fmt: skip
_CHECKS: dict[str, Callable[[Any, str], None]] = {
    "attention_step": _check_step,
    "copy_to_kv_cache": _check_cache,
    "fused_attn_bwd": check_attention_indices,
    "fused_attn_fwd": check_attention_indices,
    "fused_rope_backward": _check_rope,
    "fused_rope_forward": _check_rope,
}
