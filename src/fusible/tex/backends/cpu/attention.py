"""Attention by the compiled kernels: in tiles, forward and backward, and what generation needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fusible import cpp_extensions as native
from fusible.tex.backends.cpu.kernel_calls import call as kernel_call
from fusible.tex.backends.cpu.kernel_calls import specialized
from fusible.tex.backends.cpu.layouts import HOST, as_read
from fusible.tex.backends.cpu.operands import int32
from fusible.tex.backends.cpu.rope import rotated
from fusible.tex.calls.attention import BOTTOM_RIGHT, CAUSAL, PADDING, ScoreRules, Served, bounds, check_counts, own_name
from fusible.tex.calls.attention_buffers import draw_rng_state, gradients, outputs, seeded
from fusible.tex.calls.attention_layout import QKVLayout, format_name
from fusible.tex.calls.attention_query import support_query
from fusible.tex.calls.attention_steps import AttentionBySteps
from fusible.tex.calls.kv_cache import check_cache_call, check_step, room_of_step
from fusible.tex.calls.memory_checks import check_no_inner_overlap, check_outputs_disjoint
from fusible.tex.enums import NVTE_Bias_Type, NVTE_Softmax_Type
from fusible.tex.interface.declare import CallArguments, Request, by_name, inherited, requires
from fusible.tex.interface.kernel_calls import Buffer
from fusible.tex.interface.specialize import SpecializedCall, specialized_by
from fusible.tex.protocol import to_torch

__all__ = ["AttentionKernels"]

_SERVED = Served("cpu", frozenset({torch.float32, torch.bfloat16, torch.float16}), paged=True)
_ANSWERED = replace(_SERVED, alibi=True, fp8=True)
"""What the query answers for: a call of a kind that these kernels refuse goes to the reference."""
_TOKENS_FIRST = {"SBHD": (1, 0, 2, 3), "BSHD": (0, 1, 2, 3), "BHSD": (0, 2, 1, 3)}


def _refused(request: Request) -> str | None:
    if request["bias_type"] != NVTE_Bias_Type.NVTE_NO_BIAS:
        return "serves attention without a bias, and there is one"
    for name, kind in request.kinds:
        if (name.endswith("quantizer") and kind is not None) or (isinstance(kind, tuple) and len(kind) != 2):
            return f"serves attention on float32, bfloat16 and float16, and {name} is FP8"
    return None


def _refused_beyond(request: Request) -> str | None:
    for name in ("bias", "soft_cap", "alibi_slopes"):
        if request[name] is not None:
            return f"serves attention without {name}, and there is one"
    return None


def _refused_step(request: Request) -> str | None:
    for name, kind in request.kinds:
        if isinstance(kind, tuple) and kind[1] not in _SERVED.dtypes:
            return f"serves attention on float32, bfloat16 and float16, and {name} is {kind[1]}"
    return None


_StepMask = tuple[float, bool, bool, int, int, bool]
"""As the kernel takes it: the scale of scores, and who sees whom."""
_STEP = ("q", "k", "v", "k_cache", "v_cache", "cu_new_lens", "cu_cached_lens", "page_table", "angles", "start_positions")
"""The tensors of ``prim.attention_step``."""


def _step_specialized(self: AttentionKernels, call: CallArguments) -> SpecializedCall | None:
    tensors = {name: x for name in _STEP if (x := getattr(call, name)) is not None}
    indices = call.cu_new_lens, call.cu_cached_lens, call.page_table, call.start_positions
    if not _lie_as_kernels_read(tuple(tensors[name] for name in _STEP[:5])) or not as_read(*(x for x in (*indices, call.angles) if x is not None)):
        return None
    if any(x is not None and x.dtype is not torch.int32 for x in indices):
        return None
    found = _step_as_data(call, (call.max_new_len, room_of_step(call)))
    numbers = {name: number for name, x in tensors.items() for number, operand in enumerate(found.operands) if operand is x}
    if len(numbers) < len(tensors):
        return None
    plain, others = found.compute, {name: value for name, value in vars(call).items() if name not in tensors}

    def compute(*operands: Tensor) -> Tensor:
        by_name = {name: operands[number] for name, number in numbers.items()}
        if _caches_disjoint(*(by_name[name] for name in _STEP[:5])):
            return plain(*operands)
        return self.prim_attention_step(**by_name, **others)

    return found._replace(compute=compute)


def _step_as_data(call: CallArguments, sizes: tuple[int, int]) -> SpecializedCall:
    lengths, cached, table = call.cu_new_lens, call.cu_cached_lens, call.page_table
    q, k, turned = call.q, call.k, []
    if call.angles is not None:
        q, k = Buffer(q.dtype, tuple(q.shape)), Buffer(k.dtype, tuple(k.shape))
        how = {"sequence_first": False, "interleaved": call.interleaved, "backward": False, "start_positions": call.start_positions}
        of = {"freqs": call.angles, "cu_seqlens": lengths}
        turned = [kernel_call("rope", src=src, dst=dst, **how, **of) for src, dst in ((call.q, q), (call.k, k))]
    kept = {"k_cache": call.k_cache, "v_cache": call.v_cache, "table": table, "new_lengths": lengths, "cached_lengths": cached, "paged": True}
    out, stats, largest = (Buffer(dtype, (*q.shape[:2], n)) for dtype, n in ((q.dtype, call.v.shape[-1]), (torch.float32, 1), (torch.float32, 1)))
    mask = dict(zip(_MASK, _mask_of_step(call, check_step(call)), strict=True))
    lying = {"lengths_q": lengths, "lengths_kv": cached, "page_table_k": table, "page_table_v": table}
    lying |= dict(zip(("max_seqlen_q", "max_seqlen_kv"), sizes, strict=True))
    read = {"q": q, "k": call.k_cache, "v": call.v_cache, "out": out, "stats": stats, "largest": largest}
    attended = [kernel_call("zero", dst=out), kernel_call("attention_forward", **read, **mask, **lying)]
    return specialized(out, *turned, kernel_call("copy_to_cache", new_k=k, new_v=call.v, **kept), *attended)


_MASK = ("scale", "causal", "causal_bottom_right", "window_left", "window_right", "window_bottom_right")


def _mask_of_step(call: CallArguments, window: tuple[int, int]) -> _StepMask:
    return float(call.scale), True, True, *window, True


def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    cached: Tensor,
    table: Tensor,
    mask: _StepMask,
    sizes: tuple[int, int],
) -> Tensor:
    """A step of what has been checked and rotated. ``sizes``: the most new tokens of a sequence, and the tokens that one can have."""
    native.copy_to_cache(k, keys, v, values, table, lengths, cached, True)
    out = torch.zeros(*q.shape[:2], v.shape[-1], dtype=q.dtype, device=HOST)
    statistics = torch.empty(*q.shape[:2], 1, dtype=torch.float32, device=HOST)
    lying = lengths, None, cached, None, table, table, None
    native.attention_forward(q, keys, values, out, statistics, torch.empty_like(statistics), *mask, *lying, 0.0, _NOTHING_DRAWN, *sizes)
    return out


class AttentionKernels(AttentionBySteps):
    _served, _seeded = _SERVED, staticmethod(seeded)
    fused_attn_fwd = requires(_refused)(inherited(AttentionBySteps.fused_attn_fwd))
    fused_attn_bwd = requires(_refused)(inherited(AttentionBySteps.fused_attn_bwd))
    prim_attention = requires(_refused_beyond)(inherited(AttentionBySteps.prim_attention))
    prim_attention_backward = requires(_refused_beyond)(inherited(AttentionBySteps.prim_attention_backward))

    def get_fused_attn_backend(self, *arguments: Any, **named: Any) -> Any:
        return support_query(_ANSWERED, to_torch, arguments, named)

    def _attention_operands(self, call: CallArguments) -> tuple[QKVLayout, None]:
        names = ("s_quantizer", "o_quantizer", "dp_quantizer", "dqkv_quantizer")
        return _SERVED.check(call, tuple(getattr(call, name, None) for name in names)), None

    def _draw_state(self, call: CallArguments, dropout: float) -> Tensor:
        return draw_rng_state(call.Q.device, dropout, call.rng_gen)

    def _attended(
        self, call: CallArguments, lay: QKVLayout, offset: Tensor | None, dropout: float, rng_state: Tensor | None, formats: None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        rules = _rules(call, offset, dropout, rng_state)
        name = format_name(call.o_format, lay.q)
        out, stats, largest = outputs(lay, name, call.Q, call.V, torch.empty)
        q, k, v = _operands(lay, (call.Q, call.K, call.V))
        written = (_tokens(out, name), _tokens(stats, lay.statistics), _tokens(largest, lay.statistics))
        pages, lengths, extra = _pages(call), _lengths(lay, call), _extra_logits(rules, q.shape[-2])
        native.attention_forward(q, k, v, *written, *_mask(rules), *lengths, *pages, extra, *_draw(rules))
        return out, stats, largest

    def _attention_gradients(
        self, call: CallArguments, layouts: tuple[QKVLayout, QKVLayout], sides: tuple[Any, Any], stats: Tensor, rng_state: Any, formats: None = None
    ) -> tuple[Tensor, Tensor, Tensor, None, Tensor | None]:
        (lay, to), offset = layouts, sides[1]
        rules = _rules(call, offset, call.p_dropout, rng_state)
        dq, dk, dv = gradients(to, lay, call.Q, call.K, call.V, (call.Q.dtype, call.K.dtype, call.V.dtype))
        names = (format_name(call.o_format, lay.q), format_name(call.do_format, lay.q))
        q, k, v, o, do = _operands(lay, (call.Q, call.K, call.V), (call.O, call.dO), names)
        extra = _extra_logits(rules, q.shape[-2])
        doffset = None if offset is None else torch.empty(1, q.shape[-2], 1, 1, dtype=torch.float32, device=HOST)
        written = (_tokens(dq, to.q), _tokens(dk, to.kv), _tokens(dv, to.kv))
        row_stats, lengths = _readable(_tokens(stats, lay.statistics)), _lengths(lay, call)
        native.attention_backward(q, k, v, o, do, row_stats, *written, *_mask(rules), *lengths, extra, doffset, *_draw(rules))
        return dq, dk, dv, None, doffset

    @by_name
    def copy_to_kv_cache(self, call: CallArguments) -> None:
        name = format_name(call.kv_format, "THD" if call.new_k.ndim == 3 else "BSHD")
        check_cache_call(call)
        table = None if call.page_table is None else int32(call.page_table, "page_table of copy_to_kv_cache")
        if table is not None and not call.is_non_paged:
            table = table.flatten()[: call.b * call.max_pages_per_seq].view(call.b, call.max_pages_per_seq)
        new_lengths, cached_lengths = (
            int32(getattr(call, of)[: call.b + 1], f"{of} of copy_to_kv_cache") for of in ("cu_new_lens", "cu_cached_lens")
        )
        for of in ("k_cache", "v_cache"):
            check_no_inner_overlap(getattr(call, of), f"{of} of copy_to_kv_cache")
        caches = [_readable(cache) for cache in (call.k_cache, call.v_cache)]
        tokens = [_readable(_tokens(new.to(cache.dtype), name)) for new, cache in ((call.new_k, call.k_cache), (call.new_v, call.v_cache))]
        native.copy_to_cache(tokens[0], caches[0], tokens[1], caches[1], table, new_lengths, cached_lengths, not call.is_non_paged)
        for original, written in zip((call.k_cache, call.v_cache), caches, strict=True):
            if written is not original:
                original.copy_(written)

    @specialized_by(_step_specialized)
    @requires(_refused_step)
    @by_name
    def prim_attention_step(self, call: CallArguments) -> Any:
        window = check_step(call)
        q, k, v, keys, values = memory = call.q, call.k, call.v, call.k_cache, call.v_cache
        if not _lie_as_kernels_read(memory):
            check_outputs_disjoint("prim_attention_step", vars(call))
            return inherited(AttentionBySteps.prim_attention_step)(self, **vars(call))
        lengths, cached, table = (
            int32(x, f"{name} of prim.attention_step")
            for name, x in (("cu_new_lens", call.cu_new_lens), ("cu_cached_lens", call.cu_cached_lens), ("page_table", call.page_table))
        )
        if call.angles is not None:
            q, k = rotated((q, k), call.angles, call.interleaved, lengths, call.start_positions, "prim.attention_step")
        sizes = call.max_new_len, room_of_step(call)
        return _step(q, k, v, keys, values, lengths, cached, table, _mask_of_step(call, window), sizes)


_NOTHING_DRAWN = torch.zeros(2, dtype=torch.int64, device=HOST)


def _lie_as_kernels_read(memory: tuple[Tensor, ...]) -> bool:
    """Whether q, k, v and caches are read and written where they lie, and none lies in another's memory."""
    *read, keys, values = memory
    if any(x.stride(-1) != 1 for x in read) or not (keys.is_contiguous() and values.is_contiguous()):
        return False
    return _caches_disjoint(*memory)


