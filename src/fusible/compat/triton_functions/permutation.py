"""``transformer_engine.pytorch.triton.permutation``: the tokens of a mixture of experts, put in the order of the experts and back.

A ``row_id_map`` is int32 ``[tokens, 2 experts + 1]``: of each token its rows among the permuted ones, the last expert's first; from ``experts`` on
the experts that these rows belong to; and in the last place how many they are. The other places are -1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fusible.errors import ShapeError, expected

__all__ = [
    "make_chunk_sort_map",
    "make_row_id_map",
    "permute_with_mask_map",
    "sort_chunks_by_map",
    "unpermute_with_mask_map",
    "unpermute_with_mask_map_bwd_with_merging_probs",
]


class _Routes(NamedTuple):
    """The pairs of a token and an expert that it goes to, with the row among the permuted ones; a token's pairs are in the order of its map."""

    tokens: Tensor
    experts: Tensor
    rows: Tensor


def _routes(row_id_map: Tensor, pad_offsets: Tensor | None, experts: int, rows: int) -> _Routes:
    tokens, place = (torch.arange(experts, device=row_id_map.device) < row_id_map[:, -1:]).nonzero(as_tuple=True)
    expert, row = row_id_map[tokens, experts + place].long(), row_id_map[tokens, place].long()
    if pad_offsets is not None:
        row += pad_offsets[expert]
    needed = int(row.max()) + 1 if row.numel() else 0
    if needed > rows:
        raise ShapeError(expected(f"at least {needed} rows", of="the permuted tokens", got=rows, do="pass num_out_tokens that holds all routed"))
    return _Routes(tokens, expert, row)


def make_row_id_map(routing_map: Tensor, num_tokens: int, num_experts: int) -> Tensor:
    """The ``row_id_map`` of a mask ``[tokens, experts]``, 1 where a token goes to an expert: rows are counted expert by expert, then by token."""
    routed = routing_map.bool()
    rows = routed.t().reshape(-1).cumsum(0).view(num_experts, num_tokens).t().sub(1).masked_fill_(~routed, -1)
    rows, experts = rows.sort(1, descending=True)
    return torch.cat([rows, experts.masked_fill_(rows < 0, -1), routed.sum(1, keepdim=True)], 1).int()


def permute_with_mask_map(
    inp: Tensor,
    row_id_map: Tensor,
    probs: Tensor | None,
    scale: Tensor | None,
    pad_offsets: Tensor | None,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
    scale_hidden_dim: int,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """``out[row] = inp[token]`` for each pair, ``[num_out_tokens, hidden]``; likewise ``scale``, and ``probs`` ``[tokens, experts]``.

    A pair whose probability is 0 gives zeros; with ``pad_offsets`` ``[experts]`` an expert's rows lie that much further on, with zeros between.
    """
    routes = _routes(row_id_map, pad_offsets, num_experts, num_out_tokens)

    def put(values: Tensor) -> Tensor:
        shape = (num_out_tokens, *values.shape[1:])
        out = values.new_zeros(shape) if pad_offsets is not None else values.new_empty(shape)
        out[routes.rows] = values
        return out

    tokens, permuted_probs = inp[routes.tokens], None
    if probs is not None:
        permuted_probs = probs[routes.tokens, routes.experts]
        tokens[permuted_probs == 0] = 0
    return put(tokens), None if scale is None else put(scale[routes.tokens]), None if permuted_probs is None else put(permuted_probs)


def unpermute_with_mask_map(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None,
    permuted_probs: Tensor | None,
    pad_offsets: Tensor | None,
    num_tokens: int,
    num_experts: int,
    hidden_size: int,
) -> tuple[Tensor, Tensor | None]:
    """``out[token] = sum of inp[row] * merging_probs[token, expert]`` over a token's pairs, summed in fp32 and rounded once, ``[tokens, hidden]``.

    And ``permuted_probs`` ``[rows]`` as ``[tokens, experts]``, 0 where a token does not go.
    """
    routes = _routes(row_id_map, pad_offsets, num_experts, len(inp))
    values = inp[routes.rows].float()
    if merging_probs is not None:
        values *= merging_probs[routes.tokens, routes.experts].float()[:, None]
    sums = torch.zeros(num_tokens, hidden_size, dtype=torch.float32, device=inp.device).index_add_(0, routes.tokens, values)
    if permuted_probs is None:
        return sums.to(inp.dtype), None
    probs = permuted_probs.new_zeros(num_tokens, num_experts)
    probs[routes.tokens, routes.experts] = permuted_probs[routes.rows]
    return sums.to(inp.dtype), probs


def unpermute_with_mask_map_bwd_with_merging_probs(
    fwd_output_grad: Tensor,
    row_id_map: Tensor,
    fwd_input: Tensor,
    merging_probs: Tensor,
    pad_offsets: Tensor | None,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
) -> tuple[Tensor, Tensor]:
    """The gradients of ``unpermute_with_mask_map``: ``act_grad[row] = grad[token] * prob``, ``[num_out_tokens, hidden]`` in ``grad``'s dtype, and
    ``probs_grad[token, expert] = sum of inp[row] * grad[token]``, in fp32 and rounded once."""
    routes = _routes(row_id_map, pad_offsets, num_experts, num_out_tokens)
    grad, pairs = fwd_output_grad[routes.tokens].float(), (routes.tokens, routes.experts)
    alloc = fwd_output_grad.new_zeros if pad_offsets is not None else fwd_output_grad.new_empty
    act_grad = alloc((num_out_tokens, hidden_size))
    act_grad[routes.rows] = (grad * merging_probs[pairs].float()[:, None]).to(act_grad.dtype)
    probs_grad = merging_probs.new_zeros(num_tokens, num_experts)
    probs_grad[pairs] = grad.mul_(fwd_input[routes.rows].float()).sum(1).to(probs_grad.dtype)
    return act_grad, probs_grad


def make_chunk_sort_map(split_sizes: Tensor, sorted_indices: Tensor, num_tokens: int, num_splits: int) -> Tensor:
    """Where each token goes when chunks of ``split_sizes`` tokens are put in the order ``sorted_indices``, int32 ``[tokens]``; tokens beyond the
    chunks stay."""
    sizes, order = split_sizes.long(), sorted_indices.long()
    begins, sorted_sizes = sizes.cumsum(0) - sizes, sizes[order]
    moved = torch.empty_like(sizes)
    moved[order] = sorted_sizes.cumsum(0) - sorted_sizes
    found = torch.arange(num_tokens, device=sizes.device)
    shifts = (moved - begins).repeat_interleave(sizes)[:num_tokens]
    found[: len(shifts)] += shifts
    return found.int()


def sort_chunks_by_map(
    inp: Tensor, row_id_map: Tensor, probs: Tensor | None, num_tokens: int, hidden_size: int, is_forward: bool
) -> tuple[Tensor, Tensor | None]:
    """``out[map[i]] = inp[i]``, or its inverse ``out[i] = inp[map[i]]`` unless ``is_forward``; likewise ``probs`` ``[tokens]``."""
    rows = row_id_map.long()

    def sort(values: Tensor) -> Tensor:
        if not is_forward:
            return values[rows]
        out = torch.empty_like(values, memory_format=torch.contiguous_format)
        out[rows] = values
        return out

    return sort(inp), None if probs is None else sort(probs)
