"""A call of fused_attn_fwd or fused_attn_bwd: what of it a backend serves, and the rules that turn Q and K into scores.

A ``call`` has the declared parameters of its function as attributes (``interface.declare.by_name``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

from fusible.errors import ArgumentError, NotServedError, ShapeError, expected
from fusible.tex.attention_layout import Layout, layout
from fusible.tex.enums import NVTE_Bias_Type, NVTE_Fused_Attn_Backend, NVTE_Mask_Type, NVTE_QKV_Layout, NVTE_Softmax_Type
from fusible.tex.protocol import is_quantized

__all__ = ["BOTTOM_RIGHT", "CAUSAL", "PADDING", "ScoreRules", "Served", "auxiliary", "bounds", "check_counts", "support_query"]

T = TypeVar("T")

_M = NVTE_Mask_Type
PADDING: frozenset[int] = frozenset({_M.NVTE_PADDING_MASK, _M.NVTE_PADDING_CAUSAL_MASK, _M.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK})
BOTTOM_RIGHT: frozenset[int] = frozenset({_M.NVTE_CAUSAL_BOTTOM_RIGHT_MASK, _M.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK})
CAUSAL: frozenset[int] = BOTTOM_RIGHT | {_M.NVTE_CAUSAL_MASK, _M.NVTE_PADDING_CAUSAL_MASK}


@dataclass(frozen=True)
class Served:
    """Which attention problems a backend serves; ``dtypes`` are its own values of fp32, bf16 and fp16."""

    backend: str
    dtypes: frozenset[Any]
    thd_bias: bool
    paged: bool

    def refusal(self, qkv_layout: Any, bias_type: Any, dtype: Any) -> str | None:
        """Why a problem is not served, or None."""
        lay = layout(qkv_layout)
        if lay is None or (lay.paged and not self.paged):
            return f"layout {NVTE_QKV_Layout(int(qkv_layout)).name} is not served; sbhd, bshd, bhsd and thd are, packed or separate"
        if int(bias_type) == NVTE_Bias_Type.NVTE_ALIBI:
            return "ALiBi is not served; no bias, a pre-scale and a post-scale bias are"
        if not self.thd_bias and lay.q == "THD" and int(bias_type) != NVTE_Bias_Type.NVTE_NO_BIAS:
            return "a bias of THD is not served; no bias is"
        if dtype not in self.dtypes:
            return f"{dtype} is not served; float32, bfloat16 and float16 are"
        return None

    def check(self, call: Any, quantizers: tuple[Any, ...]) -> Layout:
        """The layout of a call that is served. Raises ``NotServedError`` with the reason, ``ShapeError`` for shapes that do not fit."""
        tables = [getattr(call, name, None) for name in ("page_table_k", "page_table_v")]
        q, k, v = call.Q, call.K, call.V
        quantized = any(is_quantized(x) for x in (q, k, v)) or any(quantizer is not None for quantizer in quantizers)
        if quantized:
            reason = "FP8 attention is not served; bfloat16, float16 and float32 are"
        else:
            reason = self.refusal(call.qkv_layout, call.bias_type, q.dtype)
        lay = layout(call.qkv_layout)
        if reason is None and lay is not None and any((table is not None) != lay.paged for table in tables):
            reason = "a paged layout has no page tables, or another one has" if hasattr(call, "page_table_k") else "a paged KV cache has no gradient"
        if reason is not None or lay is None:
            raise NotServedError(
                expected("a problem it serves", of=f"the {self.backend} backend's attention", got=f"one where {reason}", do="change that")
            )
        _check_shapes(lay, q, k, v)
        return lay


def _check_shapes(lay: Layout, q: Any, k: Any, v: Any) -> None:
    for name, x, dims in (("Q", q, lay.q), ("K", k, lay.kv), ("V", v, lay.kv)):
        if x.ndim != len(dims):
            raise ShapeError(expected(f"[{', '.join(dims.lower())}]", of=f"{name} of attention", got=list(x.shape), do="reshape it"))
    if q.shape[lay.q.index("H")] % k.shape[lay.kv.index("H")] or k.shape[:-1] != v.shape[:-1] or q.shape[-1] != k.shape[-1]:
        wanted = "equal widths of Q and K, equal tokens of K and V, Q's heads a multiple of theirs"
        raise ShapeError(expected(wanted, of="attention", got=f"{list(q.shape)}, {list(k.shape)}, {list(v.shape)}", do="reshape them"))


@dataclass(frozen=True)
class ScoreRules(Generic[T]):
    """What turns Q and K into probabilities; ``T`` is the backend's tensor."""

    scale: float
    mask: int
    window: tuple[int, int]
    bottom_right_diagonal: bool
    bias_type: int
    bias: T | None
    softmax: int
    offset: T | None
    dropout: float
    rng_state: T
    max_sq: int
    max_skv: int

    @classmethod
    def of(cls, call: Any, bias: T | None, offset: T | None, dropout: float, rng_state: T, **more: Any) -> Self:
        """The rules of a call; ``more`` are the fields of a subclass. Raises ``ShapeError`` where a bias or an offset that its types ask for is
        missing."""
        has_bias, learnable = _side_inputs(call)
        for wanted, given, name in ((has_bias, bias, "Bias"), (learnable, offset, "SoftmaxOffset")):
            if wanted and given is None:
                raise ShapeError(expected(f"a {name} tensor", of="attention of that type", got="None", do=f"pass {name}"))
        left, right = (-1, -1) if call.window_size is None else (int(call.window_size[0]), int(call.window_size[1]))
        return cls(
            scale=float(call.attn_scale),
            mask=int(call.attn_mask_type),
            window=(left, right),
            bottom_right_diagonal=bool(call.bottom_right_diagonal),
            bias_type=int(call.bias_type),
            bias=bias if has_bias else None,
            softmax=int(call.softmax_type),
            offset=offset if learnable else None,
            dropout=float(dropout),
            rng_state=rng_state,
            max_sq=int(call.max_seqlen_q),
            max_skv=int(call.max_seqlen_kv),
            **more,
        )

    @property
    def pre_scale(self) -> bool:
        return self.bias_type == NVTE_Bias_Type.NVTE_PRE_SCALE_BIAS


