"""Mixtures of experts: every expert computes every token, and a token takes the sum of its own.

How many tokens an expert gets hangs on values, which a graph of fixed shapes cannot; and each product stays one that every runtime has. It takes
``experts / top_k`` times the arithmetic of sorted tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from fusible import ops
from fusible.errors import ArgumentError, expected
from fusible.pytorch.lowering.pointwise import wide
from fusible.pytorch.lowering.registry import Args, lowers, written

__all__: list[str] = []


@lowers(ops.RouteTokens)
def _route(op: ops.RouteTokens, x: torch.Tensor, args: Args) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    rows = written(x, op.weight_dtype)
    logits = wide(F.linear(rows, args["weight"].to(rows.dtype)))
    if op.score_function == "softmax":
        best, experts = _among(op, logits).topk(op.top_k, -1)
        probs = torch.softmax(best, -1) if op.normalized else torch.softmax(logits, -1).gather(-1, experts)
    else:
        scores = torch.sigmoid(logits)
        experts = _among(op, scores if op.expert_bias is None else scores + wide(args["expert_bias"])).topk(op.top_k, -1).indices
        probs = scores.gather(-1, experts)
        probs = probs / (probs.sum(-1, keepdim=True) + 1e-20) if op.normalized else probs
    probs = probs if op.scaling_factor is None else probs * op.scaling_factor
    return x, {"experts": experts, "probs": probs}


def _among(op: ops.RouteTokens, scores: torch.Tensor) -> torch.Tensor:
    """``scores``, with -inf for the experts of groups that are not chosen."""
    if op.groups is None or op.top_groups is None:
        return scores
    groups = scores.unflatten(-1, (op.groups, -1))
    strength = groups.topk(op.top_k // op.top_groups, -1).values.sum(-1)
    chosen = torch.zeros_like(strength).scatter(-1, strength.topk(op.top_groups, -1).indices, 1.0) > 0
    return torch.where(chosen.unsqueeze(-1), groups, -torch.inf).flatten(-2)


@lowers(ops.DispatchTokens)
def _dispatch(op: ops.DispatchTokens, x: torch.Tensor, args: Args) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """``y [experts, *tokens, K]``; in the place of ``row_map`` and sizes, the experts of each token and their number."""
    every = x.unsqueeze(0).expand(op.groups, *x.shape)
    return every, {"row_map": args["experts"], **dict.fromkeys(op.sizes, args["experts"])}


@lowers(ops.GroupedMMT)
def _grouped_product(op: Any, x: torch.Tensor, args: Args) -> torch.Tensor:
    if op.scale_bias:
        do = "export it without scale_bias"
        raise ArgumentError(expected("experts whose biases have no scales", of="a model to export", got=repr(op), do=do))
    weight, *biases = (_stacked([args[name] for name in names]) for names in (op.weight_names, op.bias_names) if names)
    leading = x.shape[1:-1]
    y = x.flatten(1, -2) @ weight.to(x.dtype).transpose(1, 2)
    y = y + biases[0].to(x.dtype).unsqueeze(1) if biases else y
    return written(y.unflatten(1, leading) if len(leading) > 1 else y, op.y_dtype)


def _stacked(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.stack(tensors)


@lowers(ops.CombineTokens)
def _combine(op: ops.CombineTokens, x: torch.Tensor, args: Args) -> torch.Tensor:
    experts, probs = args["row_map"], args["probs"]
    numbers = torch.arange(x.shape[0], device=x.device)
    shares = torch.where(experts.unsqueeze(-1) == numbers, probs.unsqueeze(-1), 0.0).sum(-2)  # [*tokens, experts]
    return written((wide(x) * shares.movedim(-1, 0).unsqueeze(-1)).sum(0), op.y_dtype)
