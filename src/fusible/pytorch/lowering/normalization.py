"""Norms: fp32 inside, one rounding."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from fusible import ops
from fusible.pytorch.lowering.pointwise import wide
from fusible.pytorch.lowering.registry import Args, lowers, written

__all__: list[str] = []


def _gamma(weight: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    return wide(weight) + 1 if zero_centered else wide(weight)


@lowers(ops.LayerNorm)
def _layer_norm(op: ops.LayerNorm, x: torch.Tensor, args: Args) -> torch.Tensor:
    y = F.layer_norm(wide(x), op.over, _gamma(args["weight"], op.zero_centered_gamma), wide(args["bias"]), op.eps)
    return written(y, op.y_dtype)


@lowers(ops.RMSNorm)
def _rms_norm(op: ops.RMSNorm, x: torch.Tensor, args: Args) -> torch.Tensor:
    return written(F.rms_norm(wide(x), op.over, _gamma(args["weight"], op.zero_centered_gamma), op.eps), op.y_dtype)


@lowers(ops.L2Normalization)
def _l2_normalization(op: ops.L2Normalization, x: torch.Tensor, args: Args) -> torch.Tensor:
    x = wide(x)
    return written(x * torch.rsqrt(x.square().sum(-1, keepdim=True) + op.eps), op.y_dtype)


@lowers(ops.QKNorm)
def _qk_norm(op: ops.QKNorm, x: torch.Tensor, args: Args) -> torch.Tensor:
    counts, width = (op.heads, op.groups, op.groups), op.head_width
    q, k, v = x.split([count * width for count in counts], -1)
    found = [
        F.rms_norm(wide(heads).unflatten(-1, (count, width)), (width,), _gamma(args[name], op.zero_centered_gamma), op.eps).flatten(-2).to(x.dtype)
        for heads, count, name in zip((q, k), counts, ("q_weight", "k_weight"), strict=False)
    ]
    return written(torch.cat([*found, v], -1), op.y_dtype)
