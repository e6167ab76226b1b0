"""The functions of attention by the steps that backends of whole problems differ in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from fusible.tex.calls.attention import Served, auxiliary, beyond_nvidias, check_outputs, check_stats, side_inputs
from fusible.tex.calls.attention_layout import QKVLayout, format_name, gradient_layout
from fusible.tex.calls.checks import check_probability
from fusible.tex.calls.kv_cache import attention_of_step, check_cache_call, check_step, copy_of_step
from fusible.tex.enums import NVTE_QKV_Format
from fusible.tex.interface.attention import Attention
from fusible.tex.interface.declare import CallArguments, by_name
from fusible.tex.protocol import TensorLike

__all__ = ["AttentionBySteps"]


class AttentionBySteps(Attention):
    _served: ClassVar[Served]
    _seeded: ClassVar[Callable[..., Any]]
    """``(seed, offset)``: the state of the draw of an int64 ``seed [1]``."""
    _put_cache: ClassVar[Callable[..., None]]
    """``(call, name)``: what ``copy_to_kv_cache`` writes, of tokens in the format ``name``."""

    def _attention_operands(self, call: CallArguments) -> tuple[QKVLayout, Any]:
        """The layout of a call of ``fused_attn_*`` that is served, and what later steps need to know of the operands' number formats.

        Operands are read as plain tensors here.
        """
        raise NotImplementedError

    def _draw_state(self, call: CallArguments, dropout: float) -> Any:
        """``(seed, offset)`` of a forward call."""
        raise NotImplementedError

    def _attended(
        self, call: CallArguments, lay: QKVLayout, offset: TensorLike | None, dropout: float, rng_state: TensorLike, formats: Any = None
    ) -> tuple[Any, Any, Any]:
        """O, Stats and Max; ``formats``: of ``_attention_operands``."""
        raise NotImplementedError

    def _attention_gradients(
        self, call: CallArguments, layouts: tuple[QKVLayout, QKVLayout], sides: tuple[Any, Any], stats: Any, rng_state: Any, formats: Any = None
    ) -> tuple[Any, Any, Any, Any, Any]:
        """Of Q, K and V, in the second of the layouts, and of ``sides``, Bias and SoftmaxOffset."""
        raise NotImplementedError

    @by_name
    def fused_attn_fwd(self, call: CallArguments) -> list[Any]:
        lay, formats = self._attention_operands(call)
        dropout = call.p_dropout if call.is_training else 0.0
        check_probability(dropout, "fused_attn_fwd")
        rng_state = self._draw_state(call, dropout)
        out, stats, largest = self._attended(call, lay, call.SoftmaxOffset, dropout, rng_state, formats)
        return [out, stats, *([largest] if call.return_max_logit else []), rng_state, *side_inputs(call)]

    @by_name
    def fused_attn_bwd(self, call: CallArguments) -> list[Any]:
        lay, formats = self._attention_operands(call)
        to = gradient_layout(call.dqkv_layout, lay)
        check_probability(call.p_dropout, "fused_attn_bwd")
        stats, rng_state, *sides = auxiliary(call)
        return [*self._attention_gradients(call, (lay, to), (sides[0], sides[1]), stats, rng_state, formats)]

    @by_name
    def prim_attention(self, call: CallArguments) -> tuple[Any, Any]:
        check_probability(call.probability, "prim.attention")
        call = beyond_nvidias(call, self._seeded)
        return self._attended(call, self._served.check(call), None, call.p_dropout, call.rng_state)[:2]

    @by_name
    def prim_attention_backward(self, call: CallArguments) -> tuple[Any, Any, Any, Any]:
        check_probability(call.probability, "prim.attention_backward")
        call = beyond_nvidias(call, self._seeded)
        lay = self._served.check(call)
        check_outputs(call)
        check_stats(call.stats, call)
        return self._attention_gradients(call, (lay, lay), (call.Bias, None), call.stats, call.rng_state)[:4]

    @by_name
    def copy_to_kv_cache(self, call: CallArguments) -> None:
        check_cache_call(call)
        self._put_cache(call, format_name(call.kv_format, "THD" if call.new_k.ndim == 3 else "BSHD"))

    def _functions_of_step(self, call: CallArguments) -> Any:
        """What has the three functions that a step is made of."""
        return self

    @by_name
    def prim_attention_step(self, call: CallArguments) -> Any:
        check_step(call)
        functions, q, k = self._functions_of_step(call), call.q, call.k
        if call.angles is not None:
            where = call.start_positions, NVTE_QKV_Format.NVTE_THD, call.interleaved, call.cu_new_lens, 1, 0
            q, k = (functions.fused_rope_forward(x, call.angles, *where) for x in (q, k))
        functions.copy_to_kv_cache(**copy_of_step(call, k))
        return functions.fused_attn_fwd(**attention_of_step(call, q))[0]
