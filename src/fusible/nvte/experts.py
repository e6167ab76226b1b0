"""Functions for mixtures of experts: the choice of each token's experts, and its rows on the way to them and back.

T tokens, E experts, of which each token takes K (Shazeer et al. 2017, arXiv:1701.06538). Copies of tokens are sorted by expert, so that they are the
groups of a *grouped* tensor. Where processes share out experts, groups are exchanged between them (``exchange_groups``).
"""

from __future__ import annotations

from fusible import tex
from fusible.nvte.dtype import DType
from fusible.nvte.tensor import Tensor
from fusible.tex.interface.domains import Count, Finite

__all__ = ["count_experts", "dmoe_permute", "dmoe_unpermute", "dtop_experts", "moe_permute", "moe_unpermute", "top_experts"]


def top_experts(
    logits: Tensor,
    k: Count,
    normalized: bool = True,
    score_function: str = "softmax",
    expert_bias: Tensor | None = None,
    groups: Count | None = None,
    top_groups: Count | None = None,
    scaling_factor: Finite | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(probs, experts, scores)``: the ``k`` experts of largest ``logits [T, E]`` of each token, the best first, int32 ``[T, k]``, and the softmax
    over their logits, ``[T, k]`` in the type of ``logits`` (Jiang et al. 2024, arXiv:2401.04088). Not ``normalized``: theirs of the softmax over the
    logits of all experts. ``scores``: what ``dtop_experts`` reads.

    ``score_function="sigmoid"``: probs are sigmoids of the logits, for ``k > 1`` and ``normalized`` divided by their sum ``+ 1e-20``; experts are
    chosen by these plus ``expert_bias [E]`` (DeepSeek-AI 2024, arXiv:2412.19437). ``top_groups``: they are chosen among those of so many of
    ``groups`` equal groups, whose ``k // top_groups`` best sum highest. ``scaling_factor``: what probs are multiplied by.
    """
    chosen = tex.prim.empty((logits.shape[0], k), DType.Int32, logits.data)
    bias = None if expert_bias is None else expert_bias.data
    probs, experts, scores = tex.fused_topk_with_score_function_fwd(
        logits.data, k, not normalized, groups, top_groups, scaling_factor, score_function, bias, 0, chosen
    )
    if score_function == "sigmoid" and not normalized:  # for which tex's probs are divided by their sum
        own = tex.prim.take_along(scores, experts)
        found = tex.prim.scale(own, 1.0 if scaling_factor is None else scaling_factor, logits.type)
    else:
        found = tex.prim.take_along(probs, experts)
    return Tensor(found, logits.type), Tensor(experts, DType.Int32), Tensor(scores, DType.Float32)


def dtop_experts(
    dprobs: Tensor,
    experts: Tensor,
    scores: Tensor,
    normalized: bool = True,
    score_function: str = "softmax",
    scaling_factor: Finite | None = None,
) -> Tensor:
    """The gradient of ``logits``, ``[T, E]`` in the type of ``dprobs [T, k]``. The choice of experts has none."""
    k, dense = experts.shape[1], tex.prim.put_along(dprobs.data, experts.data, scores.shape[1])
    dlogits = tex.prim.empty(scores.shape, dprobs.type, dprobs.data)
    options = not normalized, scaling_factor, score_function
    if score_function == "sigmoid" and not normalized:  # of one expert nothing is divided; dense is 0 for those that were not chosen
        every = tex.prim.full(scores.shape, 1.0, DType.Byte, dprobs.data)
        tex.fused_topk_with_score_function_bwd(every, scores.data, dense, dlogits, 1, *options)
    else:
        tex.fused_topk_with_score_function_bwd(experts.data, scores.data, dense, dlogits, k, *options, use_dense_indices=True)
    return Tensor(dlogits, dprobs.type)


def count_experts(experts: Tensor, count: Count) -> Tensor:
    """How many copies of tokens go to each of ``count`` experts, int64 ``[count]``, of ``experts [T, k]``. Counted in fp32, so up to 2^24 each."""
    ones = tex.prim.full(experts.shape, 1.0, DType.Float32, experts.data)
    return Tensor(tex.prim.cast(tex.prim.row_sum(tex.prim.put_along(ones, experts.data, count)), DType.Int64), DType.Int64)


def moe_permute(x: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
    """``(rows, row_map)``: ``k`` copies of each row of ``x [T, columns]``, unquantized, in the order of ``experts [T, k]``, ``[T k, columns]``; those
    of one expert are in the order of the tokens. ``row_map``, int32 ``[k T]``: at ``j T + t`` the row of token t's j-th copy."""
    rows, row_map, _ = tex.moe_permute_fwd(x.data, x.type, experts.data, 0, [], 0)
    return Tensor(rows, x.type), Tensor(row_map, DType.Int32)


def dmoe_permute(drows: Tensor, row_map: Tensor, k: Count) -> Tensor:
    """The gradient of ``moe_permute``'s x, ``[T, columns]``: the sum over each token's copies."""
    return Tensor(tex.moe_permute_bwd(drows.data, drows.type, row_map.data, None, row_map.shape[0] // k, k), drows.type)


def moe_unpermute(rows: Tensor, row_map: Tensor, probs: Tensor) -> Tensor:
    """``y[t] = sum_j probs[t, j] * rows[row_map[j T + t]]``: ``[T k, columns]``, fp32 ``[T, k] -> [T, columns]``."""
    count, k = probs.shape
    return Tensor(tex.moe_unpermute_fwd(rows.data, rows.type, row_map.data, probs.data, count, k), rows.type)


def dmoe_unpermute(dy: Tensor, rows: Tensor, row_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """``(drows, dprobs)`` of ``moe_unpermute``, of its arguments and ``dy [T, columns]``."""
    drows, dprobs = tex.moe_unpermute_bwd(dy.data, rows.data, rows.type, row_map.data, probs.data)
    return Tensor(drows, dy.type), Tensor(tex.prim.reshape(dprobs, probs.shape), DType.Float32)  # of no tokens it comes as [0, 1]
