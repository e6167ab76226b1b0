"""Packed sequences that are divided between devices.

Everything is looked up from the side that is written: for each of its tokens, where in the other tensor its value is. So no length is read on the
host.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusible.tex.backends.torch_backend.segments import segments
from fusible.tex.calls.context_parallel import check_halves, check_lse, check_moved, check_partition, out_correction, per_step_tokens
from fusible.tex.calls.index_checks import check_cumulative, check_lengths
from fusible.tex.formulas.segments import Segments
from fusible.tex.interface.context_parallel import ContextParallel
from fusible.tex.interface.declare import CallArguments, by_name

__all__ = ["ContextParallelKernels"]


class ContextParallelKernels(ContextParallel):
    def thd_read_half_tensor(self, tensor: Tensor, cu_seqlens: Tensor, half_idx: int) -> Any:
        along = check_halves(tensor, half_idx)
        tokens = tensor.shape[along]
        seg = _halves(tokens // 2, cu_seqlens)
        token = (2 * seg.start + seg.position + half_idx * seg.length).clamp_(0, max(tokens - 1, 0))
        return tensor.index_select(along, token).masked_fill_(_along(~seg.inside, along, tensor.dim()), 0)

    def thd_second_half_lse_correction(self, lse: Tensor, lse_per_step: Tensor, cu_seqlens: Tensor, lse_packed: bool) -> None:
        heads = lse.shape[-2]
        for name, x in (("lse", lse), ("lse_per_step", lse_per_step)):
            check_lse(x, cu_seqlens, lse_packed, heads, f"{name} of thd_second_half_lse_correction")
        if lse_packed:
            seg = _whole(lse.shape[-1], cu_seqlens)
            position, half, start = seg.position, seg.length // 2, seg.start // 2
            second = (position >= half).logical_and_(seg.inside)
        else:
            _check_each(cu_seqlens, lse.shape[-1])
            position, half, start = torch.arange(lse.shape[-1], device=lse.device), (torch.diff(cu_seqlens) // 2).view(-1, 1, 1), 0
            second = (position >= half).logical_and_(position < 2 * half)
        step = _pick(lse_per_step, start + position - half).to(lse.dtype)
        step.masked_fill_(second.logical_not_(), -torch.inf)
        torch.logaddexp(lse, step, out=lse)

    def thd_read_second_half_lse(self, lse: Tensor, cu_seqlens: Tensor, lse_packed: bool, second_half_lse_seqlen: int) -> Any:
        check_lse(lse, cu_seqlens, lse_packed, lse.shape[-2], "lse of thd_read_second_half_lse")
        if lse_packed:
            check_cumulative(cu_seqlens, lse.shape[-1], "cu_seqlens")
            seg = _halves(second_half_lse_seqlen, cu_seqlens)
            token, inside = 2 * seg.start + seg.position + seg.length, seg.inside
        else:
            _check_each(cu_seqlens, lse.shape[-1])
            position, half = torch.arange(second_half_lse_seqlen, device=lse.device), (torch.diff(cu_seqlens) // 2).view(-1, 1, 1)
            token, inside = position + half, position < half
        return _pick(lse, token).float().masked_fill_(~inside, 0)

    @by_name
    def thd_out_correction(self, call: CallArguments) -> None:
        out, out_per_step = call.out, call.out_per_step
        corrected = out_correction(*vars(call).values())
        seg = _whole(out.shape[0], corrected.cu_seqlens)
        touched, before = seg.inside, torch.zeros_like(seg.position)
        if corrected.only_second_half:
            before = seg.length // 2
            touched = touched.logical_and(seg.position >= before)
        row = (seg.start // 2 if corrected.only_second_half else seg.start) + seg.position - before
        lse, step_lse = (
            _of_tokens(x, seg, index, corrected.lse_packed) for x, index in ((corrected.lse, None), (corrected.lse_per_step, (row, before)))
        )
        change = _weight(step_lse, lse) * out_per_step.index_select(0, row.clamp(0, max(out_per_step.shape[0] - 1, 0))).float()
        if corrected.old_lse is None:
            change.add_(out)
        else:
            change.addcmul_(out.float(), _weight(_of_tokens(corrected.old_lse, seg, None, corrected.lse_packed), lse))
        out.copy_(torch.where(_along(touched, 0, out.dim()), change.to(out.dtype), out))

    def thd_grad_correction(self, grad: Tensor, grad_per_step: Tensor, cu_seqlens: Tensor, first_half: str, second_half: str) -> None:
        compact = per_step_tokens(grad, grad_per_step, first_half, second_half) < grad.shape[0]
        seg = _whole(grad.shape[0], cu_seqlens)
        half = seg.length // 2
        second = (seg.position >= half).logical_and(seg.inside)
        first = (seg.position < half).logical_and_(seg.inside)
        row = seg.start + seg.position
        if compact:
            row = seg.start // 2 + torch.where(second, seg.position - half, seg.position)
        step = grad_per_step.index_select(0, row.clamp_(0, max(grad_per_step.shape[0] - 1, 0)))
        for mask, word in ((first, first_half), (second, second_half)):
            mask = _along(mask, 0, grad.dim())
            if word == "zero":
                grad.masked_fill_(mask, 0)
            elif word != "none":
                new = step if word == "copy" else (grad.float() if grad.is_floating_point() else grad) + step
                grad.copy_(torch.where(mask, new.to(grad.dtype), grad))

    def thd_get_partitioned_indices(self, cu_seqlens: Tensor, total_tokens: int, world_size: int, rank: int) -> Any:
        check_partition(total_tokens, world_size, rank, "thd_get_partitioned_indices")
        return _partition(cu_seqlens, total_tokens, world_size, torch.full((1, 1), rank, device=cu_seqlens.device, dtype=torch.int32)).view(-1)

    def thd_sequence_order_to_cp_rank_order(self, inp: Tensor, cu_seqlens: Tensor, cp_size: int, total_tokens: int) -> Any:
        check_partition(total_tokens, cp_size, 0, "thd_sequence_order_to_cp_rank_order", inp.shape[0])
        return inp.index_select(0, _partition(cu_seqlens, total_tokens, cp_size).view(-1))

    def thd_cp_rank_order_to_sequence_order(self, inp: Tensor, cu_seqlens: Tensor, cp_size: int, total_tokens: int) -> Any:
        check_partition(total_tokens, cp_size, 0, "thd_cp_rank_order_to_sequence_order", inp.shape[0])
        return torch.zeros_like(inp).index_copy_(0, _partition(cu_seqlens, total_tokens, cp_size).view(-1).long(), inp)

    def thd_copy_valid_tokens_from_per_split_to_rank_local(self, out: Tensor, inp: Tensor, cu_seqlens_padded: Tensor, cu_seqlens: Tensor) -> None:
        check_moved(out, inp, cu_seqlens_padded, cu_seqlens)
        for name, ends in (("cu_seqlens_padded", cu_seqlens_padded), ("cu_seqlens", cu_seqlens)):
            check_cumulative(ends, out.shape[0], name)
        seg = segments(out.shape[0], cu_seqlens_padded, cu_seqlens)
        out.copy_(torch.where(_along(seg.inside, 0, out.dim()), inp, out))


def _whole(tokens: int, cu_seqlens: Tensor) -> Segments[Tensor]:
    """The sequences of a rank's tokens."""
    return segments(tokens, cu_seqlens)


