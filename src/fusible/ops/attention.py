"""``DotProductAttention`` over packed q, k and v, and ``CrossAttention`` over q and a side input of keys and values."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, Unpack

from fusible import nvte
from fusible.errors import ArgumentError, DTypeError, ShapeError, check_number, expected
from fusible.nvte import DType
from fusible.ops.op import Context, Op, OpTypes, check_width
from fusible.ops.protocols import AttentionOperands, CachedKeys, Incremental
from fusible.ops.sharing import Part, Parts, Process, SharesColumns
from fusible.tex.calls.attention import alibi_slopes

__all__ = ["AttentionBase", "CrossAttention", "DotProductAttention", "SelfAttention", "check_groups", "heads_side_by_side"]

_FLOATS = frozenset((DType.Float32, DType.Float16, DType.BFloat16, DType.Float8E4M3, DType.Float8E5M2, DType.Float4E2M1))
"""The element types of keys and values that are cast to that of the queries."""


def check_groups(heads: int, groups: int) -> None:
    """Raise ``ArgumentError`` where heads cannot share so many keys and values."""
    if groups < 1 or heads < 1 or heads % groups:
        do = "share each group between equally many heads"
        raise ArgumentError(expected(f"a divisor of the {heads} heads", of="the number of groups", got=groups, do=do))


def heads_side_by_side(heads: int, groups: int, head_width: int) -> Parts:
    """The columns of q, k and v, as one product gives them."""
    return (
        Part(heads, head_width, "query"),
        Part(groups, head_width, "key", repeats=True),
        Part(groups, head_width, "value", repeats=True),
    )


class AttentionBase(Incremental, AttentionOperands, Op):
    """Base of all: options of the scores, a mask as a side input, and dropout."""

    heads: int
    groups: int
    head_width: int
    causal: bool = False
    window_size: tuple[int, int] = nvte.EVERYWHERE
    sides_keep_padding = True
    x_dtype = DType.BFloat16
    dy_dtype = DType.BFloat16

    def _take(self, heads: int, head_width: int, groups: int | None, scale: float | None, scores: nvte.ScoreOptions, sides: tuple[str, ...]) -> None:
        title = type(self).__name__
        self.heads, self.groups, self.head_width = heads, heads if groups is None else groups, head_width
        check_groups(heads, self.groups)
        self.scale = head_width**-0.5 if scale is None else scale
        if scores.soft_cap is not None:
            check_number(scores.soft_cap, f"soft_cap of {title}", least=0)
            if not scores.soft_cap:
                raise ArgumentError(expected("a number above 0, or None", of=f"soft_cap of {title}", got=0.0, do="leave it out for no cap"))
        if not 0 <= scores.dropout < 1:
            raise ArgumentError(expected("a probability in [0, 1)", of=f"dropout of {title}", got=scores.dropout, do="give the share to drop"))
        self.scores = scores
        self.side_names = self.side_inputs = sides

    @property
    def value_width(self) -> int:
        """The columns of a head of v, and of y."""
        return self.head_width

    @property
    def drops(self) -> bool:
        return self.training and self.scores.dropout > 0

    @property
    def call_inputs(self) -> tuple[str, ...]:
        return ("sequences", "seed") if self.drops else ("sequences",)

    @property
    def options(self) -> nvte.ScoreOptions:
        """The score options with dropout as it is in this mode, and where it draws."""
        dropout = self.scores.dropout if self.drops else 0.0
        return nvte.ScoreOptions(self.scores.soft_cap, self.scores.alibi_slopes, dropout, self.draws_at)

    def side(self, name: str, sides: Mapping[str, nvte.Tensor]) -> nvte.Tensor | None:
        """The side input of a kind (``"kv"``, ``"mask"``); None where the op has none of it."""
        return sides[self.side_inputs[self.side_names.index(name)]] if name in self.side_names else None

    def _mask(self, sides: Mapping[str, nvte.Tensor], sequences: nvte.Sequences, keys: nvte.Sequences) -> nvte.Tensor | None:
        """The mask, which is added to scores. Raises ``ShapeError`` for a shape that does not broadcast to theirs."""
        mask = self.side("mask", sides)
        if mask is None:
            return None
        sizes = (sequences.count, self.heads, sequences.max_seqlen, keys.max_seqlen)
        exact = (True, True, sequences.uniform, keys.uniform)
        if len(mask.shape) != 4 or any(size not in (1, want) for size, want, known in zip(mask.shape, sizes, exact, strict=True) if known):
            wanted = ", ".join(f"{size} or 1" if known else f"{name} or 1" for size, name, known in zip(sizes, "..qk", exact, strict=True))
            do = "give one that the scores [sequences, heads, queries, keys] broadcast from"
            raise ShapeError(expected(f"shape [{wanted}]", of=f"the mask of {self!r}", got=list(mask.shape), do=do))
        return mask

    def _split(self, x: nvte.Tensor, counts: Sequence[int]) -> Iterator[nvte.Tensor]:
        """Cut columns of heads side by side into a tensor ``[tokens, count, width]`` for each of ``counts``."""
        pieces = nvte.split(x, [n * self.head_width for n in counts], dim=1)
        return (nvte.reshape(piece, (x.shape[0], n, self.head_width)) for piece, n in zip(pieces, counts, strict=True))

    def _side_by_side(self, parts: Sequence[nvte.Tensor], type: nvte.Type) -> nvte.Tensor:
        """The inverse of ``_split``."""
        flat = [nvte.reshape(d, (d.shape[0], d.shape[1] * d.shape[2])) for d in parts]
        return nvte.cast_checked(nvte.concatenate(flat, dim=1) if len(flat) > 1 else flat[0], type)

    def _attended(
        self,
        qkv: tuple[nvte.Tensor, nvte.Tensor, nvte.Tensor],
        sequences: nvte.Sequences,
        keys: nvte.Sequences,
        is_training: bool,
        sides: Mapping[str, nvte.Tensor],
    ) -> tuple[nvte.Tensor, Context]:
        """y, and what backward needs. ``sides``: those of the op and the seed, by name."""
        (q, k, v), mask = (self._quantized(part) for part in qkv), self._mask(sides, sequences, keys)
        more = self.options, mask, sides.get("seed"), keys
        wide = (self._wide(q), self._wide(k), self._wide(v))
        o, aux = nvte.attention(*wide, sequences, self.scale, self.causal, is_training, self.window_size, *more)
        o = nvte.cast_checked(o, self.activation) if self.qkv_dtype is not None else o
        found = {"q": q, "k": k, "v": v, "o": o, "stats": aux.stats, "rng_state": aux.rng_state, "mask": mask}
        return self._side_by_side([o], self.y_dtype), {name: tensor for name, tensor in found.items() if tensor is not None}

    def _gradients(
        self, ctx: Context, dy: nvte.Tensor, sequences: nvte.Sequences, keys: nvte.Sequences, seed: nvte.Tensor | None
    ) -> tuple[nvte.Tensor, nvte.Tensor, nvte.Tensor, nvte.Tensor | None]:
        """The gradients of q, k, v and the mask."""
        q, k, v, o, mask = ctx["q"], ctx["k"], ctx["v"], ctx["o"], ctx.get("mask")
        do = nvte.reshape(nvte.cast_checked(dy, self.dy_dtype), (q.shape[0], self.heads, self.value_width))
        if self.do_dtype is not None:
            do, q, k, v, o = (self._wide(part) for part in (nvte.cast(do, self.do_dtype), q, k, v, o))
        aux = nvte.AttentionAux(ctx["stats"], ctx.get("rng_state"))
        more = self.options, mask, seed, keys
        return nvte.dattention(do, q, k, v, o, aux, sequences, self.scale, self.causal, self.window_size, *more)

    def _quantized(self, part: nvte.Tensor) -> nvte.Tensor:
        """q, k or v in 8 bits, where a recipe wants them so."""
        return part if self.qkv_dtype is None else nvte.cast(part, self.qkv_dtype)

    def _wide(self, part: nvte.Tensor) -> nvte.Tensor:
        """Where a recipe wants q, k and v in 8 bits, the values of one of them in fp32: products of 8-bit values are exact in it. Else ``part``."""
        if self.qkv_dtype is None:
            return part
        return nvte.dequantize(part, DType.Float32) if nvte.is_quantized_type(part.type) else nvte.cast_checked(part, DType.Float32)

    @property
    def title(self) -> str:
        return type(self).__name__ if self.qkv_dtype is None else f"{type(self).__name__}(q, k, v {self.qkv_dtype})"

    def _side_grads(self, **found: nvte.Tensor | None) -> dict[str, nvte.Tensor | None]:
        """The gradients of the side inputs by name; None for one that nobody wants. ``found``: by kind."""
        return {name: found[kind] if self.wants(name) else None for kind, name in zip(self.side_names, self.side_inputs, strict=True)}

    def _shown(self) -> str:
        """The options that differ from their defaults."""
        scores = self.scores
        usual = scores.alibi_slopes is not None and list(scores.alibi_slopes) == alibi_slopes(self.heads)
        shown = {
            "window_size": self.window_size if self.window_size != nvte.EVERYWHERE else None,
            "soft_cap": scores.soft_cap,
            "alibi": True if usual else scores.alibi_slopes,
            "dropout": scores.dropout or None,
            "mask": True if "mask" in self.side_names else None,
        }
        return "".join(f", {name}={value}" for name, value in shown.items() if value is not None)


class SelfAttention(AttentionBase):
    """Base: q, k and v are of the same tokens, and what comes before these may be in a cache."""

    @abstractmethod
    def _operands(self, x: nvte.Tensor, sequences: nvte.Sequences, starts: nvte.Tensor | None = None, end: int = 0) -> Iterable[nvte.Tensor]:
        """q, k and v, ``[tokens, heads or groups, width]``, rotated by their positions. ``starts``, ``end``: of ``nvte.rope``."""

    @abstractmethod
    def _gradient(self, dq: nvte.Tensor, dk: nvte.Tensor, dv: nvte.Tensor, sequences: nvte.Sequences) -> nvte.Tensor:
        """dx, of the gradients of what ``_operands`` gives."""

    def _unrotated(self, x: nvte.Tensor) -> tuple[Iterable[nvte.Tensor], nvte.Rotary | None] | None:
        """q, k and v before they are rotated, and how q and k are; None where that is not all there is to ``_operands``."""
        return None

    def _appended(self, cache: nvte.KVCache, k: nvte.Tensor, v: nvte.Tensor, sequences: nvte.Sequences) -> nvte.KVCache:
        """The cache with the new tokens."""
        return nvte.append_kv(cache, k, v, sequences)

    def forward(self, x: nvte.Tensor, *, sequences: nvte.Sequences, **sides: nvte.Tensor) -> tuple[nvte.Tensor, Context]:
        return self._attend(x, sequences, True, sides)

    @property
    def cached(self) -> CachedKeys | None:
        kept = self.x_dtype if self.qkv_dtype is None else self.activation
        return CachedKeys(self.groups, self.head_width, kept) if self.causal else None

    def inference(self, x: nvte.Tensor, *, sequences: nvte.Sequences, **sides: nvte.Tensor) -> nvte.Tensor:
        cache = nvte.current_pass().caches.get(self.position)
        if cache is None:
            return self._attend(x, sequences, False, sides)[0]
        mask = self._mask(sides, sequences, sequences)
        at_once = self._unrotated(x) if mask is None and self.qkv_dtype is None and self.options.plain else None
        if at_once is not None:
            (q, k, v), rotary = at_once
            o = nvte.attention_step(q, k, v, cache, sequences, self.scale, self.window_size, rotary)
            return self._side_by_side([o], self.y_dtype)
        q, k, v = self._operands(x, sequences, cache.starts, cache.capacity)
        if self.qkv_dtype is not None:
            q, k, v = (nvte.cast_checked(self._wide(self._quantized(part)), self.activation) for part in (q, k, v))
        cache = self._appended(cache, k, v, sequences)
        o = nvte.attention_cached(q, cache, sequences, self.scale, self.window_size, self.options, sides.get("seed"), mask)
        return self._side_by_side([o], self.y_dtype)

    def _attend(self, x: nvte.Tensor, sequences: nvte.Sequences, is_training: bool, sides: Mapping[str, nvte.Tensor]) -> tuple[nvte.Tensor, Context]:
        q, k, v = self._operands(x, sequences)
        return self._attended((q, k, v), sequences, sequences, is_training, sides)

    def backward(self, ctx: Context, dy: nvte.Tensor, *, sequences: nvte.Sequences, seed: nvte.Tensor | None = None) -> Any:
        dq, dk, dv, dmask = self._gradients(ctx, dy, sequences, sequences, seed)
        dx = self._gradient(dq, dk, dv, sequences)
        return (dx, [], self._side_grads(mask=dmask)) if self.side_inputs else (dx, [])


class DotProductAttention(SharesColumns, SelfAttention):
    """``softmax(scale * q k^T) v`` within each sequence (Vaswani et al. 2017, arXiv:1706.03762).

    ``x [tokens, (heads + 2 groups) * width]`` is q, k and v side by side, head after head; ``y [tokens, heads * width]``. ``heads / groups`` query
    heads share a key and value head (Ainslie et al. 2023, arXiv:2305.13245). ``causal``: a token sees itself and what comes before it in its
    sequence. ``window_size``: how many tokens before and after its own place it sees, -1 for all (Beltagy et al. 2020, arXiv:2004.05150); a causal
    one sees none after. ``rope_base``: rotate q and k by their positions first, or None; the first ``rope_width`` columns of a head, or all of them;
    pair i by ``rope_base**(-2 i / rope_width) * rope_factors[i]`` a position. ``scale`` defaults to ``1 / sqrt(width)``.

    ``soft_cap``: scores are ``soft_cap * tanh(score / soft_cap)`` (Gemma 2, arXiv:2408.00118). ``alibi``: a score is less by its head's slope times
    the distance of the two tokens (Press et al. 2022, arXiv:2108.12409); True for the paper's slopes, or one for each head. ``mask``: a side input
    ``[sequences or 1, heads or 1, queries or 1, keys or 1]`` is added to the scores last, -inf where a query does not see a key; with a KV cache, its
    keys are all of a sequence, and its queries the new ones. ``dropout``: while training each probability is 0 with this probability, else divided
    by ``1 - dropout``, by the call's ``seed`` and the op's position alone.
    """

    def __init__(
        self,
        heads: int,
        head_width: int,
        *,
        groups: int | None = None,
        causal: bool = True,
        rope_base: float | None = None,
        rope_width: int | None = None,
        rope_factors: Sequence[float] = (),
        scale: float | None = None,
        window_size: tuple[int, int] = nvte.EVERYWHERE,
        soft_cap: float | None = None,
        alibi: bool | Sequence[float] = False,
        mask: bool = False,
        dropout: float = 0.0,
        **types: Unpack[OpTypes],
    ) -> None:
        super().__init__(**types)
        check_groups(heads, heads if groups is None else groups)
        slopes = _slopes(alibi, heads, type(self).__name__)
        self._take(heads, head_width, groups, scale, nvte.ScoreOptions(soft_cap, slopes, dropout), ("mask",) if mask else ())
        self.rotary = _rotary(head_width, rope_base, rope_width, rope_factors)
        if not isinstance(window_size, tuple | list) or len(window_size) != 2 or not all(type(edge) is int and edge >= -1 for edge in window_size):
            do = "pass how many tokens before and after its own place a query sees, -1 for all"
            raise ArgumentError(expected("two integers of at least -1", of=f"window_size of {type(self).__name__}", got=repr(window_size), do=do))
        self.causal = causal
        self.window_size = (window_size[0], window_size[1])

    def _heads(self, x: nvte.Tensor) -> Iterator[nvte.Tensor]:
        """q, k and v: ``[tokens, heads or groups, width]``."""
        return self._split(nvte.cast_checked(x, self.x_dtype), (self.heads, self.groups, self.groups))

    def _operands(self, x: nvte.Tensor, sequences: nvte.Sequences, starts: nvte.Tensor | None = None, end: int = 0) -> Iterable[nvte.Tensor]:
        q, k, v = self._heads(x)
        if self.rotary is not None:
            q, k = (nvte.rope(heads, sequences, self.rotary, starts, end) for heads in (q, k))
        return q, k, v

    def _unrotated(self, x: nvte.Tensor) -> tuple[Iterable[nvte.Tensor], nvte.Rotary | None]:
        return self._heads(x), self.rotary

    def _gradient(self, dq: nvte.Tensor, dk: nvte.Tensor, dv: nvte.Tensor, sequences: nvte.Sequences) -> nvte.Tensor:
        if self.rotary is not None:
            dq, dk = nvte.drope(dq, sequences, self.rotary), nvte.drope(dk, sequences, self.rotary)
        return self._side_by_side([dq, dk, dv], self.dx_dtype)

    def parts_of_x(self, y: Parts) -> Parts | None:
        """None with a mask, which the caller may give for each head."""
        fits = len(y) == 1 and y[0].unit == 1 and y[0].width == self.heads * self.head_width
        return heads_side_by_side(self.heads, self.groups, self.head_width) if fits and not self.side_inputs else None

    def share(self, process: Process) -> Self:
        """Its heads, and the keys and values that these look at."""
        heads, slopes = self.heads // process.size, self.scores.alibi_slopes
        own = None if slopes is None else slopes[process.rank * heads : (process.rank + 1) * heads]
        scores = replace(self.scores, alibi_slopes=own)
        return self.with_(heads=heads, groups=max(self.groups // process.size, 1), scores=scores, stream=process.rank)

    def width(self, width: int | None) -> int | None:
        check_width(self, (self.heads + 2 * self.groups) * self.head_width, width)
        return self.heads * self.head_width

    def extra_repr(self) -> str:
        by, rope = self.rotary, ""
        if by is not None:
            rope = f", rope_base={by.base:g}" + (f", rope_width={by.width}" if by.width else "") + (", rope_factors=..." if by.factors else "")
        return f"heads={self.heads}, groups={self.groups}, head_width={self.head_width}, causal={self.causal}{rope}{self._shown()}"


class CrossAttention(AttentionBase):
    """``softmax(scale * q k^T) v`` of queries over keys and values that come from elsewhere, each sequence of queries over its own.

    ``x [tokens, heads * width]``, the queries' heads side by side. The side input ``[sequences, keys, 2 * groups * width]`` is k and v side by side,
    as one product gives them, ``keys`` of each sequence; ``[tokens, 2 * groups * width]`` are those of x's own sequences. ``soft_cap``, ``dropout``
    and ``mask``, then the second side input, which can hide keys that are padding: of ``DotProductAttention``.
    """

    def __init__(
        self,
        heads: int,
        head_width: int,
        *,
        groups: int | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
        mask: bool = False,
        dropout: float = 0.0,
        **types: Unpack[OpTypes],
    ) -> None:
        super().__init__(**types)
        self._take(heads, head_width, groups, scale, nvte.ScoreOptions(soft_cap, None, dropout), ("kv", "mask") if mask else ("kv",))

    @property
    def goes_on(self) -> bool:
        return True

    def forward(self, x: nvte.Tensor, *, sequences: nvte.Sequences, **sides: nvte.Tensor) -> tuple[nvte.Tensor, Context]:
        return self._attend(x, sequences, True, sides)

    def inference(self, x: nvte.Tensor, *, sequences: nvte.Sequences, **sides: nvte.Tensor) -> nvte.Tensor:
        return self._attend(x, sequences, False, sides)[0]

    def _attend(self, x: nvte.Tensor, sequences: nvte.Sequences, is_training: bool, sides: Mapping[str, nvte.Tensor]) -> tuple[nvte.Tensor, Context]:
        x, kv = nvte.cast_checked(x, self.x_dtype), self.side("kv", sides)
        assert kv is not None
        double = DType.Float64 in (kv.type, x.type)
        if kv.type is not x.type and (double or nvte.element(kv.type) not in _FLOATS):
            raise DTypeError(expected(f"{x.type}, as x is", of=f"the keys and values of {self!r}", got=str(kv.type), do="cast them"))
        keys = self._keys(kv.shape, kv, sequences)
        rows = nvte.cast_checked(nvte.reshape(kv, (-1, kv.shape[-1])) if len(kv.shape) == 3 else kv, nvte.element(x.type))
        (q,), (k, v) = self._split(x, (self.heads,)), self._split(rows, (self.groups, self.groups))
        y, ctx = self._attended((q, k, v), sequences, keys, is_training, sides)
        return y, {**ctx, "kv": kv}

    def _keys(self, shape: Sequence[int], like: nvte.Tensor, sequences: nvte.Sequences) -> nvte.Sequences:
        """How the rows of k and v divide into sequences. Raises ``ShapeError`` for a shape that does not fit."""
        columns = 2 * self.groups * self.head_width
        if len(shape) == 3 and shape[0] == sequences.count and shape[2] == columns:
            return nvte.Sequences.equal(shape[0], shape[1], like)
        if len(shape) == 2 and shape[1] == columns and sequences.count == 1 and sequences.uniform:
            return nvte.Sequences.equal(1, shape[0], like)
        if len(shape) == 2 and shape[1] == columns and (not sequences.uniform or shape[0] == sequences.count * sequences.max_seqlen):
            return sequences
        do = "give k and v side by side, of each sequence of x"
        raise ShapeError(expected(f"[{sequences.count}, keys, {columns}]", of=f"the keys and values of {self!r}", got=list(shape), do=do))

    def backward(
        self, ctx: Context, dy: nvte.Tensor, *, sequences: nvte.Sequences, seed: nvte.Tensor | None = None
    ) -> tuple[nvte.Tensor, list[nvte.Tensor], dict[str, nvte.Tensor | None]]:
        kv = ctx["kv"]
        dq, dk, dv, dmask = self._gradients(ctx, dy, sequences, self._keys(kv.shape, kv, sequences), seed)
        dkv = nvte.reshape(self._side_by_side([dk, dv], nvte.element(kv.type)), kv.shape)
        return self._side_by_side([dq], self.dx_dtype), [], self._side_grads(kv=dkv, mask=dmask)

    def width(self, width: int | None) -> int | None:
        check_width(self, self.heads * self.head_width, width)
        return self.heads * self.head_width

    def extra_repr(self) -> str:
        return f"heads={self.heads}, groups={self.groups}, head_width={self.head_width}{self._shown()}"


def _rotary(head_width: int, base: float | None, width: int | None, factors: Sequence[float]) -> nvte.Rotary | None:
    """How q and k are rotated. Raises ``ArgumentError`` for columns that are not pairs of a head, and factors of others."""
    if base is None:
        rotary_options = [name for name, there in (("rope_width", width is not None), ("rope_factors", len(factors) > 0)) if there]
        if rotary_options:
            raise ArgumentError(expected("a rope_base with it", of=f"{rotary_options[0]} of attention", got="none", do="give the base, e.g. 10000.0"))
        return None
    if width is None and head_width % 2:
        raise ArgumentError(expected("an even head width", of="attention with rotary positions", got=head_width, do="change the number of heads"))
    if width is not None and (width > head_width or width % 2):
        what, do = f"an even number of at most the {head_width} columns of a head", "give how many of them are rotated"
        raise ArgumentError(expected(what, of="rope_width of attention", got=width, do=do))
    pairs = (head_width if width is None else width) // 2
    if len(factors) not in (0, pairs):
        raise ArgumentError(expected(f"{pairs} numbers, or none", of="rope_factors of attention", got=len(factors), do="give one of each pair"))
    for factor in factors:
        check_number(factor, "rope_factors of attention", least=0)
    return nvte.Rotary(base, width, tuple(float(factor) for factor in factors))


def _slopes(alibi: bool | Sequence[float], heads: int, title: str) -> tuple[float, ...] | None:
    """The slope of each head. Raises ``ArgumentError`` for another number of them, and for what is no number."""
    if isinstance(alibi, bool):
        return tuple(alibi_slopes(heads)) if alibi else None
    if not isinstance(alibi, tuple | list) or len(alibi) != heads:
        got = f"{len(alibi)} of them" if isinstance(alibi, tuple | list) else repr(alibi)
        raise ArgumentError(expected(f"a bool, or {heads} slopes", of=f"alibi of {title}", got=got, do="give each head one"))
    for slope in alibi:
        check_number(slope, f"alibi of {title}")
    return tuple(float(slope) for slope in alibi)
