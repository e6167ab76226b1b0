"""A call of fused_attn_fwd or fused_attn_bwd: what of it a backend serves, and the rules that turn Q and K into scores.

A ``call`` has the declared parameters of its function as attributes (``interface.declare.by_name``).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Generic, NoReturn, Self, TypeVar

import torch

from fusible.errors import ArgumentError, NotServedError, ShapeError, expected
from fusible.tex.calls.attention_layout import QKVLayout, layout
from fusible.tex.enums import NVTE_Bias_Type, NVTE_Mask_Type, NVTE_QKV_Format, NVTE_QKV_Layout, NVTE_Softmax_Type
from fusible.tex.formats import is_quantized
from fusible.tex.interface.declare import CallArguments
from fusible.tex.protocol import TensorLike, to_torch

__all__ = [
    "BOTTOM_RIGHT",
    "CAUSAL",
    "PADDING",
    "ScoreRules",
    "Served",
    "alibi_slopes",
    "auxiliary",
    "beyond_nvidias",
    "bounds",
    "check_counts",
    "check_outputs",
    "check_stats",
    "check_within",
    "edges_of_window",
    "has_bias",
    "own_name",
    "side_inputs",
]

T = TypeVar("T", bound=TensorLike)

_M = NVTE_Mask_Type
_WIDEST = 2**31 - 1
PADDING: frozenset[int] = frozenset({_M.NVTE_PADDING_MASK, _M.NVTE_PADDING_CAUSAL_MASK, _M.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK})
BOTTOM_RIGHT: frozenset[int] = frozenset({_M.NVTE_CAUSAL_BOTTOM_RIGHT_MASK, _M.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK})
CAUSAL: frozenset[int] = BOTTOM_RIGHT | {_M.NVTE_CAUSAL_MASK, _M.NVTE_PADDING_CAUSAL_MASK}


@dataclass(frozen=True)
class Served:
    """Which attention problems a backend serves; ``dtypes`` are its own values of fp32, bf16 and fp16."""

    backend: str
    dtypes: frozenset[Any]
    paged: bool = False
    alibi: bool = False
    fp8: bool = False

    def refusal(self, qkv_layout: int, bias_type: int, dtype: Any) -> str | None:
        """Why a problem is not served, or None."""
        lay = layout(qkv_layout)
        if lay is None or (lay.paged and not self.paged):
            return f"layout {NVTE_QKV_Layout(int(qkv_layout)).name} is not served; sbhd, bshd, bhsd and thd are, packed or separate"
        if int(bias_type) == NVTE_Bias_Type.NVTE_ALIBI and not self.alibi:
            return "ALiBi is not served; no bias, a pre-scale and a post-scale bias are"
        if dtype not in self.dtypes:
            return f"{dtype} is not served; float32, bfloat16 and float16 are"
        return None

    def check(self, call: CallArguments, quantizers: tuple[Any, ...] = ()) -> QKVLayout:
        """The layout of a call that is served. Raises ``NotServedError`` with the reason, ``ShapeError`` for shapes that do not fit.

        A backend of ``fp8`` checks its operands once they are read as plain tensors.
        """
        tables = {name: getattr(call, name, None) for name in ("page_table_k", "page_table_v")}
        q, k, v = call.Q, call.K, call.V
        quantized = any(is_quantized(x) for x in (q, k, v)) or any(quantizer is not None for quantizer in quantizers)
        if quantized and not self.fp8:
            reason = "FP8 attention is not served; bfloat16, float16 and float32 are"
        else:
            reason = self.refusal(call.qkv_layout, call.bias_type, q.dtype)
        lay = layout(call.qkv_layout)
        if reason is None and lay is not None and lay.paged and not hasattr(call, "page_table_k"):
            reason = "a paged KV cache has no gradient"
        wrong = [name for name, table in tables.items() if lay is not None and (table is not None) != lay.paged]
        if reason is None and wrong:
            asked = "None, and the layout is paged" if tables[wrong[0]] is None else "given, and the layout is not paged"
            reason = f"{own_name(call, wrong[0])} is {asked}"
        if reason is not None or lay is None:
            raise NotServedError(
                expected("a problem it serves", of=f"the {self.backend} backend's attention", got=f"one where {reason}", do="change that")
            )
        _check_shapes(lay, call)
        _check_sequences(lay, call, [*tables.values()])
        return lay


def _check_shapes(lay: QKVLayout, call: CallArguments) -> None:
    q, k, v = call.Q, call.K, call.V

    def refuse(argument: str, wanted: str) -> NoReturn:
        of = f"{own_name(call, argument)} of attention"
        raise ShapeError(expected(wanted, of=of, got=list(getattr(call, argument).shape), do="reshape it"))

    for argument, x, dims in (("Q", q, lay.q), ("K", k, lay.kv), ("V", v, lay.kv)):
        if x.ndim != len(dims):
            refuse(argument, f"[{', '.join(dims.lower())}]")
    groups = k.shape[lay.kv.index("H")]
    if q.shape[-1] != k.shape[-1]:
        refuse("K", f"the width of {own_name(call, 'Q')}, {q.shape[-1]}")
    if k.shape[:-1] != v.shape[:-1]:
        refuse("V", f"the tokens and heads of {own_name(call, 'K')}, {list(k.shape[:-1])}")
    if q.shape[lay.q.index("H")] % groups:
        refuse("Q", f"heads that are a multiple of the {groups} of {own_name(call, 'K')}")


def _check_sequences(lay: QKVLayout, call: CallArguments, tables: Sequence[Any]) -> None:
    """Every sequence of dense queries has keys: a batch of its own, or a row of each page table."""
    if "B" not in lay.q:
        return
    batch = call.Q.shape[lay.q.index("B")]
    rows = [table.shape[0] for table in tables if table is not None] if lay.paged else [call.K.shape[lay.kv.index("B")]]
    if any(count < batch for count in rows):
        queries, holder = own_name(call, "Q"), own_name(call, "page_table_k" if lay.paged else "K")
        wanted = f"keys of the {batch} sequences that {queries} has"
        raise ShapeError(expected(wanted, of=f"{holder} of attention", got=f"those of {min(rows)}", do="pass as many"))


def check_outputs(call: CallArguments) -> None:
    """Raise unless O and its gradient have the shape of Q with the width of V."""
    wanted = [*call.Q.shape[:-1], call.V.shape[-1]]
    for argument in ("O", "dO"):
        shape = list(getattr(call, argument).shape)
        if shape != wanted:
            of = f"{own_name(call, argument)} of attention"
            raise ShapeError(expected(f"shape {wanted}", of=of, got=shape, do="pass what the forward returned, and a gradient of it"))


@dataclass(frozen=True)
class ScoreRules(Generic[T]):
    """What turns Q and K into probabilities; ``T`` is the backend's tensor."""

    scale: float
    mask: int
    window: tuple[int, int]
    bottom_right_diagonal: bool
    soft_cap: float | None
    bias_type: int
    bias: T | None
    slopes: Sequence[float] | None
    softmax: int
    offset: T | None
    dropout: float
    rng_state: T
    max_sq: int
    max_skv: int

    @classmethod
    def of(cls, call: CallArguments, bias: T | None, offset: T | None, dropout: float, rng_state: T, **more: Any) -> Self:
        """The rules of a call; ``more`` are the fields of a subclass.

        A call of ``prim.attention`` also has ``soft_cap`` and ``alibi_slopes`` (``beyond_nvidias``). Raises ``ShapeError`` where ``bias_type`` or
        ``softmax_type`` needs a tensor that is missing.
        """
        biased, learnable = has_bias(call), _learnable(call)
        for wanted, value, name in ((biased, bias, "Bias"), (learnable, offset, "SoftmaxOffset")):
            if wanted and value is None:
                raise ShapeError(expected(f"a {name} tensor", of="attention of that type", got="None", do=f"pass {name}"))
        _check_side_inputs(call, bias if biased else None, offset if learnable else None)
        return cls(
            scale=float(call.attn_scale),
            mask=int(call.attn_mask_type),
            window=edges_of_window(call.window_size),
            bottom_right_diagonal=bool(call.bottom_right_diagonal),
            soft_cap=getattr(call, "soft_cap", None),
            bias_type=int(call.bias_type),
            bias=bias if biased else None,
            slopes=_slopes(call),
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


def edges_of_window(size: Sequence[int] | None) -> tuple[int, int]:
    """The two edges of a window, None standing for none; one beyond int32 is as wide as any sequence."""
    if size is None:
        return -1, -1
    if len(size) != 2 or not all(hasattr(edge, "__index__") for edge in size):
        raise ArgumentError(expected("two integers", of="window_size of attention", got=list(size), do="pass how far to look left and right"))
    left, right = (min(operator.index(edge), _WIDEST) for edge in size)
    return left, right


def _check_side_inputs(call: CallArguments, bias: TensorLike | None, offset: TensorLike | None) -> None:
    lay = layout(call.qkv_layout)
    assert lay is not None
    heads = call.Q.shape[lay.q.index("H")]
    if bias is not None:
        queries = call.Q.shape[lay.q.index("S")] if "S" in lay.q else int(call.max_seqlen_q)
        keys = call.K.shape[lay.kv.index("S")] if "S" in lay.kv and not lay.paged else int(call.max_seqlen_kv)
        shape = tuple(bias.shape)
        fits = len(shape) == 4 and shape[1] in (1, heads) and (shape[2] == 1 or shape[2] >= queries) and (shape[3] == 1 or shape[3] >= keys)
        if not fits:
            wanted = f"[b or 1, {heads} or 1, {queries} or 1, {keys} or 1]"
            raise ShapeError(expected(wanted, of="Bias of attention", got=list(shape), do="pass one of a shape that the scores broadcast from"))
    if offset is not None and math.prod(offset.shape) != heads:
        raise ShapeError(expected(f"[1, {heads}, 1, 1]", of="SoftmaxOffset", got=list(offset.shape), do="pass one offset per head"))


def side_inputs(call: CallArguments) -> list[Any]:
    """The tensors among Bias and SoftmaxOffset that forward hands on to backward. A softmax off by one hands on a SoftmaxOffset that it was given,
    and reads it as 0."""
    offset = call.SoftmaxOffset if int(call.softmax_type) != NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX else None
    return [x for x in (call.Bias if has_bias(call) else None, offset) if x is not None]


def auxiliary(call: CallArguments) -> tuple[Any, Any, Any | None, Any | None]:
    """``(Stats, rng_state, Bias, SoftmaxOffset)`` of what forward returned and backward is given."""
    tensors: Sequence[Any] = call.Aux_CTX_Tensors
    biased, learnable = has_bias(call), _learnable(call)
    count = 2 + biased + learnable
    may_have_offset = int(call.softmax_type) == NVTE_Softmax_Type.NVTE_OFF_BY_ONE_SOFTMAX
    if not count <= len(tensors) <= count + may_have_offset:
        do = "pass what the forward returned after O, without Max"
        raise ShapeError(expected(f"{count} tensors", of="Aux_CTX_Tensors", got=len(tensors), do=do))
    check_stats(tensors[0], call)
    rest = list(tensors[2:])
    return tensors[0], tensors[1], rest.pop(0) if biased else None, rest.pop(0) if rest else None


def check_stats(stats: TensorLike, call: CallArguments) -> None:
    """Raise unless ``stats`` are fp32 ``[b, h, s, 1]``, or of THD ``[t, h, 1]``; fp64 where Q is."""
    lay = layout(call.qkv_layout)
    assert lay is not None
    size = dict(zip(lay.q, call.Q.shape, strict=True))
    wanted = [size["T"], size["H"], 1] if lay.q == "THD" else [size["B"], size["H"], size["S"], 1]
    dtype = torch.float64 if call.Q.dtype is torch.float64 else torch.float32
    if to_torch(stats.dtype) is not dtype or list(stats.shape) != wanted:
        got = f"{stats.dtype} {list(stats.shape)}"
        name = "fp32" if dtype is torch.float32 else "fp64"
        of = "stats" if hasattr(call, "stats") else "Aux_CTX_Tensors[0] (Stats)"
        raise ShapeError(expected(f"{name} {wanted}", of=of, got=got, do="pass what the forward returned"))
    if isinstance(stats, torch.Tensor) and stats.is_meta and not getattr(call.dO, "is_meta", True):
        raise ArgumentError(expected("a tensor with data", of="Aux_CTX_Tensors[0]", got="one on meta", do="pass what the forward returned"))


def has_bias(call: CallArguments) -> bool:
    """Whether a call has a Bias tensor; ALiBi is computed."""
    return int(call.bias_type) not in (NVTE_Bias_Type.NVTE_NO_BIAS, NVTE_Bias_Type.NVTE_ALIBI)


def _learnable(call: CallArguments) -> bool:
    return int(call.softmax_type) == NVTE_Softmax_Type.NVTE_LEARNABLE_SOFTMAX


_OF_PRIM = {"Q": "q", "K": "k", "V": "v", "O": "o", "dO": "do", "page_table_k": "page_table", "page_table_v": "page_table"}
"""The names that ``prim.attention`` has for arguments of NVIDIA's functions."""


def own_name(call: CallArguments, argument: str) -> str:
    """What the called function itself names an argument of ``fused_attn_fwd``."""
    return getattr(call, "own_names", {}).get(argument, argument)


def beyond_nvidias(call: CallArguments, rng_state: Callable[[Any, int], Any]) -> SimpleNamespace:
    """The arguments of ``prim.attention`` or of its backward, under the names of ``fused_attn_fwd`` and ``fused_attn_bwd``, with ``soft_cap``,
    ``alibi_slopes`` and ``rng_state`` beside them, and ``own_names`` for what errors say.

    ``rng_state(seed, offset)`` makes the state of the draw. Raises ``ArgumentError`` for dropout without a seed.
    """
    if call.probability and call.seed is None:
        raise ArgumentError(expected("an int64 tensor [1]", of="the seed of attention with dropout", got="None", do="pass one"))
    unset, mask = NVTE_QKV_Format.NVTE_QKV_Format_NOT_SET, int(call.attn_mask_type)
    bias_type = NVTE_Bias_Type.NVTE_NO_BIAS if call.bias is None else NVTE_Bias_Type.NVTE_POST_SCALE_BIAS
    state = rng_state(call.seed, call.offset) if call.probability else None
    return SimpleNamespace(
        own_names=_OF_PRIM, Q=call.q, K=call.k, V=call.v,
        Bias=call.bias, bias_type=bias_type, SoftmaxOffset=None, softmax_type=NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX,
        attn_scale=call.scale, soft_cap=call.soft_cap, alibi_slopes=call.alibi_slopes, p_dropout=call.probability, rng_state=state,
        qkv_layout=call.qkv_layout, o_format=unset, do_format=unset, dqkv_layout=call.qkv_layout, attn_mask_type=mask,
        window_size=call.window_size, bottom_right_diagonal=mask in BOTTOM_RIGHT, max_seqlen_q=call.max_seqlen_q, max_seqlen_kv=call.max_seqlen_kv,
        cu_seqlens_q=call.cu_seqlens_q, cu_seqlens_kv=call.cu_seqlens_kv, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None,
        **{name: getattr(call, "page_table", None) for name in ("page_table_k", "page_table_v")},
        **({"O": call.o, "dO": call.do, "stats": call.stats} if hasattr(call, "do") else {}),
    )  # fmt: skip


def _slopes(call: CallArguments) -> Sequence[float] | None:
    """The slope of each head; None without ALiBi."""
    slopes, lay = getattr(call, "alibi_slopes", None), layout(call.qkv_layout)
    assert lay is not None
    heads = call.Q.shape[lay.q.index("H")]
    if slopes is None:
        return alibi_slopes(heads) if int(call.bias_type) == NVTE_Bias_Type.NVTE_ALIBI else None
    if len(slopes) != heads:
        raise ShapeError(expected(f"{heads} numbers", of="alibi_slopes of attention", got=len(slopes), do="give each head a slope"))
    return slopes


def alibi_slopes(heads: int) -> list[float]:
    """The slope of each head (Press et al. 2022, arXiv:2108.12409): ``2^(-8 i / n)`` for the largest power of two ``n <= heads``, ``i`` from 1;

    the other heads take every second of the ``2 n`` slopes ``2^(-4 i / n)``, from the first on.
    """
    n = 1 << (heads.bit_length() - 1) if heads else 1
    return [2.0 ** (-8.0 * i / n) for i in range(1, min(n, heads) + 1)] + [2.0 ** (-4.0 * i / n) for i in range(1, 2 * (heads - n) + 1, 2)]


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


def check_within(ends: Sequence[int], limit: int, side: str) -> None:
    """Raise ``ShapeError`` where a sequence ends past the ``limit`` tokens of its side."""
    if ends and max(ends) > limit:
        of = f"a sequence by cu_seqlens_{side}"
        raise ShapeError(expected(f"at most {limit} tokens", of=of, got=max(ends), do="pass the lengths of the tensors"))