def auxiliary(call: Any) -> tuple[Any, Any, Any | None, Any | None]:
    """``(Stats, rng_state, Bias, SoftmaxOffset)`` of what forward returned and backward is given."""
    tensors: Sequence[Any] = call.Aux_CTX_Tensors
    has_bias, learnable = _side_inputs(call)
    count = 2 + has_bias + learnable
    if len(tensors) != count:
        do = "pass what the forward returned after O, without Max"
        raise ShapeError(expected(f"{count} tensors", of="Aux_CTX_Tensors", got=len(tensors), do=do))
    rest = list(tensors[2:])
    return tensors[0], tensors[1], rest.pop(0) if has_bias else None, rest.pop(0) if learnable else None


def _side_inputs(call: Any) -> tuple[bool, bool]:
    """Whether a call has a bias, and a learnable softmax offset."""
    return int(call.bias_type) != NVTE_Bias_Type.NVTE_NO_BIAS, int(call.softmax_type) == NVTE_Softmax_Type.NVTE_LEARNABLE_SOFTMAX


def bounds(cu_seqlens: T | None, side: str) -> T:
    """The cumulative lengths of ``side`` (``"q"`` or ``"kv"``), which THD and padding masks ask for."""
    if cu_seqlens is None:
        raise ArgumentError(expected("cumulative lengths [b + 1]", of=f"cu_seqlens_{side}", got="None", do="pass them for THD and padding masks"))
    return cu_seqlens


def check_counts(q: int, kv: int) -> None:
    """Raise ``ArgumentError`` unless there are equally many sequences of queries and of keys."""
    if q != kv:
        got = f"{q} and {kv}"
        raise ArgumentError(expected("equally many sequences", of="cu_seqlens_q and cu_seqlens_kv", got=got, do="pass one of each per sequence"))


_QUERY_ARGUMENTS = (
    "is_training q_dtype kv_dtype qkv_layout bias_type attn_mask_type softmax_type p_dropout num_attn_heads num_gqa_groups max_seqlen_q "
    "max_seqlen_kv head_dim_qk head_dim_v window_size_left window_size_right return_max_logit cuda_graph deterministic"
).split()


def support_query(served: Served, to_dtype: Callable[[Any], Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """``get_fused_attn_backend`` of a backend that serves what ``served`` says; ``to_dtype`` gives its own value of a ``tex.DType``."""
    given: Any = arguments[0] if arguments else named.get("fused_attn_params")
    if len(arguments) + len(named) == 1 and hasattr(given, "qkv_layout"):
        reason = served.refusal(given.qkv_layout, given.bias_type, to_dtype(given.qkv_dtype))
        return _answer(reason), reason or ""
    values = dict(zip(_QUERY_ARGUMENTS, arguments, strict=False)) | named
    missing = [name for name in _QUERY_ARGUMENTS[:17] if name not in values]
    if missing or set(values) - set(_QUERY_ARGUMENTS):
        raise TypeError(expected("fused_attn_params, or 19 arguments", of="get_fused_attn_backend", got=sorted(values), do=f"pass {missing} too"))
    return _answer(served.refusal(values["qkv_layout"], values["bias_type"], to_dtype(values["q_dtype"])))


def _answer(reason: str | None) -> NVTE_Fused_Attn_Backend:
    return NVTE_Fused_Attn_Backend.NVTE_No_Backend if reason else NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen
