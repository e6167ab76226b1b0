"""Functions for attention over a batch of sequences, and for rotary position embedding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fusible import tex
from fusible.errors import ShapeError, expected
from fusible.nvte.dtype import DType, accumulator
from fusible.nvte.elementwise import interleave, reshape
from fusible.nvte.execution import current_pass
from fusible.nvte.tensor import Tensor
from fusible.tex import NVTE_Bias_Type, NVTE_Mask_Type, NVTE_QKV_Format, NVTE_QKV_Layout, NVTE_Softmax_Type
from fusible.tex.calls.attention import alibi_slopes

__all__ = [
    "AttentionAux",
    "EVERYWHERE",
    "PLAIN_SCORES",
    "Rotary",
    "ScoreOptions",
    "Sequences",
    "attention",
    "dattention",
    "drope",
    "merge_attention",
    "rope",
]

EVERYWHERE = (-1, -1)
"""A window without edges."""


@dataclass(frozen=True, eq=False)
class Sequences:
    """How the tokens of a batch ``[tokens, ...]`` divide into sequences that lie one after another.

    ``cu_seqlens``: int32 ``[count + 1]``, where each begins and the last ends. ``uniform``: all are ``max_seqlen`` long;
    otherwise none is longer.
    """

    cu_seqlens: Tensor
    count: int
    max_seqlen: int
    uniform: bool

    @classmethod
    def equal(cls, count: int, length: int, like: Tensor) -> Sequences:
        """``count`` sequences of ``length`` tokens, on the device of ``like``."""

        def make() -> Sequences:
            ends = [tex.prim.full((1,), i * length, DType.Int32, like.data) for i in range(count + 1)]
            return cls(Tensor(tex.prim.concatenate(ends, 0), DType.Int32), count, length, True)

        return current_pass().once(("cu_seqlens", count, length), make)

    @property
    def format(self) -> NVTE_QKV_Format:
        return NVTE_QKV_Format.NVTE_BSHD if self.uniform else NVTE_QKV_Format.NVTE_THD

    def fold(self, x: Tensor) -> Tensor:
        """``[tokens, heads, width]`` as the layout's own shape: ``[count, max_seqlen, heads, width]`` where uniform."""
        return reshape(x, (self.count, self.max_seqlen, *x.shape[1:])) if self.uniform else x

    def unfold(self, x: Tensor) -> Tensor:
        """The inverse of ``fold``."""
        return reshape(x, (self.count * self.max_seqlen, *x.shape[2:])) if self.uniform else x


@dataclass(frozen=True)
class ScoreOptions:
    """Options of attention's scores beside the scale and the mask. ``soft_cap``: scores become ``soft_cap * tanh(s / soft_cap)`` (Gemma 2,
    arXiv:2408.00118). ``alibi_slopes``: ``slope[head] * distance`` is subtracted (arXiv:2108.12409). ``dropout``: the share of probabilities that is
    dropped, drawn at ``offset``."""

    soft_cap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None
    dropout: float = 0.0
    offset: int = 0

    def beyond_nvidias(self, heads: int, biased: bool) -> bool:
        """Whether NVIDIA's function cannot serve these options: it has no soft cap, takes the usual slopes alone and none beside a bias, and draws
        its own seed for dropout."""
        own = self.alibi_slopes is not None and (biased or list(self.alibi_slopes) != alibi_slopes(heads))
        return self.soft_cap is not None or bool(self.dropout) or own

    @property
    def plain(self) -> bool:
        """Whether scores are products of q and k, scaled and no more."""
        return self.soft_cap is None and self.alibi_slopes is None and not self.dropout

    def bias_type(self, bias: Tensor | None) -> NVTE_Bias_Type:
        """The bias type that NVIDIA's function takes."""
        if self.alibi_slopes is not None:
            return NVTE_Bias_Type.NVTE_ALIBI
        return NVTE_Bias_Type.NVTE_NO_BIAS if bias is None else NVTE_Bias_Type.NVTE_POST_SCALE_BIAS

    def of_draw(self, seed: Tensor | None) -> tuple[Any]:
        """The seed as ``prim.attention`` takes it: None without dropout."""
        return (seed.data if seed is not None and self.dropout else None,)

    @property
    def of_scores(self) -> tuple[float | None, tuple[float, ...] | None, float, int]:
        """The options as ``prim.attention`` takes them."""
        return (self.soft_cap, self.alibi_slopes, self.dropout, self.offset)


PLAIN_SCORES = ScoreOptions()


@dataclass(frozen=True)
class AttentionAux:
    """What the backward of attention needs beside q, k, v and o: ``stats`` (log-sum-exp, fp32), and ``rng_state`` (int64 ``[2]``), which is None
    unless NVIDIA's function was called."""

    stats: Tensor
    rng_state: Tensor | None


@dataclass(frozen=True)
class Rotary:
    """How heads are rotated by their positions: pair i of ``width`` columns, the first of a head or all of them, by ``position * base**(-2 i / width)
    * factors[i]``; ``factors`` is empty where each is 1. Pair i is columns i and ``i + width / 2``, or, ``interleaved``, 2 i and 2 i + 1."""

    base: float
    width: int | None = None
    factors: tuple[float, ...] = ()
    interleaved: bool = False


def rope(
    x: Tensor, sequences: Sequences, rotary: Rotary | float, starts: Tensor | None = None, end: int = 0, part: tuple[int, int] = (0, 1)
) -> Tensor:
    """Rotate the heads ``[tokens, heads, width]`` by the angles of their positions, which restart in each sequence (arXiv:2104.09864).

    ``rotary``: a number is the base of all columns.

    ``starts``: int32 ``[count]``, the positions of the sequences' first tokens, where they are not 0; then all positions are below ``end``. ``part``:
    ``(r, n)`` where the tokens are the r-th and the r-th last of ``2 n`` equal parts of sequences that are n times as long.
    """
    return _rope(tex.fused_rope_forward, x, sequences, rotary, starts, end, part)


def drope(dy: Tensor, sequences: Sequences, rotary: Rotary | float, part: tuple[int, int] = (0, 1)) -> Tensor:
    """The gradient of ``rope``: the rotation back."""
    return _rope(tex.fused_rope_backward, dy, sequences, rotary, part=part)


def _rope(
    rotate: Any,
    x: Tensor,
    sequences: Sequences,
    rotary: Rotary | float,
    starts: Tensor | None = None,
    end: int = 0,
    part: tuple[int, int] = (0, 1),
) -> Tensor:
    by = rotary if isinstance(rotary, Rotary) else Rotary(rotary)
    angles = rope_angles(x, by, max(end, sequences.max_seqlen * part[1]))
    cu_seqlens = None if sequences.uniform else sequences.cu_seqlens.data
    folded = sequences.fold(x)
    first = starts.data if starts is not None else None
    return sequences.unfold(Tensor(rotate(folded.data, angles, first, sequences.format, by.interleaved, cu_seqlens, part[1], part[0]), x.type))


def rope_angles(x: Tensor, rotary: Rotary, end: int) -> Any:
    """The angles of positions below ``end`` for heads like ``x``, as tex takes them. Every layer of a pass rotates by the same."""
    of = end, rotary.width or x.shape[-1], rotary.base
    return current_pass().once(("rope angles", *of, rotary.factors, rotary.interleaved), lambda: _angles(x, of, rotary))


def _angles(x: Tensor, of: tuple[int, int, float], by: Rotary) -> Any:
    """``[positions, 1, 1, width]``: of both columns of a pair the same, where they stand."""
    angles = tex.prim.rope_angles(*of, x.data, by.factors)
    return interleave(Tensor(angles, accumulator(x.type)), 1).data if by.interleaved else angles


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences,
    scale: float,
    causal: bool,
    is_training: bool,
    window_size: tuple[int, int] = EVERYWHERE,
    options: ScoreOptions = PLAIN_SCORES,
    bias: Tensor | None = None,
    seed: Tensor | None = None,
    keys: Sequences | None = None,
) -> tuple[Tensor, AttentionAux]:
    """``softmax(scale * q k^T) v`` within each sequence: ``q [tokens, heads, width]``, ``k, v [tokens, groups, width]``.

    Several query heads share a group of k and v (grouped-query attention). ``window_size``: how many tokens before and after its own place a query
    sees, -1 for all. ``bias``: ``[sequences or 1, heads or 1, queries or 1, keys or 1]``, added to the scores; -inf hides a key. ``seed``: int64
    ``[1]``, for dropout. ``keys``: how the tokens of k and v divide into sequences, where they are others than q's. Gives ``o`` shaped like ``q``,
    and what backward needs.
    """
    p = _Problem.of(sequences, keys, causal, window_size, bias)
    data = (p.fold(q, sequences), p.fold(k, p.keys), p.fold(v, p.keys))
    bias_ = None if bias is None else bias.data
    if options.beyond_nvidias(q.shape[1], bias is not None):
        o, stats = tex.prim.attention(*data, bias_, *p.bounds, None, *options.of_draw(seed), *p.shape, scale, *options.of_scores)
        return p.unfold(o, q, sequences), AttentionAux(Tensor(stats, accumulator(q.type)), None)
    o, stats, rng_state, *_ = tex.fused_attn_fwd(
        *p.lengths, is_training, scale, 0.0, True, p.layout, p.format, NVTE_QKV_Format.NVTE_QKV_Format_NOT_SET, options.bias_type(bias), p.mask,
        NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX, p.window, False, *p.bounds, *data, q.dtype, None, None, None, None, None, None, bias_, None, None, 0,
        False, False,
    )  # fmt: skip
    return p.unfold(o, q, sequences), AttentionAux(Tensor(stats, accumulator(q.type)), Tensor(rng_state, DType.Int64))