def _check_each(cu_seqlens: Tensor, tokens: int) -> None:
    """Raise unless every sequence has at most ``tokens``."""
    check_lengths(cu_seqlens, "cu_seqlens", tokens)


def _halves(tokens: int, cu_seqlens: Tensor) -> Segments[Tensor]:
    """The sequences of tokens that are halves of theirs, one after the other."""
    return _whole(tokens, cu_seqlens // 2)


def _along(mask: Tensor, dim: int, dims: int) -> Tensor:
    """A mask of tokens, broadcastable to tensors of ``dims`` dimensions whose tokens are along ``dim``."""
    return mask.view(*(-1 if i == dim else 1 for i in range(dims)))


def _pick(lse: Tensor, token: Tensor) -> Tensor:
    """``lse [.., t]`` of the tokens ``token [n]`` or ``[b, 1, n]``; those out of range take some other's."""
    index = token.clamp(0, max(lse.shape[-1] - 1, 0))
    return lse.index_select(-1, index) if index.dim() == 1 else lse.gather(-1, index.long().expand(*lse.shape[:-1], -1))


def _of_tokens(lse: Tensor, seg: Segments[Tensor], shifted: tuple[Tensor, Tensor] | None, packed: bool) -> Tensor:
    """``lse`` of each token and head, ``[t, h]``. ``shifted``: the token of a step's own, and by how much it is earlier in its sequence."""
    last = max(lse.shape[-1] - 1, 0)
    if packed:
        token = seg.start + seg.position if shifted is None else shifted[0]
        return lse.index_select(1, token.clamp(0, last)).t()
    if not lse.shape[0]:  # of no sequence, and so of no token
        return lse.new_zeros(seg.position.shape[0], lse.shape[1])
    position = seg.position if shifted is None else seg.position - shifted[1]
    return lse[seg.sequence, :, position.clamp(0, last)]


def _weight(part: Tensor, whole: Tensor) -> Tensor:
    """``exp(part - whole)``, fp32 ``[t, h, 1]``: the share of the whole's denominator that is the part's; 0 where both are empty."""
    return torch.where(whole == -torch.inf, 0.0, torch.exp(part - whole)).float().unsqueeze(-1)


def _partition(cu_seqlens: Tensor, total: int, world: int, ranks: Tensor | None = None) -> Tensor:
    """The tokens of each rank, ``[ranks, total / world]``: a token's place among the rank's own, and how far its half of a sequence is moved."""
    check_cumulative(cu_seqlens, total, "cu_seqlens")
    ranks = torch.arange(world, device=cu_seqlens.device, dtype=torch.int32).view(-1, 1) if ranks is None else ranks
    begins, moved = _moved_halves(torch.cat((cu_seqlens.int(), cu_seqlens.new_full((1,), total, dtype=torch.int32))) // world, world, ranks)
    token = torch.arange(total // world, device=cu_seqlens.device, dtype=torch.int32)
    place = torch.searchsorted(begins, token, right=True, out_int32=True).sub_(1).clamp_(0)
    del token
    tokens = moved.index_select(1, place)
    del place
    return tokens.add_(torch.arange(total // world, device=cu_seqlens.device, dtype=torch.int32)).clamp_(0, max(total - 1, 0))


def _moved_halves(ends: Tensor, world: int, ranks: Tensor) -> tuple[Tensor, Tensor]:
    """Where each half of a sequence begins among a rank's tokens, ``[2 b]``, and how much later that is among all, ``[ranks, 2 b]``."""
    starts, half = ends[:-1], torch.diff(ends) // 2
    begins = torch.stack((starts, starts + half), -1).flatten()
    moved = torch.stack((half * ranks, half * (2 * (world - 1) - ranks)), -1)
    return begins, moved.add_((starts * (world - 1)).unsqueeze(-1)).flatten(1)
