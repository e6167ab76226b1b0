"""Primitives that NVIDIA's interface lacks: functional, on real and on lazy tensors. Exposed as ``tex.prim.<name>``."""

# A declaration is documentation alone.
# pyright: reportReturnType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusible.tex.enums import NVTE_Mask_Type, NVTE_QKV_Layout
from fusible.tex.interface.arguments import Shape, Tensor
from fusible.tex.interface.declare import DECLARATIONS, function
from fusible.tex.interface.domains import AnyDType, Count, Finite, Indices, Lengths, Positive, Probability, Size

__all__ = ["COLLECTIVES", "Prim"]


class Prim:
    """Each takes and gives tensors of one kind (real ones of a device, or lazy ones); ``dtype`` is a ``tex.DType``, its integer value
    (C++'s kInt64 = 3 included), or a dtype of the tensors' own kind. What is computed in fp32 is of fp64 operands computed in fp64."""

    @function("a b", a="real", b="real")
    def prim_add(self, a: Tensor, b: Tensor, dtype: AnyDType | None = None) -> Any:
        """``a + b`` in fp32, rounded once to ``dtype`` (default: the dtype of ``a``). Shapes broadcast."""

    @function("x", x="real")
    def prim_scale(self, x: Tensor, factor: float, dtype: AnyDType | None = None) -> Any:
        """``x * factor`` in fp32, rounded once to ``dtype`` (default: the dtype of ``x``)."""

    @function("x")
    def prim_cast(self, x: Tensor, dtype: AnyDType) -> Any:
        """``x`` rounded to nearest even in ``dtype``; the same tensor where it has that dtype."""

    @function("x")
    def prim_copy(self, x: Tensor) -> Any:
        """A contiguous copy of ``x`` that shares no memory with it."""

    @function("x", x="any [r c]")
    def prim_transpose(self, x: Tensor) -> Any:
        """``x.T`` of a matrix ``[rows, columns]``, contiguous."""

    @function("x")
    def prim_permute(self, x: Tensor, dims: Sequence[int]) -> Any:
        """``x`` with its dimensions in the order ``dims``, contiguous. Raises ``ArgumentError`` where ``dims`` is no order of all of them."""

    @function("x", x="real [* n]")
    def prim_row_sum(self, x: Tensor, dtype: AnyDType | None = None) -> Any:
        """The sum over all rows: ``[..., columns] -> [columns]``, accumulated in fp32, rounded once to ``dtype`` (default: that of ``x``)."""

    @function("x")
    def prim_reshape(self, x: Tensor, shape: Sequence[int]) -> Any:
        """``x`` with another shape of the same number of elements; shares memory with ``x`` where it can."""

    @function("like")
    def prim_empty(self, shape: Shape, dtype: AnyDType, like: Tensor) -> Any:
        """A tensor of unspecified values, of the kind and device of ``like``."""

    @function("like")
    def prim_full(self, shape: Shape, value: float, dtype: AnyDType, like: Tensor) -> Any:
        """A tensor filled with ``value``, of the kind and device of ``like``."""

    @function("tensors")
    def prim_concatenate(self, tensors: Sequence[Tensor], dim: int) -> Any:
        """The tensors side by side along ``dim``."""

    @function("x")
    def prim_split(self, x: Tensor, sizes: Shape, dim: int) -> list[Any]:
        """``x`` cut along ``dim`` into pieces of ``sizes``; the pieces may be views."""

    @function("x", x="any [r n]", sizes="integer [g]")
    def prim_pad_groups(self, x: Tensor, sizes: Tensor, multiple: Count) -> tuple[Any, Any]:
        """``(padded, padded_sizes)``: after each group of rows of ``x [rows, columns]`` as many zeros as make its size a multiple of ``multiple``.

        Group ``i`` has the ``sizes[i]`` rows (int32 or int64 ``[groups]``) after those of the groups before it; rows beyond the last group are left
        out. ``padded`` has the rows that any division may need, ``rows + min(rows, groups) * (multiple - 1)`` rounded up to a multiple, zeros after
        the last group. ``padded_sizes`` have the dtype of ``sizes``. Raises ``ShapeError`` where the groups have more rows than ``x``.
        """

    @function("x", x="any [r n]", sizes="integer [g]")
    def prim_unpad_groups(self, x: Tensor, sizes: Tensor, multiple: Count, rows: Size) -> Any:
        """``[rows, columns]``: the rows that ``prim_pad_groups`` would have put into ``x``, where they were; 0 beyond the last group."""

    @function("x", before="x indices", x="real [r n]", indices="integer [r k]")
    def prim_take_along(self, x: Tensor, indices: Tensor) -> Any:
        """``y[r, k] = x[r, indices[r, k]]``: of each row of ``x [rows, columns]`` the entries at its ``indices [rows, k]``, int32 or int64.

        In the dtype of ``x``; 0 for an index that is no column.
        """

    @function("y", before="y indices", y="real [r k]", indices="integer [r k]")
    def prim_put_along(self, y: Tensor, indices: Tensor, columns: Size) -> Any:
        """The gradient of ``prim_take_along``: ``x[r, c]`` is the sum of those ``y[r, k]`` of which ``indices[r, k]`` is ``c``.

        ``[rows, columns]`` in the dtype of ``y``, added up in fp32 and rounded once. What has an index that is no column is left out.
        """

    @function("like")
    def prim_rope_angles(self, positions: Size, width: Size, base: Positive, like: Tensor, factors: Sequence[float] = ()) -> Any:
        """Rotary angles ``p * base**(-2 i / width) * factors[i]`` for the first ``positions`` positions, as ``fused_rope_forward`` takes them.

        fp32 ``[positions, 1, 1, width]``, the ``width / 2`` frequencies twice, side by side (Su et al. 2021, arXiv:2104.09864). ``factors``: one of
        each frequency, for a context longer than that of training; none of them is 1 of each.
        """

    @function("x", x="real", seed="int64 [1]")
    def prim_dropout(self, x: Tensor, probability: Probability, seed: Tensor, offset: Size) -> tuple[Any, Any]:
        """``(y, mask)`` with ``y = x * mask / (1 - probability)``; a mask element is 0 with exactly that probability (to 2^-32).

        ``seed`` is an int64 tensor ``[1]``. The random word of element ``i`` is a function of ``seed`` and ``offset * 2**40 + i`` alone
        (Squares, Widynski 2020, arXiv:2004.06278), so every backend draws the same. ``mask`` is uint8 of ``x``'s shape.
        """

    @function("dy", dy="real [*m h]", mask="uint8 [*m h]")
    def prim_dropout_backward(self, dy: Tensor, mask: Tensor, probability: Probability) -> Any:
        """``dy * mask / (1 - probability)`` in the dtype of ``dy``."""

    @function(
        "q k bias soft_cap alibi_slopes",
        q="real [_ * _ d]",
        k="=q [_ * _ d]",
        v="=q [_ * _ e]",
        bias="real [_ _ _ _]",
        cu_seqlens_q="int32 [b]",
        cu_seqlens_kv="int32 [b]",
        page_table="int32 [_ p]",
        seed="int64 [1]",
    )
    def prim_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        cu_seqlens_q: Lengths | None,
        cu_seqlens_kv: Lengths | None,
        page_table: Indices | None,
        seed: Tensor | None,
        max_seqlen_q: Size,
        max_seqlen_kv: Size,
        qkv_layout: NVTE_QKV_Layout,
        attn_mask_type: NVTE_Mask_Type,
        window_size: Sequence[int],
        scale: Finite,
        soft_cap: Positive | None,
        alibi_slopes: Sequence[float] | None,
        probability: Probability,
        offset: Size,
    ) -> tuple[Any, Any]:
        """``(o, stats)``: ``fused_attn_fwd`` with what that function of NVIDIA's lacks.

        ``S = cap(scale * q k^T) + bias - alibi_slopes[h] * distance`` with ``cap(s) = soft_cap * tanh(s / soft_cap)`` where there is a ``soft_cap``
        (Gemma 2, arXiv:2408.00118), a slope of each head's own where there are ``alibi_slopes`` (arXiv:2108.12409), and dropout of ``probability``
        that is drawn from an int64 ``seed [1]``: the random word of a probability is that of its element, as ``fused_attn_fwd`` counts them, under
        ``(seed, offset)``, so every backend draws the same. Layouts, masks, windows, the shapes of ``bias`` and of ``stats`` are as there; the
        diagonal of a mask that is bottom right is that of windows and distances too. ``page_table``: of k and v, in a paged layout.
        """

    @function(
        "q angles",
        q="real [t h d]",
        k="=q [t g d]",
        v="=q [t g e]",
        k_cache="=q [p s g d]",
        v_cache="=q [p s g e]",
        page_table="int32 [b n]",
        cu_new_lens="int32 [b+1]",
        cu_cached_lens="int32 [b+1]",
        angles="fp32|fp64 [m 1 1 w]",
        start_positions="int32 [b]",
        alone="k_cache v_cache",
    )
    def prim_attention_step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        page_table: Indices,
        cu_new_lens: Lengths,
        cu_cached_lens: Lengths,
        angles: Tensor | None,
        start_positions: Lengths | None,
        interleaved: bool,
        max_new_len: Size,
        window_size: Sequence[int],
        scale: Finite,
    ) -> Any:
        """``o [t, h, e]``: attention of new tokens over all that a cache holds of their sequences, themselves included; they are added to it.

        What three functions do in turn: ``fused_rope_forward`` rotates q and k by ``angles`` (None: not at all), sequence i from
        ``start_positions[i]`` on; ``copy_to_kv_cache`` writes k and v at the ends of their sequences, in pages; ``fused_attn_fwd`` reads them, q of a
        token over its own place and what comes before it (padding causal, bottom right), within ``window_size``.

        ``q [t, h, d]``, ``k [t, g, d]``, ``v [t, g, e]``: sequences one after another, ``diff(cu_new_lens)[i]`` tokens of sequence i, at most
        ``max_new_len``. ``k_cache [pages, page size, g, d]``, ``v_cache``; ``page_table`` int32 ``[b, pages of a sequence]``; ``cu_cached_lens``
        int32 ``[b + 1]``, with the new tokens. Raises ``ShapeError`` or ``ArgumentError`` before anything is written.
        """

    @function(
        "q k bias soft_cap alibi_slopes",
        do="real [_ * _ e]",
        q="=do [_ * _ d]",
        k="=do [_ * _ d]",
        v="=do [_ * _ e]",
        o="=do [_ * _ e]",
        stats="fp32|fp64",
        bias="real [_ _ _ _]",
        cu_seqlens_q="int32 [b]",
        cu_seqlens_kv="int32 [b]",
        seed="int64 [1]",
    )
    def prim_attention_backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        stats: Tensor,
        bias: Tensor | None,
        cu_seqlens_q: Lengths | None,
        cu_seqlens_kv: Lengths | None,
        seed: Tensor | None,
        max_seqlen_q: Size,
        max_seqlen_kv: Size,
        qkv_layout: NVTE_QKV_Layout,
        attn_mask_type: NVTE_Mask_Type,
        window_size: Sequence[int],
        scale: Finite,
        soft_cap: Positive | None,
        alibi_slopes: Sequence[float] | None,
        probability: Probability,
        offset: Size,
    ) -> tuple[Any, Any, Any, Any]:
        """``(dq, dk, dv, dbias)`` of ``prim.attention``, ``dbias`` in ``bias``'s shape and dtype, or None without one.

        With ``dS`` as ``fused_attn_bwd`` has it, the gradient before the cap is ``dS * (1 - (cap(s) / soft_cap)^2)``.
        """

    @function(
        "dz x add gamma",
        dz="real [*m n]",
        x="real [*m n]",
        add="real [*m n]",
        mu="fp32|fp64 (m)",
        rsigma="fp32|fp64 (m)",
        gamma="real [n]",
        idle="sm_margin",
    )
    def prim_layernorm_bwd_add(
        self, dz: Tensor, x: Tensor, add: Tensor, mu: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
    ) -> list[Any]:
        """``layernorm_bwd`` with ``add`` (of ``x``'s shape) added to ``dx`` in fp32, before the one rounding: ``[dx, dgamma, dbeta]``."""

    @function("x")
    def prim_all_gather(self, x: Tensor, group: Any = None) -> Any:
        """The tensors of all processes of ``group`` along the first dimension, in the order of their ranks: ``[n, ..] -> [processes * n, ..]``.

        Any dtype, the same shape in every process. ``group``: an opaque value that says which processes (a ``torch.distributed.ProcessGroup``, or its
        name); None: all of them. Like every collective, it is called by each process of the group. Of a group of one, the result is ``x``.
        """

    @function("x")
    def prim_reduce_scatter(self, x: Tensor, group: Any = None) -> Any:
        """The process's own part of the sum over ``group``: ``[processes * n, ..] -> [n, ..]``, of which rank r gets the r-th ``n`` rows.

        The sum is made in whatever order the group makes it, in the dtype of ``x`` or in a wider one, rounded once. Raises ``ShapeError`` where the
        processes do not divide the first dimension, before any of them has communicated.
        """

    @function("x")
    def prim_all_to_all(self, x: Tensor, group: Any = None) -> Any:
        """Of ``x [processes * n, ..]`` the r-th ``n`` rows go to rank r of ``group``, and what rank r has for this one comes in their place.

        Any dtype, the same shape in every process. Raises ``ShapeError`` where the processes do not divide the first dimension, before any of them
        has communicated.
        """

    @function("x")
    def prim_ring_shift(self, x: Tensor, group: Any = None) -> Any:
        """What the rank before has: ``x`` goes to the next rank of ``group``, and from the last to the first. Any dtype, the same shape in every
        process."""

    @function("x", x="any [r n]", sizes="integer [g]")
    def prim_exchange_groups(self, x: Tensor, sizes: Tensor, group: Any = None) -> tuple[Any, Any]:
        """``(y, counts)``: of the groups of rows of ``x`` the r-th of equal shares goes to rank r of ``group``, from every process.

        Group ``i`` has the ``sizes[i]`` rows (int32 or int64 ``[groups]``, the same number of groups in every process) after those of the groups
        before it; all rows of ``x [rows, columns]`` belong to groups. ``y [rows', columns]`` has this process's ``groups / processes`` groups one
        after another, in each the rows of all processes in the order of their ranks. ``counts``, int64 ``[processes, groups / processes]``, where
        ``sizes`` lie: how many came from whom. The host reads them. Raises ``ShapeError`` where the groups cannot be shared out equally, or have
        other rows than ``x``, before anything is sent.
        """

    @function("y", y="any [r n]", sizes="integer [g]", counts="int64 [p own]")
    def prim_return_groups(self, y: Tensor, sizes: Tensor, counts: Tensor, group: Any = None) -> Any:
        """The inverse of ``prim_exchange_groups``: every row back in the process and the place that it came from. ``sizes``, ``counts``: as there."""

    @function("o", o="real [b s h d]", lse="fp32|fp64 [b h s 1]", o_step="=o [b s h d]", lse_step="=lse [b h s 1]", before="*")
    def prim_attention_merge(self, o: Tensor, lse: Tensor, o_step: Tensor, lse_step: Tensor) -> tuple[Any, Any]:
        """``(o, lse)`` of attention over two sets of keys, from what each has by itself: ``lse' = log(exp lse + exp lse_step)``,
        ``o' = exp(lse - lse') * o + exp(lse_step - lse') * o_step``, in the dtype of ``o``.

        ``o [b, s, h, d]``; ``lse [b, h, s, 1]``, the logsumexp of each query's scores (Liu et al. 2023, arXiv:2310.01889). Of a query that has
        seen no key in either (-inf) ``o'`` is 0.
        """

    @function("x")
    def prim_all_reduce(self, x: Tensor, group: Any = None, reduction: str = "sum") -> Any:
        """``x`` reduced over ``group``, element by element: ``"sum"`` and ``"max"`` in the dtype of ``x``, ``"mean"`` in fp32 with one rounding.

        Raises ``ArgumentError`` for another reduction.
        """

    @function("x")
    def prim_begin_all_gather(self, x: Tensor, group: Any = None) -> tuple[Any, Any]:
        """``(result, work)``: begin ``prim_all_gather``, and do not wait for it.

        ``result`` is what that gives once ``prim_end_collective`` has waited for ``work``: until then it is not read, and ``x`` is not written. The
        processes of ``group`` begin their collectives in one order.
        """

    @function("x")
    def prim_begin_reduce_scatter(self, x: Tensor, group: Any = None) -> tuple[Any, Any]:
        """The same of ``prim_reduce_scatter``."""

    @function("x")
    def prim_begin_all_reduce(self, x: Tensor, group: Any = None) -> tuple[Any, Any]:
        """The same of ``prim_all_reduce``, which sums."""

    @function("x")
    def prim_end_collective(self, x: Tensor, work: Any) -> Any:
        """``x``, the result of a collective that was begun, when its ``work`` is done."""


_OF_A_GROUP = (name for name in vars(Prim) if name in DECLARATIONS and "group" in DECLARATIONS[name].signature.parameters)
COLLECTIVES = (*_OF_A_GROUP, "prim_end_collective")
"""What the processes of a group call together."""
