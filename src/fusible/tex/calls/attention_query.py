"""``get_fused_attn_backend``: whether a backend's attention serves a problem that is described and not there yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fusible.errors import DTypeError, expected
from fusible.tex.calls.attention import Served
from fusible.tex.calls.attention_layout import layout
from fusible.tex.enums import NVTE_Fused_Attn_Backend, NVTEScalingMode
from fusible.tex.protocol import FP8_MAX
from fusible.tex.protocol import to_dtype as to_value

__all__ = ["support_query"]

_NAMES = (
    "is_training q_dtype kv_dtype qkv_layout bias_type attn_mask_type softmax_type p_dropout num_attn_heads num_gqa_groups max_seqlen_q "
    "max_seqlen_kv head_dim_qk head_dim_v window_size_left window_size_right return_max_logit cuda_graph deterministic"
).split()


def support_query(served: Served, to_dtype: Callable[[Any], Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """``get_fused_attn_backend`` of a backend that serves what ``served`` says; ``to_dtype`` gives its own value of a ``tex.DType``."""
    params: Any = arguments[0] if arguments else named.get("fused_attn_params")
    if len(arguments) + len(named) == 1 and hasattr(params, "qkv_layout"):
        answer, reason = _answer(served, to_dtype, params.qkv_dtype, lambda name, default: getattr(params, name, default))
        return answer, reason or ""
    arguments = arguments if params is not None else ()
    values = dict(zip(_NAMES, arguments, strict=False)) | named
    missing = [name for name in _NAMES[:17] if name not in values]
    if missing or set(values) - set(_NAMES) or len(arguments) > len(_NAMES):
        raise DTypeError(expected("fused_attn_params, or 19 arguments", of="get_fused_attn_backend", got=sorted(values), do=f"pass {missing} too"))
    if to_value(values["q_dtype"]) != to_value(values["kv_dtype"]):
        return NVTE_Fused_Attn_Backend.NVTE_No_Backend
    values["dropout"] = values["p_dropout"]
    return _answer(served, to_dtype, values["q_dtype"], values.get)[0]


def _answer(served: Served, to_dtype: Callable[[Any], Any], dtype: Any, get: Callable[[str, Any], Any]) -> tuple[NVTE_Fused_Attn_Backend, str | None]:
    """The kernels that serve the problem whose attributes ``get(name, default)`` reads, or none and the reason."""
    fp8 = served.fp8 and to_value(dtype) in FP8_MAX
    reason = served.refusal(get("qkv_layout", None), get("bias_type", 0), next(iter(served.dtypes)) if fp8 else to_dtype(dtype))
    reason = reason or _refusal(get) or (_fp8_refusal(get) if fp8 else None)
    if reason:
        return NVTE_Fused_Attn_Backend.NVTE_No_Backend, reason
    return (NVTE_Fused_Attn_Backend.NVTE_FP8 if fp8 else NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen), None


def _refusal(get: Callable[[str, Any], Any]) -> str | None:
    lay = layout(get("qkv_layout", None))
    assert lay is not None
    heads, groups = get("num_attn_heads", 0), get("num_gqa_groups", 0)
    if groups and heads % groups:
        return f"{heads} heads are no multiple of {groups} groups"
    if not 0 <= get("dropout", 0.0) < 1:
        return f"dropout of probability {get('dropout', 0.0)} is not served; [0, 1) is"
    if lay.packed > 1 and get("head_dim_qk", 0) != get("head_dim_v", 0):
        return "a packed layout of Q, K and V of different widths is not served; separate tensors are"
    if lay.paged and get("is_training", False):
        return "a paged KV cache has no gradient"
    if "THD" in (lay.q, lay.kv) and get("cuda_graph", False):
        return "THD within a captured graph is not served: its lengths are read on the host"
    return None


def _fp8_refusal(get: Callable[[str, Any], Any]) -> str | None:
    mode = get("scaling_mode", NVTEScalingMode.NVTE_DELAYED_TENSOR_SCALING)
    if int(mode) not in (NVTEScalingMode.NVTE_DELAYED_TENSOR_SCALING, NVTEScalingMode.NVTE_MXFP8_1D_SCALING):
        return f"{NVTEScalingMode(int(mode)).name} is not served; FP8 of one scale per tensor and MXFP8 are"
    return None
