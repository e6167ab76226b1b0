"""``transformer_engine.pytorch.permutation``: the tokens of a mixture of experts in the order of the experts, and back."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from fusible import tex
from fusible.compat.te_constants import TE_DType
from fusible.compat.triton_functions import permutation as maps
from fusible.errors import ArgumentError, NotServedError, ShapeError, expected
from fusible.quantized import QuantizedTensor
from fusible.tex.protocol import check_shape

__all__ = [
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
]


class _PermuteByMask(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor | None, rows: Tensor, offsets: Tensor | None, count: int) -> Any:
        experts = (rows.shape[1] - 1) // 2
        ctx.save_for_backward(rows, offsets)
        ctx.shape = len(x), experts, x.shape[1]
        permuted, _, permuted_probs = maps.permute_with_mask_map(x, rows, probs, None, offsets, len(x), experts, count, x.shape[1], 0)
        return permuted, permuted_probs if permuted_probs is not None else x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rows, offsets = ctx.saved_tensors
        of_probs = grads[1] if ctx.needs_input_grad[1] else None
        dx, dprobs = maps.unpermute_with_mask_map(grads[0].contiguous(), rows, None, of_probs, offsets, *ctx.shape)
        return dx, dprobs, None, None, None


class _UnpermuteByMask(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor | None, rows: Tensor, offsets: Tensor | None, shape: tuple[int, int, int]) -> Tensor:
        ctx.save_for_backward(x if probs is not None else None, probs, rows, offsets)
        ctx.shape, ctx.count = shape, len(x)
        return maps.unpermute_with_mask_map(x, rows, probs, None, offsets, *shape)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, probs, rows, offsets = ctx.saved_tensors
        tokens, experts, hidden = ctx.shape
        grad = grads[0].contiguous()
        if probs is None:
            dx = maps.permute_with_mask_map(grad, rows, None, None, offsets, tokens, experts, ctx.count, hidden, 0)[0]
            return dx, None, None, None, None
        dx, dprobs = maps.unpermute_with_mask_map_bwd_with_merging_probs(grad, rows, x, probs, offsets, tokens, experts, ctx.count, hidden)
        return dx, dprobs, None, None, None


class _PermuteByIndex(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, count: int, longest: int) -> Any:
        permuted, rows, _ = tex.moe_permute_fwd(x, TE_DType[x.dtype], index, count, [], longest * index.shape[1])
        ctx.save_for_backward(rows)
        ctx.shape = tuple(index.shape)
        ctx.mark_non_differentiable(rows)
        return permuted, rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad = grads[0].contiguous()
        return tex.moe_permute_bwd(grad, TE_DType[grad.dtype], ctx.saved_tensors[0], torch.empty(0, device="cpu"), *ctx.shape), None, None, None


class _UnpermuteByIndex(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor, rows: Tensor, tokens: int, topk: int) -> Tensor:
        ctx.save_for_backward(x, probs, rows)
        return tex.moe_unpermute_fwd(x, TE_DType[x.dtype], rows, probs, tokens, topk)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, probs, rows = ctx.saved_tensors
        grad = grads[0].contiguous()
        dx, dprobs = tex.moe_unpermute_bwd(grad, x, TE_DType[grad.dtype], rows, probs)
        return dx, dprobs if ctx.needs_input_grad[1] else None, None, None, None


class _SortChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor | None, rows: Tensor) -> Any:
        ctx.save_for_backward(rows)
        sorted_, permuted_probs = maps.sort_chunks_by_map(x, rows, probs, len(x), x.shape[1], is_forward=True)
        return sorted_, permuted_probs if permuted_probs is not None else x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad, of_probs = grads[0].contiguous(), grads[1] if ctx.needs_input_grad[1] else None
        dx, dprobs = maps.sort_chunks_by_map(grad, ctx.saved_tensors[0], of_probs, len(grad), grad.shape[1], is_forward=False)
        return dx, dprobs, None


def moe_permute(inp: Tensor, routing_map: Tensor, num_out_tokens: int, max_token_num: int = -1, map_type: str = "mask") -> tuple[Tensor, Tensor]:
    """``(permuted [num_out_tokens, hidden], row_id_map)``: the tokens ``inp [tokens, hidden]`` expert by expert.

    ``map_type="mask"``: ``routing_map [tokens, experts]`` is 1 where a token goes to an expert. ``"index"``: it is int32 ``[tokens, k]``, the experts
    of each token; ``num_out_tokens`` 0 means all. Raises ``ArgumentError``, ``ShapeError``; ``NotServedError`` for quantized tokens.
    """
    _check(inp, routing_map, "moe_permute")
    if map_type == "mask":
        permuted, _, rows = _by_mask(inp, None, routing_map, num_out_tokens, None)
        return permuted, rows
    if map_type != "index":
        raise ArgumentError(expected("'mask' or 'index'", of="map_type of moe_permute", got=repr(map_type), do="name one of these"))
    if not inp.numel():
        return inp.clone(), torch.empty(0, dtype=torch.int32, device=inp.device)
    if num_out_tokens < 0:
        raise ArgumentError(expected("at least 0", of="num_out_tokens of moe_permute by indices", got=num_out_tokens, do="pass 0 for all"))
    maps.check_integers(routing_map, "routing_map of moe_permute by indices")
    if routing_map.dtype != torch.int32:
        warnings.warn(f"moe_permute by indices takes int32, got {routing_map.dtype}, which is cast", stacklevel=2)
        routing_map = routing_map.to(torch.int32)
    return _PermuteByIndex.apply(inp, routing_map, num_out_tokens, max(max_token_num, len(inp)))  # type: ignore[no-any-return]


def moe_permute_with_probs(inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """``(permuted, permuted_probs [num_out_tokens], row_id_map)``: ``moe_permute`` by a mask, of ``probs [tokens, experts]`` too."""
    _check(inp, routing_map, "moe_permute_with_probs")
    return _by_mask(inp, probs, routing_map, num_out_tokens, None)


def moe_permute_and_pad_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, tokens_per_expert: Tensor, align_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """``(permuted, permuted_probs, row_id_map, pad_offsets, padded_tokens_per_expert)``: as ``moe_permute_with_probs``, with zeros behind the
    tokens of each expert, up to a multiple of ``align_size``. ``pad_offsets [experts]``: how much further on its tokens begin; None where no expert
    is padded."""
    _check(inp, routing_map, "moe_permute_and_pad_with_probs")
    if align_size <= 0 or tokens_per_expert is None:
        wrong = ("tokens_per_expert", tokens_per_expert) if tokens_per_expert is None else ("a positive align_size", align_size)
        raise ArgumentError(expected(wrong[0], of="moe_permute_and_pad_with_probs", got=wrong[1], do="pass it"))
    counts, routed = tokens_per_expert.to(inp.device), routing_map.bool().sum(0)
    maps.check_integers(counts, "tokens_per_expert")
    check_shape(counts, routed.shape, "tokens_per_expert")
    if not torch.equal(counts.long(), routed.to(counts.device)):
        got, do = counts.tolist(), "pass routing_map.sum(0)"
        raise ArgumentError(expected(f"{routed.tolist()}, as routing_map has them", of="tokens_per_expert", got=got, do=do))
    padded = ((counts + align_size - 1) // align_size * align_size).long()
    behind = padded - counts
    offsets = behind.cumsum(0) - behind if behind.any() else None
    permuted, permuted_probs, rows = _by_mask(inp, probs, routing_map, int(padded.sum()), offsets)
    return permuted, permuted_probs, rows, offsets, padded


def _by_mask(x: Tensor, probs: Tensor | None, routing_map: Tensor, count: int, offsets: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    if not x.numel():
        rows = torch.empty((0, 2 * routing_map.shape[1] + 1), dtype=torch.int32, device=x.device)
        return x.clone(), torch.empty(0, dtype=torch.float32 if probs is None else probs.dtype, device=x.device), rows
    if count <= 0:
        do = "pass int(routing_map.sum())"
        raise ArgumentError(expected("a positive num_out_tokens", of="a permutation by a mask", got=count, do=do))
    rows = maps.make_row_id_map(routing_map, *routing_map.shape)
    permuted, permuted_probs = _PermuteByMask.apply(x, probs, rows, offsets, count)  # type: ignore[misc]
    return permuted, permuted_probs, rows


def moe_unpermute(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: torch.Size | None = None,
    map_type: str = "mask",
    probs: Tensor | None = None,
    pad_offsets: Tensor | None = None,
) -> Tensor:
    """The tokens back in their order ``[tokens, hidden]``, each the sum of its rows, times ``merging_probs [tokens, experts]`` (by indices
    ``[tokens, k]``) where given. ``restore_shape``: ``[tokens, hidden]``, by a mask. ``probs`` is the former name of ``merging_probs``."""
    if probs is not None:
        if merging_probs is not None:
            raise ArgumentError(expected("merging_probs, or probs as it was called", of="moe_unpermute", got="both", do="pass merging_probs"))
        warnings.warn("probs of moe_unpermute is called merging_probs now", stacklevel=2)
        merging_probs = probs
    if map_type not in ("mask", "index"):
        raise ArgumentError(expected("'mask' or 'index'", of="map_type of moe_unpermute", got=repr(map_type), do="name one of these"))
    if not inp.numel():
        return inp.clone()
    _refuse_quantized(inp, "moe_unpermute")
    if map_type == "mask":
        if restore_shape is not None and len(restore_shape) != 2:
            raise ShapeError(expected("[tokens, hidden]", of="restore_shape", got=list(restore_shape), do="pass the shape of the tokens"))
        _check_matrix(inp, "inp")
        _check_matrix(row_id_map, "row_id_map")
        tokens, hidden = inp.shape if restore_shape is None else restore_shape
        shape = tokens, (row_id_map.shape[1] - 1) // 2, hidden
        return _UnpermuteByMask.apply(inp, merging_probs, row_id_map, pad_offsets, shape)  # type: ignore[no-any-return]
    _check_matrix(inp, "inp")
    if merging_probs is None:
        return _UnpermuteByIndex.apply(inp, inp.new_empty(0), row_id_map, len(row_id_map), 1)  # type: ignore[no-any-return]
    _check_matrix(merging_probs, "merging_probs of moe_unpermute by indices")
    return _UnpermuteByIndex.apply(inp, merging_probs.float(), row_id_map, *merging_probs.shape)  # type: ignore[no-any-return]


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """The chunks of ``split_sizes [chunks]`` rows of ``inp [tokens, hidden]``, in the order of ``sorted_index [chunks]``, which names each once. Rows
    beyond the chunks stay where they are. Raises ``DTypeError``, ``ShapeError`` and ``ArgumentError`` for sizes and orders that are none."""
    return _sorted(inp, None, split_sizes, sorted_index)[0]


def moe_sort_chunks_by_index_with_probs(inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> tuple[Tensor, Tensor]:
    """``(sorted, sorted_probs)``: ``moe_sort_chunks_by_index``, of ``probs [tokens]`` too."""
    return _sorted(inp, probs, split_sizes, sorted_index)


def _sorted(x: Tensor, probs: Tensor | None, sizes: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    _refuse_quantized(x, "moe_sort_chunks_by_index")
    _check_matrix(x, "inp")
    rows = maps.make_chunk_sort_map(sizes, order, len(x), sizes.numel())
    if not x.numel():
        return x.clone(), x.new_empty(0) if probs is None else probs.clone()
    return _SortChunks.apply(x, probs, rows)  # type: ignore[no-any-return]


def _check(x: Tensor, routing_map: Tensor, name: str) -> None:
    _refuse_quantized(x, name)
    _check_matrix(x, "inp")
    _check_matrix(routing_map, "routing_map")
    if len(x) != len(routing_map):
        raise ShapeError(expected(f"a row for each of the {len(x)} tokens", of=f"routing_map of {name}", got=len(routing_map), do="route all tokens"))


def _check_matrix(x: Tensor, of: str) -> None:
    if x.ndim != 2:
        raise ShapeError(expected("a matrix", of=of, got=list(x.shape), do="reshape it"))


def _refuse_quantized(x: Tensor, name: str) -> None:
    if isinstance(x, QuantizedTensor):
        raise NotServedError(expected("unquantized tokens", of=name, got=type(x).__name__, do="pass x.dequantize()"))
