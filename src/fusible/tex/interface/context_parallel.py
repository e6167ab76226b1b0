"""Packed sequences that are divided between devices."""

# A declaration is documentation alone.
# pyright: reportReturnType=false

from __future__ import annotations

from typing import Any

from fusible.tex.interface.arguments import Tensor
from fusible.tex.interface.declare import function
from fusible.tex.interface.domains import Count, Lengths, Size

__all__ = ["ContextParallel"]


class ContextParallel:
    """Packed sequences ``[t, ..]`` that are divided between ``W`` ranks for attention (Liu et al. 2023, arXiv:2310.01889, for the order of the work).

    Each sequence is cut into ``2 W`` equal chunks, and rank r holds chunk r and chunk ``2 W - 1 - r``, one after the other: its two *halves* of the
    sequence. ``cu_seqlens`` (int32 ``[b + 1]``) are cumulative lengths, padded to multiples of ``2 W``; of the tokens that a rank holds, those of the
    rank. Tokens past ``cu_seqlens[-1]`` are of no sequence: none of them is written to, and results made for them are 0.

    ``lse`` is the logsumexp of each query's scores, fp32 or fp64: ``[h, t]`` where ``lse_packed``, else ``[b, h, s]``. A ``_per_step`` tensor
    covers the queries of one step, all of a rank's or those of its second halves alone.
    """

    @function("cu_seqlens", tensor="any [* h d]", cu_seqlens="int32 [n+1]")
    def thd_read_half_tensor(self, tensor: Tensor, cu_seqlens: Lengths, half_idx: int) -> Any:
        """The first (``half_idx`` 0) or second (1) halves of all sequences, one after the other, ``[t / 2, ..]``; any dtype.

        Of 4 dimensions, the second is that of the tokens. Raises ``ArgumentError`` for another ``half_idx``, ``ShapeError`` for an odd ``t``.
        """

    @function("lse lse_packed", lse="fp32|fp64 [_ * t]", lse_per_step="fp32|fp64 [_ * u]", cu_seqlens="int32 [n+1]")
    def thd_second_half_lse_correction(self, lse: Tensor, lse_per_step: Tensor, cu_seqlens: Lengths, lse_packed: bool) -> None:
        """``lse = log(exp(lse) + exp(lse_per_step))`` on second halves, in place; ``lse_per_step`` is ``[h, >= t / 2]`` or ``[b, h, >= s / 2]``."""

    @function("lse lse_packed", lse="fp32|fp64 [_ * t]", cu_seqlens="int32 [n+1]")
    def thd_read_second_half_lse(self, lse: Tensor, cu_seqlens: Lengths, lse_packed: bool, second_half_lse_seqlen: Size) -> Any:
        """``lse`` of second halves, fp32 ``[h, second_half_lse_seqlen]`` or ``[b, h, second_half_lse_seqlen]``, the rest 0."""

    @function(
        "out",
        out="float [* h d]",
        out_per_step="=out [* h d]",
        old_lse="fp32|fp64",
        lse="fp32|fp64",
    )
    def thd_out_correction(
        self,
        out: Tensor,
        out_per_step: Tensor,
        old_lse: Tensor | None = None,
        lse: Tensor | None = None,
        lse_per_step: Tensor | None = None,
        cu_seqlens: Tensor | bool | None = None,
        only_second_half: bool | None = None,
        lse_packed: bool | None = None,
    ) -> None:
        """Merge the output of a step into ``out [t, h, d]``, in place, in fp32 with one rounding.

        ``out = out exp(old_lse - lse) + out_per_step exp(lse_per_step - lse)``, where ``lse`` is already merged. Without ``old_lse``, which is left
        out by name or by passing the seven positional arguments of before Transformer Engine 2.20.2, ``out += out_per_step exp(lse_per_step - lse)``.
        With ``only_second_half``, ``out_per_step`` is ``[t / 2, h, d]``, and ``lse_per_step`` is of its queries.
        A query whose ``lse`` is -inf gains nothing, and keeps nothing. Raises ``DTypeError`` unless both outputs have one dtype.
        """

    @function("grad", grad="float [t *]", grad_per_step="=grad [u *]", cu_seqlens="int32 [n+1]", before="*", disjoint="grad")
    def thd_grad_correction(self, grad: Tensor, grad_per_step: Tensor, cu_seqlens: Lengths, first_half: str, second_half: str) -> None:
        """Write a step's gradient to the first and to the second halves of ``grad [t, ..]``, in place.

        Each of the two is ``"add"``, ``"copy"``, ``"zero"`` or ``"none"``. ``grad_per_step`` is ``[t, ..]``; where one half is ``"none"``, or is
        ``"zero"`` and it has fewer tokens, it is ``[t / 2, ..]`` of the other half. Sums are fp32 with one rounding. Raises ``ArgumentError`` for
        another word, ``ShapeError`` for too few tokens.
        """

    @function("cu_seqlens", cu_seqlens="int32 [n+1]")
    def thd_get_partitioned_indices(self, cu_seqlens: Lengths, total_tokens: Size, world_size: Count, rank: Size) -> Any:
        """The tokens of rank ``rank`` of ``world_size``, in its order, int32 ``[total_tokens / world_size]``.

        Tokens past ``cu_seqlens[-1]`` are divided as one more sequence. Raises ``ShapeError`` where ``world_size`` does not divide
        ``total_tokens``, ``ArgumentError`` for no rank of the group.
        """

    @function("cu_seqlens", inp="any [total_tokens *]", cu_seqlens="int32 [n+1]")
    def thd_sequence_order_to_cp_rank_order(self, inp: Tensor, cu_seqlens: Lengths, cp_size: Count, total_tokens: Size) -> Any:
        """``inp [total_tokens, ..]`` with the tokens of rank 0 first, then those of rank 1, and so on, each in the rank's order; any dtype."""

    @function("cu_seqlens", inp="any [total_tokens *]", cu_seqlens="int32 [n+1]")
    def thd_cp_rank_order_to_sequence_order(self, inp: Tensor, cu_seqlens: Lengths, cp_size: Count, total_tokens: Size) -> Any:
        """The inverse of ``thd_sequence_order_to_cp_rank_order``."""

    @function("cu_seqlens", out="any [t *]", inp="=out [u *]", cu_seqlens_padded="int32 [n+1]", cu_seqlens="int32 [n+1]")
    def thd_copy_valid_tokens_from_per_split_to_rank_local(self, out: Tensor, inp: Tensor, cu_seqlens_padded: Lengths, cu_seqlens: Lengths) -> None:
        """Copy the tokens ``cu_seqlens_padded[i] + p`` with ``p < diff(cu_seqlens)[i]`` of all sequences i from ``inp`` to ``out``, in place.

        Both are ``[t, ..]`` of one dtype, and the sequences begin in ascending order. Every other token of ``out`` keeps its value.
        """
