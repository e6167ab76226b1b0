"""Mixture of experts: tokens to their experts and back, and the router."""

# A declaration is documentation alone.
# pyright: reportReturnType=false

from __future__ import annotations

from typing import Any

from fusible.tex.enums import NVTEQBHistogramMode, NVTERoutingMapFormat
from fusible.tex.interface.arguments import Tensor
from fusible.tex.interface.declare import function, function_like
from fusible.tex.interface.domains import AnyDType, Count, Finite, Size

__all__ = ["MoE"]


class MoE:
    """Moving tokens to their experts and back, and choosing the experts (Shazeer et al. 2017, arXiv:1701.06538).

    T tokens of H numbers, E experts, K experts per token. A ``row_id_map`` (int32 ``[K * T]``) has at ``k * T + t`` the row that token t's k-th copy
    went to, or -1 where that copy was dropped. ``dtype`` is that of ``input``; FP8 data comes as uint8 with ``dtype`` naming the format. A router
    takes ``logits [*leading, E]`` (float32, bfloat16, float16) and computes in fp32. Its ``intermediate`` is what its backward reads: fp32 of the
    logits' shape.

    ``score_function`` is ``"softmax"``, ``"sigmoid"`` or ``"sqrtsoftplus"`` (the square root of ``log(1 + exp(x))``). A routing map tells
    which experts a token goes to: bool ``[*leading, E]`` for ``routing_map_format`` 0 (BYTEMAP), or uint8 ``[*leading, ceil(E / 8)]`` for 1
    (BITMAP_U8), where expert e is bit ``e % 8`` of byte ``e // 8``. Of equal scores the expert of the lowest index comes first.
    """

    @function("input indices", input="any [t h]", indices="integer [t k]")
    def moe_permute_fwd(
        self, input: Tensor, dtype: AnyDType, indices: Tensor, num_out_tokens: int, workspace: list[Tensor], max_expanded_token_num: int
    ) -> Any:
        """``(permuted, row_id_map, workspace)``: the rows of ``input [T, H]``, K copies of each, sorted by expert.

        ``indices``: int32 or int64 ``[T, K]``, the experts of each token, from 0 on; how many there are does not matter to a sort, which is
        stable in ``t * K + k``. ``permuted`` is ``[num_out_tokens, H]`` in ``input``'s dtype (``[T * K, H]`` where ``num_out_tokens <= 0``): copies
        that come later in the order are dropped, rows beyond ``T * K`` are 0. ``workspace``: four tensors, made where the list is empty; scratch.
        Raises ``ShapeError`` or ``DTypeError``.
        """

    @function("input row_id_map", input="any [r h]", row_id_map="int32 (n)", prob="fp32")
    def moe_permute_bwd(self, input: Tensor, dtype: AnyDType, row_id_map: Tensor, prob: Tensor | None, num_tokens: Size, topK: Count) -> Any:
        """The gradient of ``moe_permute_fwd``: ``moe_unpermute_fwd`` of the gradient ``input``, ``prob`` being empty."""

    @function("input row_id_map", input="any [r h]", row_id_map="int32 (n)", prob="fp32")
    def moe_unpermute_fwd(self, input: Tensor, dtype: AnyDType, row_id_map: Tensor, prob: Tensor | None, num_tokens: Size, topK: Count) -> Any:
        """``out[t] = sum_k prob[t, k] * input[row_id_map[k * T + t]]``, dropped copies being skipped: ``[T, H]`` in ``input``'s dtype.

        ``input``: ``[rows, H]``; ``prob``: fp32 ``[T, K]``, or empty, which stands for ones. FP8 data without ``prob`` is averaged over K instead of
        summed, so that it stays in range. Raises ``ShapeError`` or ``DTypeError``.
        """

    @function("input_bwd input_fwd row_id_map", input_bwd="any [t h]", input_fwd="any [r h]", row_id_map="int32 [n]", prob="fp32")
    def moe_unpermute_bwd(self, input_bwd: Tensor, input_fwd: Tensor, dtype: AnyDType, row_id_map: Tensor, prob: Tensor) -> Any:
        """``(act_grad, prob_grad)`` of ``moe_unpermute_fwd`` for the gradient ``input_bwd [T, H]`` and the forward's ``input_fwd [rows, H]``.

        ``act_grad[row_id_map[k * T + t]] = input_bwd[t] * prob[t, k]`` in ``input_bwd``'s dtype, ``[rows, H]``, 0 in rows that nothing came from;
        ``prob_grad[t, k] = sum_h input_bwd[t, h] * input_fwd[row_id_map[k * T + t], h]``, fp32 ``[T, K]``, 0 for a dropped copy. With an empty
        ``prob``, K is 1, ``prob`` stands for ones, and ``prob_grad`` is 0. Raises ``ArgumentError`` for a row that two copies went to.
        """

    @function("logits", logits="float [*m e]", expert_bias="float [e]", topk_indices="int16|integer [*m topk]")
    def fused_topk_with_score_function_fwd(
        self,
        logits: Tensor,
        topk: Count,
        use_pre_softmax: bool,
        num_groups: int | None,
        group_topk: int | None,
        scaling_factor: Finite | None,
        score_function: str,
        expert_bias: Tensor | None,
        routing_map_format: NVTERoutingMapFormat | int = 0,
        topk_indices: Tensor | None = None,
    ) -> Any:
        """``(probs, routing_map, intermediate)``: the ``topk`` experts of each token and their weights.

        Experts are chosen by their score, plus ``expert_bias [E]`` (of sigmoid and sqrtsoftplus alone; DeepSeek-V3, arXiv:2412.19437), which does not
        enter the weights. With ``group_topk``, first that many of ``num_groups`` equal groups are chosen, each by the sum of its
        ``topk // group_topk`` best. The weight of a chosen expert is

        * softmax: the softmax over all experts if ``use_pre_softmax``, else over the chosen ones;
        * sigmoid, sqrtsoftplus: the score, for ``topk > 1`` divided by the sum of the chosen scores ``+ 1e-20``;

        times ``scaling_factor`` (None: 1). ``probs`` has it in ``logits``' shape and dtype, 0 elsewhere. ``intermediate``: the softmax over all, or
        that over the chosen with -inf elsewhere; the sigmoid; the logits for sqrtsoftplus. A given ``topk_indices [*leading, topk]`` (int16,
        int32 or int64) receives the experts, the best first, and is returned in place of a routing map. Raises ``ShapeError``, ``DTypeError`` or
        ``ArgumentError`` before anything is written.
        """

    @function(
        "logits expert_bias",
        logits="float [*m e]",
        expert_bias="float [e]",
        topk_indices="int16|integer [*m topk]",
        histogram="int32 [e bins]",
        bin_bounds="fp32 [2]",
        disjoint="histogram topk_indices",
    )
    def fused_topk_with_score_function_qb_fwd(
        self,
        logits: Tensor,
        topk: Count,
        scaling_factor: Finite | None,
        expert_bias: Tensor | None,
        routing_map_format: NVTERoutingMapFormat,
        topk_indices: Tensor | None,
        histogram: Tensor,
        bin_bounds: Tensor,
        histogram_mode: NVTEQBHistogramMode,
        bin_bounds_validated: bool = False,
    ) -> Any:
        """``(probs, routing_map, intermediate, cutoff, histogram)``: the sigmoid router with the statistics that quantile balancing needs.

        The first three are those of ``fused_topk_with_score_function_fwd``. ``cutoff`` (fp32 ``[*leading]``) is each token's biased score of rank
        ``topk + 1``, the best one that it did not choose; so ``topk`` is below E. Into ``histogram`` (int32 ``[E, bins]``, accumulated in place) each
        token enters ``cutoff - sigmoid(logit)`` of every expert, the bias from which on it would choose that expert; from the quantiles follow the
        biases that balance the load. The bins are uniform between ``bin_bounds`` (fp32 ``[lower, upper]``); what
        lies outside goes to the first or the last. ``histogram_mode`` (``NVTEQBHistogramMode``) changes no result. ``bin_bounds_validated`` says that
        the bounds are known to be finite and ascending; else they are read and checked. Raises like the router, before anything is written.
        """

    @function(
        "intermediate_output grad_probs grad_logits",
        routing_map="bool|uint8|int16|integer [*m k]",
        intermediate_output="fp32 [*m e]",
        grad_probs="float [*m e]",
        grad_logits="float [*m e]",
    )
    def fused_topk_with_score_function_bwd(
        self,
        routing_map: Tensor,
        intermediate_output: Tensor,
        grad_probs: Tensor,
        grad_logits: Tensor,
        topk: Count,
        use_pre_softmax: bool,
        scaling_factor: Finite | None,
        score_function: str,
        use_dense_indices: bool = False,
        routing_map_format: NVTERoutingMapFormat | int = 0,
    ) -> None:
        """Write the gradient of the router's ``probs`` to ``grad_logits`` (shape of ``grad_probs``; any of the three dtypes).

        ``routing_map``: what the forward returned: a routing map in ``routing_map_format``, or with ``use_dense_indices`` the experts
        ``[*leading, topk]``. The choice of experts has no gradient. Raises ``ShapeError``, ``DTypeError`` or ``ArgumentError``.
        """

    @function("logits", logits="float [*m e]")
    def fused_score_for_moe_aux_loss_fwd(
        self, logits: Tensor, topk: Count, score_function: str, routing_map_format: NVTERoutingMapFormat | int = 0
    ) -> Any:
        """``(scores, routing_map, intermediate)``: the scores of all experts for the load-balancing loss, fp32 in ``logits``' shape.

        ``softmax(logits)``, or the sigmoid or sqrtsoftplus divided by ``their sum + 1e-20``; ``routing_map`` marks the ``topk`` best.
        """

    @function(
        "intermediate_output grad_scores grad_logits", intermediate_output="fp32 [*m e]", grad_scores="float [*m e]", grad_logits="float [*m e]"
    )
    def fused_score_for_moe_aux_loss_bwd(
        self, intermediate_output: Tensor, grad_scores: Tensor, grad_logits: Tensor, topk: Count, score_function: str
    ) -> None:
        """Write the gradient of ``fused_score_for_moe_aux_loss_fwd``'s scores to ``grad_logits`` (shape of ``grad_scores``)."""

    @function("probs tokens_per_expert", probs="float [num_rows num_cols]", tokens_per_expert="float|integer [num_cols]")
    def fused_moe_aux_loss_fwd(
        self,
        probs: Tensor,
        tokens_per_expert: Tensor,
        total_num_tokens: Count,
        num_experts: Count,
        num_rows: Size,
        num_cols: Size,
        topk: Count,
        coeff: Finite,
    ) -> Any:
        """``(loss, Const_buf)``: ``loss = C * sum_rc probs[r, c] * tokens_per_expert[c]``, ``C = num_experts * coeff / topk / total_num_tokens^2``.

        ``probs``: ``[num_rows, num_cols]``; ``tokens_per_expert``: ``[num_cols]``, integers or floating point. ``loss`` has no dimensions and
        ``probs``' dtype; ``Const_buf`` is fp32 ``[C, loss]``. Source: Fedus et al. 2021, arXiv:2101.03961. Raises ``ShapeError``.
        """

    @function_like(fused_moe_aux_loss_fwd, "total_num_tokens", total_num_tokens="integer (1)")
    def fused_moe_aux_loss_fwd_graph_safe(self, total_num_tokens: Tensor) -> Any:
        """``fused_moe_aux_loss_fwd`` whose ``total_num_tokens`` is a tensor of one integer, never read by the host."""

    @function(
        "Const_buf tokens_per_expert grad_aux_loss", Const_buf="fp32 (2)", tokens_per_expert="float|integer [num_cols]", grad_aux_loss="float (1)"
    )
    def fused_moe_aux_loss_bwd(self, Const_buf: Tensor, tokens_per_expert: Tensor, num_rows: Size, num_cols: Size, grad_aux_loss: Tensor) -> Any:
        """The gradient for ``probs``: ``C * tokens_per_expert[c] * grad_aux_loss``, ``[num_rows, num_cols]`` in ``grad_aux_loss``'s dtype."""
