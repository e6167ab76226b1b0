"""``DotProductAttention`` over packed q, k and v."""

from __future__ import annotations

from collections.abc import Iterator

from fusible import nvte
from fusible.errors import ArgumentError, expected
from fusible.nvte import DType
from fusible.ops.op import Context, Op, check_width

__all__ = ["DotProductAttention", "check_groups"]


def check_groups(heads: int, groups: int) -> None:
    """Raise ``ArgumentError`` where heads cannot share so many keys and values."""
    if groups < 1 or heads < 1 or heads % groups:
        do = "share each group between equally many heads"
        raise ArgumentError(expected(f"a divisor of the {heads} heads", of="the number of groups", got=groups, do=do))


class DotProductAttention(Op):
    """``softmax(scale * q k^T) v`` within each sequence (Vaswani et al. 2017, arXiv:1706.03762).

    ``x [tokens, (heads + 2 groups) * width]`` is q, k and v side by side, head after head; ``y [tokens, heads * width]``. ``heads / groups`` query
    heads share a key and value head (Ainslie et al. 2023, arXiv:2305.13245). ``causal``: a token sees itself and what comes before it in its
    sequence. ``window_size``: how many tokens before and after its own place it sees, -1 for all (Beltagy et al. 2020, arXiv:2004.05150); a causal
    one sees none after. ``rope_base``: rotate q and k by their positions first, or None. ``scale`` defaults to ``1 / sqrt(width)``.
    """

    def __init__(
        self,
        heads: int,
        head_width: int,
        *,
        groups: int | None = None,
        causal: bool = True,
        rope_base: float | None = None,
        scale: float | None = None,
        window_size: tuple[int, int] = nvte.EVERYWHERE,
        x_dtype: nvte.Type | None = DType.BFloat16,
        dy_dtype: nvte.Type | None = DType.BFloat16,
        y_dtype: nvte.Type = DType.BFloat16,
        dx_dtype: nvte.Type = DType.BFloat16,
    ) -> None:
        groups = heads if groups is None else groups
        check_groups(heads, groups)
        if rope_base is not None and head_width % 2:
            raise ArgumentError(expected("an even head width", of="attention with rotary positions", got=head_width, do="change the number of heads"))
        if not isinstance(window_size, tuple | list) or len(window_size) != 2 or not all(type(edge) is int and edge >= -1 for edge in window_size):
            do = "pass how many tokens before and after its own place a query sees, -1 for all"
            raise ArgumentError(expected("two integers of at least -1", of=f"window_size of {type(self).__name__}", got=repr(window_size), do=do))
        self.heads = heads
        self.groups = groups
        self.head_width = head_width
        self.causal = causal
        self.rope_base = rope_base
        self.window_size = (window_size[0], window_size[1])
        self.scale = head_width**-0.5 if scale is None else scale
        self.x_dtype = x_dtype
        self.dy_dtype = dy_dtype
        self.y_dtype = y_dtype
        self.dx_dtype = dx_dtype

    @property
    def given(self) -> tuple[str, ...]:
        return ("sequences",)

    def forward(self, x: nvte.Tensor, *, sequences: nvte.Sequences) -> tuple[nvte.Tensor, Context]:
        return self._attend(x, sequences, is_training=True)

    @property
    def cached(self) -> tuple[int, int] | None:
        return (self.groups, self.head_width) if self.causal else None

    def inference(self, x: nvte.Tensor, *, sequences: nvte.Sequences) -> nvte.Tensor:
        cache = nvte.current_pass().caches.get(self.position)
        if cache is None:
            return self._attend(x, sequences, is_training=False)[0]
        q, k, v = self._heads(x)
        if self.rope_base is not None:
            q, k = (nvte.rope(heads, sequences, self.rope_base, cache.starts, cache.capacity) for heads in (q, k))
        cache = nvte.append_kv(cache, k, v, sequences)
        return self._result(nvte.attention_cached(q, cache, sequences, self.scale, self.window_size))

    def _heads(self, x: nvte.Tensor) -> Iterator[nvte.Tensor]:
        """q, k and v: ``[tokens, heads or groups, width]``."""
        x = nvte.cast_checked(x, self.x_dtype)
        counts = (self.heads, self.groups, self.groups)
        pieces = nvte.split(x, [n * self.head_width for n in counts], dim=1)
        return (nvte.reshape(piece, (x.shape[0], n, self.head_width)) for piece, n in zip(pieces, counts, strict=True))

    def _result(self, o: nvte.Tensor) -> nvte.Tensor:
        return nvte.cast_checked(nvte.reshape(o, (o.shape[0], self.heads * self.head_width)), self.y_dtype)

    def _attend(self, x: nvte.Tensor, sequences: nvte.Sequences, is_training: bool) -> tuple[nvte.Tensor, Context]:
        q, k, v = self._heads(x)
        if self.rope_base is not None:
            q, k = nvte.rope(q, sequences, self.rope_base), nvte.rope(k, sequences, self.rope_base)
        o, aux = nvte.attention(q, k, v, sequences, self.scale, self.causal, is_training, self.window_size)
        return self._result(o), {"q": q, "k": k, "v": v, "o": o, "stats": aux.stats, "rng_state": aux.rng_state}

    def backward(self, ctx: Context, dy: nvte.Tensor, *, sequences: nvte.Sequences) -> tuple[nvte.Tensor, list[nvte.Tensor]]:
        dy = nvte.cast_checked(dy, self.dy_dtype)
        q, k, v, o = ctx["q"], ctx["k"], ctx["v"], ctx["o"]
        tokens = q.shape[0]
        do = nvte.reshape(dy, (tokens, self.heads, self.head_width))
        aux = nvte.AttentionAux(ctx["stats"], ctx["rng_state"])
        dq, dk, dv = nvte.dattention(do, q, k, v, o, aux, sequences, self.scale, self.causal, self.window_size)
        if self.rope_base is not None:
            dq, dk = nvte.drope(dq, sequences, self.rope_base), nvte.drope(dk, sequences, self.rope_base)
        dx = nvte.concatenate([nvte.reshape(d, (tokens, d.shape[1] * self.head_width)) for d in (dq, dk, dv)], dim=1)
        return nvte.cast_checked(dx, self.dx_dtype), []

    def width(self, width: int | None) -> int | None:
        check_width(self, (self.heads + 2 * self.groups) * self.head_width, width)
        return self.heads * self.head_width

    def extra_repr(self) -> str:
        rope = f", rope_base={self.rope_base:g}" if self.rope_base is not None else ""
        window = f", window_size={self.window_size}" if self.window_size != nvte.EVERYWHERE else ""
        return f"heads={self.heads}, groups={self.groups}, head_width={self.head_width}, causal={self.causal}{rope}{window}"
