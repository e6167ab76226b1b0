"""``LatentAttention``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Unpack

from fusible import nvte
from fusible.errors import ArgumentError, check_number, expected
from fusible.ops.attention import SelfAttention, check_groups
from fusible.ops.op import OpTypes, check_width
from fusible.ops.protocols import CachedKeys

__all__ = ["LatentAttention"]


class LatentAttention(SelfAttention):
    """``softmax(scale * q k^T) v`` of heads of which a part is rotated by positions, with one rotated key for all (DeepSeek-V2, arXiv:2405.04434).

    ``x [tokens, heads * (key_width + rope_width) + rope_width + groups * (key_width + value_width)]`` is q, head after head, the rotated key, and of
    each group a key and a value. A head of q is ``key_width`` columns as they are, and ``rope_width`` that are rotated; a group's key is its own
    columns and, rotated, the key of all. Without a ``value_width`` the keys' own columns are the values too, and x has nothing in their place: so
    heads attend to latents, of which a cache keeps ``key_width + rope_width`` numbers a token. ``y [tokens, heads * value_width]``.

    Columns are rotated as by ``DotProductAttention``, by ``rope_base`` and ``rope_factors``; pair i is the columns 2 i and 2 i + 1 where
    ``rope_interleaved``, else i and ``i + rope_width / 2``. ``rope_scale``: what sines and cosines are multiplied by (YaRN, arXiv:2309.00071).
    ``scale`` defaults to ``1 / sqrt(key_width + rope_width)``.
    """

    def __init__(
        self,
        heads: int,
        key_width: int,
        rope_width: int,
        *,
        value_width: int | None = None,
        groups: int | None = None,
        causal: bool = True,
        rope_base: float = 10000.0,
        rope_factors: Sequence[float] = (),
        rope_interleaved: bool = False,
        rope_scale: float = 1.0,
        scale: float | None = None,
        **types: Unpack[OpTypes],
    ) -> None:
        super().__init__(**types)
        check_groups(heads, heads if groups is None else groups)
        if rope_width is None or rope_width % 2:  # pyright: ignore[reportUnnecessaryComparison]
            of, do = "rope_width of LatentAttention", "give how many columns of a head are rotated"
            raise ArgumentError(expected("an even number", of=of, got=rope_width, do=do))
        if rope_base is None:  # pyright: ignore[reportUnnecessaryComparison]
            raise ArgumentError(expected("a number above 0", of="rope_base of LatentAttention", got=None, do="give the base, e.g. 10000.0"))
        if len(rope_factors) not in (0, rope_width // 2):
            of, do = "rope_factors of LatentAttention", "give one of each pair"
            raise ArgumentError(expected(f"{rope_width // 2} numbers, or none", of=of, got=len(rope_factors), do=do))
        for factor in rope_factors:
            check_number(factor, "rope_factors of LatentAttention", least=0)
        check_number(rope_scale, "rope_scale of LatentAttention", least=0)
        self._take(heads, key_width + rope_width, groups, scale, nvte.PLAIN_SCORES, ())
        self.key_width, self.rope_width, self.own_values, self.causal = key_width, rope_width, value_width, causal
        self.rotary = nvte.Rotary(rope_base, None, tuple(float(factor) for factor in rope_factors), rope_interleaved)
        self.rope_scale = rope_scale

    @property
    def value_width(self) -> int:
        return self.key_width if self.own_values is None else self.own_values

    @property
    def _columns(self) -> tuple[int, int, int]:
        """Of x: those of q, of the rotated key, and of the groups' keys and values."""
        return self.heads * self.head_width, self.rope_width, self.groups * (self.key_width + (self.own_values or 0))

    @property
    def cached(self) -> CachedKeys | None:
        kept = super().cached
        return kept if kept is None else kept._replace(value_width=self.own_values or 0)

    def _operands(self, x: nvte.Tensor, sequences: nvte.Sequences, starts: nvte.Tensor | None = None, end: int = 0) -> Iterable[nvte.Tensor]:
        x, tokens = nvte.cast_checked(x, self.x_dtype), x.shape[0]
        q, rotated, kv = nvte.split(x, self._columns, dim=1)
        plain, turned = nvte.split(nvte.reshape(q, (tokens, self.heads, self.head_width)), (self.key_width, self.rope_width), dim=2)
        turned = self._scaled(nvte.rope(turned, sequences, self.rotary, starts, end))
        rotated = nvte.rope(nvte.reshape(rotated, (tokens, 1, self.rope_width)), sequences, self.rotary, starts, end)
        kv = nvte.reshape(kv, (tokens, self.groups, kv.shape[1] // self.groups))
        k, v = (kv, kv) if self.own_values is None else nvte.split(kv, (self.key_width, self.own_values), dim=2)
        of_all = nvte.concatenate([rotated] * self.groups, dim=1) if self.groups > 1 else rotated
        return nvte.concatenate([plain, turned], dim=2), nvte.concatenate([k, of_all], dim=2), v

    def _scaled(self, turned: nvte.Tensor) -> nvte.Tensor:
        """The rotated columns of q, of which and of the key ``rope_scale`` is a factor: q has it twice."""
        return turned if self.rope_scale == 1.0 else nvte.scale(turned, self.rope_scale**2, turned.type)

    def _gradient(self, dq: nvte.Tensor, dk: nvte.Tensor, dv: nvte.Tensor, sequences: nvte.Sequences) -> nvte.Tensor:
        tokens, widths = dq.shape[0], (self.key_width, self.rope_width)
        plain, turned = nvte.split(dq, widths, dim=2)
        dq = nvte.concatenate([plain, nvte.drope(self._scaled(turned), sequences, self.rotary)], dim=2)
        dk, of_all = nvte.split(dk, widths, dim=2)
        if self.groups > 1:
            by_group = nvte.reshape(nvte.permute(of_all, (1, 0, 2)), (self.groups, tokens * self.rope_width))
            of_all = nvte.reshape(nvte.dbias(by_group, nvte.element(of_all.type)), (tokens, 1, self.rope_width))
        rotated = nvte.drope(of_all, sequences, self.rotary)
        dkv = nvte.add(dk, dv, dk.type) if self.own_values is None else nvte.concatenate([dk, dv], dim=2)
        return self._side_by_side([dq, rotated, dkv], self.dx_dtype)

    def _appended(self, cache: nvte.KVCache, k: nvte.Tensor, v: nvte.Tensor, sequences: nvte.Sequences) -> nvte.KVCache:
        if self.own_values is not None:
            return super()._appended(cache, k, v, sequences)
        cache = super()._appended(cache, k, nvte.empty((k.shape[0], self.groups, 0), k.type, k), sequences)
        latents, _ = nvte.split(cache.k, (self.key_width, self.rope_width), dim=3)
        return replace(cache, v=latents)

    def width(self, width: int | None) -> int | None:
        check_width(self, sum(self._columns), width)
        return self.heads * self.value_width

    def extra_repr(self) -> str:
        values = "" if self.own_values is None else f", value_width={self.own_values}"
        rope = f", rope_base={self.rotary.base:g}" + (", rope_factors=..." if self.rotary.factors else "")
        rope += ", rope_interleaved=True" if self.rotary.interleaved else ""
        widths = f"key_width={self.key_width}, rope_width={self.rope_width}{values}"
        return f"heads={self.heads}, groups={self.groups}, {widths}, causal={self.causal}{rope}"
