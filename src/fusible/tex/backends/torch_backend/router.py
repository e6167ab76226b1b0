"""The router's arithmetic: scores of experts, the best of them, and the gradient of both. Everything is fp32 up to the store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fusible.tex.calls.moe import Routing
from fusible.tex.enums import NVTERoutingMapFormat

__all__ = ["Chosen", "choose", "count_margins", "marked", "routing_map", "score_gradient", "scores_of_all"]

_EPSILON = 1e-20
_SET = 4


@dataclass(frozen=True)
class _Score:
    """An elementwise score: ``score(logits)``, what the backward reads of it (``saved``), and both of its steps back from there."""

    score: Callable[[Tensor], Tensor]
    saved: Callable[[Tensor, Tensor], Tensor]
    restore: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor, Tensor], Tensor]


def _sqrtsoftplus(x: Tensor) -> Tensor:
    return F.softplus(x).sqrt_()


def _sqrtsoftplus_gradient(g: Tensor, x: Tensor, y: Tensor) -> Tensor:
    # Far below 0 both factors underflow, and their quotient with them.
    return torch.where(y > 0, torch.sigmoid(x).div_(y).mul_(0.5), 0.0).mul_(g)


_ELEMENTWISE = {
    "sigmoid": _Score(torch.sigmoid, lambda x, y: y, lambda saved: saved, lambda g, saved, y: torch.ops.aten.sigmoid_backward.default(g, y)),
    "sqrtsoftplus": _Score(_sqrtsoftplus, lambda x, y: x, _sqrtsoftplus, _sqrtsoftplus_gradient),
}


@dataclass(frozen=True)
class Chosen:
    """The experts of each token, the best first (int64 ``[*leading, topk]``), their weights, and what was computed on the way."""

    indices: Tensor
    weights: Tensor
    intermediate: Tensor
    scores: Tensor


def _best(scores: Tensor, count: int) -> Tensor:
    """The indices of the ``count`` largest fp32 values of each row, descending; of equal ones the lowest index first.

    On the host, ``topk`` finds them, and only rows in which it met equal values are sorted by both. A device is not asked which rows those are.
    """
    if scores.device.type != "cpu":
        return _best_of_all(scores, count)
    values, found = _topk(scores, min(count + 1, scores.shape[-1]))
    unsure = (values[..., 1:] < values[..., :-1]).logical_not_().any(-1)  # equal, or NaN
    found = found[..., :count]
    if unsure.any():
        found[unsure] = _best_of_all(scores[unsure], count)
    return found


def _best_of_all(scores: Tensor, count: int) -> Tensor:
    """``_best`` of rows with equal values: one integer sorts by both, the value's bits, made ascending as integers, above the inverted index."""
    bits = scores.add(0.0).view(torch.int32)  # -0 becomes 0
    bits.bitwise_xor_(bits.bitwise_right_shift(31).bitwise_and_(0x7FFFFFFF))
    last = scores.shape[-1] - 1
    keys = bits.to(torch.int64).bitwise_left_shift_(32).bitwise_or_(torch.arange(last, -1, -1, device=scores.device))
    return _topk(keys, count)[0].bitwise_and_(0xFFFFFFFF).neg_().add_(last)