def dattention(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    aux: AttentionAux,
    sequences: Sequences,
    scale: float,
    causal: bool,
    window_size: tuple[int, int] = EVERYWHERE,
    options: ScoreOptions = PLAIN_SCORES,
    bias: Tensor | None = None,
    seed: Tensor | None = None,
    keys: Sequences | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """``(dq, dk, dv, dbias)`` of ``attention``; ``dbias`` is None without a bias."""
    for name, x in (("do", do), ("o", o)):
        if x.shape != (*q.shape[:-1], v.shape[-1]):
            wanted, do_ = f"shape {[*q.shape[:-1], v.shape[-1]]}, q's with the width of v", "pass what attention gave, and a gradient of it"
            raise ShapeError(expected(wanted, of=f"{name} of dattention", got=list(x.shape), do=do_))
    p = _Problem.of(sequences, keys, causal, window_size, bias)
    not_set = NVTE_QKV_Format.NVTE_QKV_Format_NOT_SET
    do_, q_, k_, v_, o_ = (p.fold(t, at) for t, at in zip((do, q, k, v, o), (sequences, sequences, p.keys, p.keys, sequences), strict=True))
    if aux.rng_state is None:
        bias_ = None if bias is None else bias.data
        found = tex.prim.attention_backward(
            do_, q_, k_, v_, o_, aux.stats.data, bias_, *p.bounds, *options.of_draw(seed), *p.shape, scale, *options.of_scores
        )
    else:
        kept = [aux.stats.data, aux.rng_state.data, *([] if bias is None else [bias.data])]
        found = tex.fused_attn_bwd(
            *p.lengths, scale, 0.0, True, p.layout, p.format, p.format, p.layout, not_set, not_set, options.bias_type(bias), p.mask,
            NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX, p.window, False, True, *p.bounds, q_, k_, v_, o_, do_, q.dtype, kept,
            None, None, None, None, None, False,
        )  # fmt: skip
    dbias = None if bias is None or found[3] is None else Tensor(found[3], bias.type)
    dq, dk, dv = (p.unfold(d, t, at) for d, t, at in zip(found, (q, k, v), (sequences, p.keys, p.keys), strict=False))
    return dq, dk, dv, dbias


def merge_attention(o: Tensor, stats: Tensor, o_step: Tensor, stats_step: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """``(o, stats)`` of attention over two sets of keys, from what each has by itself. ``o [tokens, heads, width]``, of sequences of one length;
    ``stats``: of ``AttentionAux``."""
    merged, lse = tex.prim.attention_merge(sequences.fold(o).data, stats.data, sequences.fold(o_step).data, stats_step.data)
    return sequences.unfold(Tensor(merged, o.type)), Tensor(lse, stats.type)


def window_edges(window_size: tuple[int, int], causal: bool) -> list[int]:
    """``[left, right]`` as tex takes a window: a causal query sees nothing after its own place."""
    left, right = window_size
    return [left, 0 if causal and left >= 0 else right]


@dataclass(frozen=True)
class _Problem:
    """The arguments by which tex knows a batch: dense (BSHD) where its sequences are equally long, else packed tokens (THD). ``lengths``: the longest
    sequences of queries and of keys."""

    dense: bool
    keys: Sequences
    lengths: tuple[int, int]
    bounds: tuple[Any, Any]
    mask: NVTE_Mask_Type
    window: list[int]

    @classmethod
    def of(cls, sequences: Sequences, keys: Sequences | None, causal: bool, window_size: tuple[int, int], bias: Tensor | None) -> _Problem:
        keys = sequences if keys is None else keys
        dense = sequences.uniform and keys.uniform
        lengths = (sequences.max_seqlen, keys.max_seqlen)
        if bias is not None and not dense:
            # Its own rows and columns bound the lengths: those of ``sequences`` may be rounded up.
            lengths = tuple(size if size > 1 else length for size, length in zip(bias.shape[2:], lengths, strict=True))
        window = window_edges(window_size, causal)
        return cls(dense, keys, lengths, (sequences.cu_seqlens.data, keys.cu_seqlens.data), _mask(dense, causal), window)  # type: ignore[arg-type]

    def fold(self, x: Tensor, sequences: Sequences) -> Any:
        return sequences.fold(x).data if self.dense else x.data

    def unfold(self, data: Any, like: Tensor, sequences: Sequences) -> Tensor:
        return sequences.unfold(Tensor(data, like.type)) if self.dense else Tensor(data, like.type)

    @property
    def format(self) -> NVTE_QKV_Format:
        return NVTE_QKV_Format.NVTE_BSHD if self.dense else NVTE_QKV_Format.NVTE_THD

    @property
    def layout(self) -> NVTE_QKV_Layout:
        return NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD if self.dense else NVTE_QKV_Layout.NVTE_THD_THD_THD

    @property
    def shape(self) -> tuple[int, int, NVTE_QKV_Layout, NVTE_Mask_Type, list[int]]:
        """The arguments that ``prim.attention`` takes of it."""
        return (*self.lengths, self.layout, self.mask, self.window)


def _mask(dense: bool, causal: bool) -> NVTE_Mask_Type:
    """The mask's type. For THD, where sequences differ in length, tex wants the kinds with padding."""
    if dense:
        return NVTE_Mask_Type.NVTE_CAUSAL_MASK if causal else NVTE_Mask_Type.NVTE_NO_MASK
    return NVTE_Mask_Type.NVTE_PADDING_CAUSAL_MASK if causal else NVTE_Mask_Type.NVTE_PADDING_MASK