def _caches_disjoint(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether none of the caches lies in another's memory."""
    places = [x.untyped_storage().data_ptr() for x in (q, k, v)]
    of_keys, of_values = keys.untyped_storage().data_ptr(), values.untyped_storage().data_ptr()
    return of_keys != of_values and of_keys not in places and of_values not in places


def _rules(call: CallArguments, offset: Tensor | None, dropout: float, rng_state: Tensor | None) -> ScoreRules[Tensor]:
    """The rules of a call without a bias; the state of the draw is any where nothing is dropped."""
    return ScoreRules.of(call, None, offset, dropout, torch.zeros(2, dtype=torch.int64, device=HOST) if rng_state is None else rng_state)


def _pages(call: CallArguments) -> tuple[Tensor | None, Tensor | None]:
    """The page tables of K and V; a call of ``prim.attention`` has one for both."""
    k, v = (
        None if table is None else int32(table, f"{own_name(call, name)} of attention")
        for name, table in (("page_table_k", call.page_table_k), ("page_table_v", call.page_table_v))
    )
    return k, v


def _tokens(x: Tensor, name: str) -> Tensor:
    """``[b, s, h, d]`` or, of THD, ``[t, h, d]``; a view."""
    return x if name == "THD" else x.permute(_TOKENS_FIRST[name])


def _readable(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _operands(lay: QKVLayout, qkv: Sequence[Tensor], rows: Sequence[Tensor] = (), names: Sequence[str] = ()) -> list[Tensor]:
    """Q, K and V, and ``rows`` in the formats of ``names``, as the kernels read them: of one dtype."""
    views = [_readable(_tokens(x, name)) for x, name in zip((*qkv, *rows), (lay.q, lay.kv, lay.kv, *names), strict=True)]
    return views if len({x.dtype for x in views}) == 1 else [x.float() for x in views]


def _lengths(lay: QKVLayout, call: CallArguments) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Cumulative lengths and starts of the queries, and of the keys: where sequences are not all as long as memory is."""
    flat = "THD" in (lay.q, lay.kv)
    if not flat and int(call.attn_mask_type) not in PADDING:
        return None, None, None, None
    q, kv = (int32(bounds(x, side), f"cu_seqlens_{side} of attention") for side, x in (("q", call.cu_seqlens_q), ("kv", call.cu_seqlens_kv)))
    check_counts(q.shape[0] - 1, kv.shape[0] - 1)
    starts_q, starts_kv = (
        None if x is None or not flat else int32(x, f"cu_seqlens_{side}_padded of attention")
        for side, x in (("q", call.cu_seqlens_q_padded), ("kv", call.cu_seqlens_kv_padded))
    )
    return q, starts_q, kv, starts_kv


def _mask(rules: ScoreRules[Tensor]) -> tuple[float, bool, bool, int, int, bool]:
    return rules.scale, rules.mask in CAUSAL, rules.mask in BOTTOM_RIGHT, *rules.window, rules.bottom_right_diagonal


def _draw(rules: ScoreRules[Tensor]) -> tuple[float, Tensor, int, int]:
    return rules.dropout, rules.rng_state.contiguous(), rules.max_sq, rules.max_skv


def _extra_logits(rules: ScoreRules[Tensor], heads: int) -> Tensor | None:
    """The logit of the denominator's extra term, of each head."""
    if rules.softmax == NVTE_Softmax_Type.NVTE_OFF_BY_ONE_SOFTMAX:
        return torch.zeros(heads, dtype=torch.float32, device=HOST)
    return None if rules.offset is None else rules.offset.float().flatten().contiguous()
