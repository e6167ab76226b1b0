"""``transformer_engine.pytorch.triton.permutation``: the tokens of a mixture of experts, put in the order of the experts and back.

A ``row_id_map`` is int32 ``[tokens, 2 experts + 1]``: of each token its rows among the permuted ones, the last expert's first; from ``experts`` on
the experts that these rows belong to; and in the last place how many they are. The other places are -1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fusible.errors import ArgumentError, DTypeError, ShapeError, expected
from fusible.tex.protocol import check_shape

__all__ = [
    "make_chunk_sort_map",
    "make_row_id_map",
    "permute_with_mask_map",
    "sort_chunks_by_map",
    "unpermute_with_mask_map",
    "unpermute_with_mask_map_bwd_with_merging_probs",
]


_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_OF_A_PERMUTATION = "pass the map that moe_permute gave"


class _Routes(NamedTuple):
    """The pairs of a token and an expert that it goes to, with the row among the permuted ones; a token's pairs are in the order of its map.
    ``whole``: whether every permuted row is one of them."""

    tokens: Tensor
    experts: Tensor
    rows: Tensor
    whole: bool

    def empty(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Memory for the permuted rows, zeros where some are nobody's."""
        return like.new_empty(shape) if self.whole else like.new_zeros(shape)


def _routes(row_id_map: Tensor, pad_offsets: Tensor | None, sizes: tuple[int, int], rows: int) -> _Routes:
    """The routes of a map of ``sizes``, tokens and experts, to ``rows`` permuted ones. Raises ``DTypeError``, ``ShapeError`` and ``ArgumentError``
    for maps that are none."""
    _, experts = sizes
    check_integers(row_id_map, "row_id_map")
    check_shape(row_id_map, (sizes[0], 2 * experts + 1), "row_id_map")
    counts = row_id_map[:, -1:]
    _check_range(counts, experts + 1, "the counts of experts in row_id_map", _OF_A_PERMUTATION)
    tokens, place = (torch.arange(experts, device=row_id_map.device) < counts).nonzero(as_tuple=True)
    expert, row = row_id_map[tokens, experts + place].long(), row_id_map[tokens, place].long()
    _check_range(expert, experts, "the experts in row_id_map", _OF_A_PERMUTATION)
    if pad_offsets is not None:
        check_integers(pad_offsets, "pad_offsets")
        check_shape(pad_offsets, (experts,), "pad_offsets")
        row += pad_offsets[expert]
    needed = int(row.max()) + 1 if row.numel() else 0
    if needed > rows:
        raise ShapeError(expected(f"at least {needed} rows", of="the permuted tokens", got=rows, do="pass num_out_tokens that holds all routed"))
    return _Routes(tokens, expert, row, _check_each_once(row, rows, "the rows in row_id_map", _OF_A_PERMUTATION))


def check_integers(x: Tensor, of: str) -> None:
    """Raise ``DTypeError`` unless ``x`` is a tensor of integers."""
    if not isinstance(x, Tensor) or x.dtype not in _INTEGERS:
        got = str(x.dtype) if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise DTypeError(expected("a tensor of integers", of=of, got=got, do="pass torch.int32 or torch.int64"))


def _check_range(x: Tensor, count: int, of: str, do: str) -> None:
    """Raise ``ArgumentError`` unless the integers ``x`` are from 0 to below ``count``."""
    if x.numel():
        least, most = (int(end) for end in torch.aminmax(x))
        if least < 0 or most >= count:
            raise ArgumentError(expected(f"numbers from 0 to {count - 1}", of=of, got=least if least < 0 else most, do=do))


def _check_each_once(x: Tensor, count: int, of: str, do: str) -> bool:
    """Whether the numbers ``x`` are all those below ``count``. Raises ``ArgumentError`` for one that is not below it, or is there twice."""
    _check_range(x, count, of, do)
    times = torch.bincount(x.reshape(-1), minlength=count)
    if x.numel() and int(times.max()) > 1:
        raise ArgumentError(expected("each at most once", of=of, got=f"{int(times.argmax())} {int(times.max())} times", do=do))
    return x.numel() == count


