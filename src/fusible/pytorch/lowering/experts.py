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
    logits = wide(F.linear(x, args["weight"].to(x.dtype)))
    best, experts = logits.topk(op.top_k, -1)
    probs = torch.softmax(best, -1) if op.normalized else torch.softmax(logits, -1).gather(-1, experts)
    return x, {"experts": experts, "probs": probs}


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