def _topk(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest values of each row, descending, and where they are; of equal ones any.

    Sets of columns, ``width`` apart, whose largest is among the ``count`` largest hold that many values which nothing outside exceeds: most columns
    are never sorted.
    """
    if x.shape[-1] % _SET or x.shape[-1] < 2 * _SET * count:
        return x.topk(count, dim=-1)
    width = x.shape[-1] // _SET
    sets = x.unflatten(-1, (_SET, width))
    found = sets.amax(-2).topk(count, dim=-1, sorted=False).indices
    candidates = sets.gather(-1, found.unsqueeze(-2).expand(*found.shape[:-1], _SET, count)).flatten(-2)
    values, place = candidates.topk(count, dim=-1)
    return values, found.gather(-1, place % count).add_(place // count, alpha=width)


def _best_in_groups(scores: Tensor, routing: Routing) -> Tensor:
    """``_best`` among the ``group_topk`` groups whose best experts sum highest."""
    grouped = scores.unflatten(-1, (routing.groups, -1))
    strength = grouped.topk(routing.topk // routing.group_topk, dim=-1).values.sum(-1)
    kept, size = _best(strength, routing.group_topk).sort(-1).values, grouped.shape[-1]
    found = _best(grouped.gather(-2, kept.unsqueeze(-1).expand(*kept.shape, size)).flatten(-2), routing.topk)
    return kept.gather(-1, found // size).mul_(size).add_(found % size)


def choose(logits: Tensor, routing: Routing, expert_bias: Tensor | None, pre_softmax: bool) -> Chosen:
    """The router of fp32 ``logits``, up to ``scaling`` and the store."""
    entry = _ELEMENTWISE.get(routing.score)
    scores = entry.score(logits) if entry else torch.softmax(logits, -1) if pre_softmax else logits
    biased = scores if expert_bias is None else scores + expert_bias.float()
    indices = _best_in_groups(biased, routing) if routing.groups else _best(biased, routing.topk)
    weights = scores.gather(-1, indices)
    if entry is not None:
        intermediate = entry.saved(logits, scores)
        if routing.topk > 1:
            weights = weights / weights.sum(-1, keepdim=True).add_(_EPSILON)
    elif pre_softmax:
        intermediate = scores
    else:
        weights = torch.softmax(weights, -1)
        intermediate = torch.full_like(logits, -torch.inf).scatter_(-1, indices, weights)
    return Chosen(indices, weights, intermediate, biased)


def scores_of_all(logits: Tensor, routing: Routing) -> Chosen:
    """The scores of every expert, normalised, and the best of them."""
    entry = _ELEMENTWISE.get(routing.score)
    if entry is None:
        weights = intermediate = torch.softmax(logits, -1)
    else:
        scores = entry.score(logits)
        intermediate = entry.saved(logits, scores)
        weights = scores / scores.sum(-1, keepdim=True).add_(_EPSILON)
    return Chosen(_best(weights, routing.topk), weights, intermediate, weights)


def routing_map(indices: Tensor, routing: Routing) -> Tensor:
    """The routing map of the chosen experts."""
    leading = indices.shape[:-1]
    if routing.map_format == NVTERoutingMapFormat.BYTEMAP:
        return torch.zeros((*leading, routing.experts), dtype=torch.bool, device=indices.device).scatter_(-1, indices, True)
    packed = torch.zeros((*leading, (routing.experts + 7) // 8), dtype=torch.int32, device=indices.device)
    bits = torch.ones_like(indices, dtype=torch.int32).bitwise_left_shift_((indices & 7).to(torch.int32))
    return packed.scatter_add_(-1, indices >> 3, bits).to(torch.uint8)


def marked(map_: Tensor, routing: Routing, dense: bool) -> Tensor:
    """bool ``[*leading, experts]`` of a routing map, or of the chosen experts where ``dense``."""
    if dense:
        return routing_map(map_.to(torch.int64), routing._replace(map_format=int(NVTERoutingMapFormat.BYTEMAP)))
    if routing.map_format == NVTERoutingMapFormat.BYTEMAP:
        return map_.bool()
    bits = map_.unsqueeze(-1).bitwise_right_shift(torch.arange(8, dtype=torch.uint8, device=map_.device)).bitwise_and_(1)
    return bits.flatten(-2)[..., : routing.experts].bool()


def _normalised_gradient(g: Tensor, values: Tensor, chosen: Tensor | None) -> Tensor:
    """The gradient of ``values / (sum(values) + epsilon)`` over the chosen ones of each row; ``g`` is 0 outside, and so is the result."""
    total = (values if chosen is None else torch.where(chosen, values, 0.0)).sum(-1, keepdim=True).add_(_EPSILON)
    result = g.sub((g * values).sum(-1, keepdim=True).div_(total)).div_(total)
    return result if chosen is None else result.masked_fill_(~chosen, 0.0)


def _softmax_gradient(g: Tensor, y: Tensor) -> Tensor:
    return g.sub((g * y).sum(-1, keepdim=True)).mul_(y)


def score_gradient(g: Tensor, saved: Tensor, routing: Routing, chosen: Tensor | None, *, pre_softmax: bool, normalise: bool) -> Tensor:
    """The gradient for the logits of fp32 ``g``; ``chosen`` marks the experts that had a weight (None: all)."""
    if chosen is not None:
        g = torch.where(chosen, g, 0.0)
    entry = _ELEMENTWISE.get(routing.score)
    if entry is None:
        return _softmax_gradient(g, saved if chosen is None or pre_softmax else torch.where(chosen, saved, 0.0))
    values = entry.restore(saved)
    if normalise:
        g = _normalised_gradient(g, values, chosen)
    return entry.gradient(g, saved, values)


def count_margins(margins: Tensor, histogram: Tensor, bounds: Tensor) -> None:
    """Count each expert's values ``margins [*leading, experts]`` into ``histogram [experts, bins]``, uniform between ``bounds``."""
    experts, bins = histogram.shape
    lower, upper = bounds.unbind()
    place = margins.sub(lower).mul_(bins).div_(upper - lower).floor_().clamp_(0, bins - 1).nan_to_num_(0.0).to(torch.int64)
    place = place.add_(torch.arange(experts, device=place.device), alpha=bins).reshape(-1)
    histogram.view(-1).index_add_(0, place, torch.ones(1, dtype=torch.int32, device=place.device).expand(place.numel()))