def make_row_id_map(routing_map: Tensor, num_tokens: int, num_experts: int) -> Tensor:
    """The ``row_id_map`` of a mask ``[tokens, experts]``, 1 where a token goes to an expert: rows are counted expert by expert, then by token."""
    check_shape(routing_map, (num_tokens, num_experts), "routing_map")
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

    A pair whose probability is 0 gives zeros; with ``pad_offsets`` ``[experts]`` an expert's rows lie that much further on. Rows that are no pair's
    are zeros.
    """
    check_shape(inp, (num_tokens, hidden_size), "inp")
    if probs is not None:
        check_shape(probs, (num_tokens, num_experts), "probs")
    if scale is not None:
        check_shape(scale, (num_tokens, *scale.shape[1:]), "scale")
    routes = _routes(row_id_map, pad_offsets, (num_tokens, num_experts), num_out_tokens)

    def put(values: Tensor) -> Tensor:
        out = routes.empty(values, (num_out_tokens, *values.shape[1:]))
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
    check_shape(inp, (len(inp), hidden_size), "inp")
    if merging_probs is not None:
        check_shape(merging_probs, (num_tokens, num_experts), "merging_probs")
    if permuted_probs is not None:
        check_shape(permuted_probs, (len(inp),), "permuted_probs")
    routes = _routes(row_id_map, pad_offsets, (num_tokens, num_experts), len(inp))
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
    check_shape(fwd_output_grad, (num_tokens, hidden_size), "fwd_output_grad")
    check_shape(fwd_input, (num_out_tokens, hidden_size), "fwd_input")
    check_shape(merging_probs, (num_tokens, num_experts), "merging_probs")
    routes = _routes(row_id_map, pad_offsets, (num_tokens, num_experts), num_out_tokens)
    grad, pairs = fwd_output_grad[routes.tokens].float(), (routes.tokens, routes.experts)
    act_grad = routes.empty(fwd_output_grad, (num_out_tokens, hidden_size))
    act_grad[routes.rows] = (grad * merging_probs[pairs].float()[:, None]).to(act_grad.dtype)
    probs_grad = merging_probs.new_zeros(num_tokens, num_experts)
    probs_grad[pairs] = grad.mul_(fwd_input[routes.rows].float()).sum(1).to(probs_grad.dtype)
    return act_grad, probs_grad


def make_chunk_sort_map(split_sizes: Tensor, sorted_indices: Tensor, num_tokens: int, num_splits: int) -> Tensor:
    """Where each token goes when chunks of ``split_sizes`` tokens are put in the order ``sorted_indices``, int32 ``[tokens]``; tokens beyond the
    chunks stay, as in NVIDIA's kernel. Raises ``DTypeError``, ``ShapeError`` and ``ArgumentError`` for an order that does not name each chunk once,
    and for sizes below 0 or of more rows than there are."""
    for x, name in ((split_sizes, "split_sizes"), (sorted_indices, "sorted_index")):
        check_integers(x, f"{name} of moe_sort_chunks_by_index")
        check_shape(x, (num_splits,), f"{name} of moe_sort_chunks_by_index")
    sizes, order = split_sizes.long(), sorted_indices.long()
    _check_each_once(order, num_splits, "sorted_index of moe_sort_chunks_by_index", "name every chunk once")
    least, rows = (int(sizes.min()), int(sizes.sum())) if num_splits else (0, 0)
    if least < 0 or rows > num_tokens:
        wanted, got = ("sizes of at least 0", least) if least < 0 else (f"sizes of {num_tokens} rows at most, as many as inp has", rows)
        raise ShapeError(expected(wanted, of="split_sizes of moe_sort_chunks_by_index", got=got, do="give the rows of each chunk"))
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
    check_integers(row_id_map, "row_id_map")
    check_shape(row_id_map, (num_tokens,), "row_id_map")
    check_shape(inp, (num_tokens, hidden_size), "inp")
    if probs is not None:
        check_shape(probs, (num_tokens,), "probs")
    rows = row_id_map.long()
    _check_each_once(rows, num_tokens, "row_id_map", "pass the map of make_chunk_sort_map")

    def sort(values: Tensor) -> Tensor:
        if not is_forward:
            return values[rows]
        out = torch.empty_like(values, memory_format=torch.contiguous_format)
        out[rows] = values
        return out

    return sort(inp), None if probs is None else sort(probs)
