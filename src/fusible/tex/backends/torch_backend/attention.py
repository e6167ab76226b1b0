"""Scaled dot-product attention: what is served."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusible.tex.backends.torch_backend import kv_cache
from fusible.tex.backends.torch_backend.attention_fp8 import (
    Amax,
    quantized_gradients,
    quantizes,
    read,
    refused_formats,
    result_dtype,
    without_gradient,
)
from fusible.tex.backends.torch_backend.attention_math import Scores
from fusible.tex.backends.torch_backend.attention_walk import Backward, attended
from fusible.tex.backends.torch_backend.quantizing import emit
from fusible.tex.backends.torch_backend.token_layouts import TokenLayoutKernels
from fusible.tex.calls.attention import Served
from fusible.tex.calls.attention_buffers import draw_rng_state, seeded
from fusible.tex.calls.attention_layout import QKVLayout, format_name, layout
from fusible.tex.calls.attention_query import support_query
from fusible.tex.calls.attention_steps import AttentionBySteps
from fusible.tex.interface.declare import CallArguments, inherited, requires
from fusible.tex.protocol import QuantizerLike, to_torch
from fusible.tex.selection.dispatch import inner

__all__ = ["AttentionKernels"]


class _Formats(NamedTuple):
    """The dtypes of the results, the quantizer of the results or None, and the quantizer that observes the scores or their gradients."""

    dtypes: list[torch.dtype]
    quantizer: Any
    observer: Any

    @property
    def written(self) -> list[torch.dtype]:
        """What results are of before they are quantized."""
        return self.dtypes if self.quantizer is None else [torch.float32] * 3


def _formats(call: CallArguments, quantizer: QuantizerLike | None = None, observer: Any = None) -> _Formats:
    dtypes = [result_dtype(x, getattr(call, "fake_dtype", None)) for x in (call.Q, call.K, call.V)]
    return _Formats(dtypes, quantizer if quantizes(quantizer) else None, observer)


_BEST = SimpleNamespace(**{name: inner(name) for name in ("copy_to_kv_cache", "fused_attn_fwd", "fused_rope_forward")})
"""Functions of a step, whoever serves them."""


class AttentionKernels(TokenLayoutKernels, AttentionBySteps):
    _served = Served("torch", frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64}), paged=True, alibi=True, fp8=True)
    _seeded, _put_cache = staticmethod(seeded), staticmethod(kv_cache.put)
    fused_attn_fwd = requires(refused_formats)(inherited(AttentionBySteps.fused_attn_fwd))
    fused_attn_bwd = requires(refused_formats)(inherited(AttentionBySteps.fused_attn_bwd))

    def get_fused_attn_backend(self, *arguments: Any, **named: Any) -> Any:
        return support_query(self._served, to_torch, arguments, named)

    def _functions_of_step(self, call: CallArguments) -> Any:
        """Its own on the host, whose kernels serve a step as a whole; of a device, those of a library that has them and no step."""
        return self if call.q.is_cpu else _BEST

    def _attention_operands(self, call: CallArguments) -> tuple[QKVLayout, _Formats]:
        qkv = layout(call.qkv_layout) or QKVLayout("", "")  # it is not known yet whether it is served
        orders = {"Q": qkv.q, "K": qkv.kv, "V": qkv.kv}
        if hasattr(call, "dO"):
            formats = _formats(call, call.dqkv_quantizer, call.dp_quantizer)
            without_gradient(call)
            orders |= {"O": format_name(call.o_format, qkv.q), "dO": format_name(call.do_format, qkv.q)}
        else:
            formats = _formats(call, call.o_quantizer, call.s_quantizer)
        read(call, **orders)
        return self._served.check(call), formats

    def _draw_state(self, call: CallArguments, dropout: float) -> Tensor:
        return draw_rng_state(call.Q.device, dropout, call.rng_gen)

    def _attended(
        self, call: CallArguments, lay: QKVLayout, offset: Any, dropout: float, rng_state: Any, formats: _Formats | None = None
    ) -> tuple[Any, Tensor, Tensor]:
        (dtype, *_), quantizer, observer = formats = formats or _formats(call)
        scores, seen = Scores.of(call, call.Bias, offset, dropout, rng_state), Amax(observer)
        out, stats, largest = attended(call, lay, scores, seen, formats.written[0])
        seen.record()
        return out if quantizer is None else emit(out, quantizer, dtype), stats, largest

    def _attention_gradients(
        self,
        call: CallArguments,
        layouts: tuple[QKVLayout, QKVLayout],
        sides: tuple[Any, Any],
        stats: Any,
        rng_state: Any,
        formats: _Formats | None = None,
    ) -> tuple[Any, Any, Any, Any, Any]:
        dtypes, quantizer, observer = formats = formats or _formats(call)
        bias, offset = sides
        scores, seen = Scores.of(call, bias, offset, call.p_dropout, rng_state), Amax(observer)
        walk = Backward(call, layouts, scores, stats, offset, formats.written, seen)
        seen.record()
        dq, dk, dv = walk.grads if quantizer is None else quantized_gradients(walk.grads, layouts[1], quantizer, dtypes[0])
        return dq, dk, dv, walk.bias_gradient, walk.doffset
