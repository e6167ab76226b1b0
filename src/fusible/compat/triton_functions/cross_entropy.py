"""``transformer_engine.pytorch.triton.cross_entropy``: cross entropy of logits whose vocabulary may be spread over processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fusible import tex
from fusible.pytorch.cross_entropy import gradients, in_blocks, merged, statistics

__all__ = ["cross_entropy_backward", "cross_entropy_forward"]


def cross_entropy_forward(
    _input: Tensor,
    target: Tensor,
    label_smoothing: float,
    reduce_loss: bool,
    dist_process_group: Any,
    ignore_idx: int,
    overwrite_input: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, int, int]:
    """``loss = (1 - s) * (log Z - x[target]) + s * (log Z - mean x)`` of logits ``[b, s, v]``, fp32 ``[b, s]``, 0 where the target is ``ignore_idx``.

    ``Z = sum of exp x``, over the vocabulary of all processes, ``s = label_smoothing``. With ``reduce_loss`` the mean over the targets that count,
    ``[1]``. Returns ``loss, saved_input, stats, target, count, rank, world_size``: ``saved_input`` is the input, or a copy that the way back may
    write unless ``overwrite_input``; ``stats`` are each row's ``max x`` and ``Z / exp(max x)``, fp32 ``[rows, 2]``; ``count`` is int64 ``[1]``, or
    None.
    """
    rank = 0 if dist_process_group is None else dist.get_rank(dist_process_group)
    world = 1 if dist_process_group is None else dist.get_world_size(dist_process_group)
    target = target.contiguous()
    saved = _input if overwrite_input else _input.clone(memory_format=torch.contiguous_format)
    rows, wanted = _input.reshape(-1, _input.shape[-1]), target.view(-1)
    vocabulary, local = rows.shape[1], wanted - rank * rows.shape[1]
    parts = [statistics(x, y) for x, y in zip(in_blocks(rows), in_blocks(local, vocabulary), strict=True)]
    found = torch.cat(parts)
    if world > 1:
        found = merged(tex.prim.all_gather(found, dist_process_group).view(world, *found.shape))
    largest, sums, chosen, totals = found.unbind(1)
    logarithm = largest + sums.log()
    loss = logarithm - chosen
    if label_smoothing > 0:
        loss = (1 - label_smoothing) * loss + label_smoothing * (logarithm - totals / (vocabulary * world))
    counted = wanted != ignore_idx
    loss, stats, count = torch.where(counted, loss, 0.0), torch.stack([largest, sums], 1), None
    if reduce_loss:
        count = counted.sum().clamp_(min=1).view(1)
        return loss.sum() / count, saved, stats, target, count, rank, world
    return loss.view(_input.shape[:-1]), saved, stats, target, count, rank, world


def cross_entropy_backward(
    saved_input: Tensor,
    stats: Tensor,
    target: Tensor,
    n_non_ignore: Tensor | None,
    grad_output: Tensor,
    label_smoothing: float,
    reduce_loss: bool,
    rank: int,
    world_size: int,
    ignore_idx: int,
) -> Tensor:
    """``(softmax(x) - (1 - s) * [target] - s / v) * grad_output`` in fp32, rounded once into ``saved_input``, which is returned."""
    rows, wanted = saved_input.reshape(-1, saved_input.shape[-1]), target.view(-1)
    vocabulary = rows.shape[1]
    grad = grad_output.reshape(-1).float()
    if reduce_loss:
        assert n_non_ignore is not None
        grad = (grad / n_non_ignore).expand(len(rows))
    grad = torch.where(wanted == ignore_idx, 0.0, grad)
    share = label_smoothing / (vocabulary * world_size)
    of_rows = (in_blocks(each, vocabulary) for each in (*stats.unbind(1), wanted - rank * vocabulary, grad, wanted == ignore_idx))
    for x, largest, sums, y, g, ignored in zip(in_blocks(rows), *of_rows, strict=True):
        x.copy_(gradients(x, largest, sums, y, label_smoothing, share).mul_(g[:, None]).masked_fill_(ignored[:, None], 0.0))
    if rows.data_ptr() != saved_input.data_ptr():
        saved_input.copy_(rows.view(saved_input.shape))
    return saved_input
