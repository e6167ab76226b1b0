"""``transformer_engine.pytorch.triton.grouped_dbias_dscales``: the gradients of each group's bias, and of the factors of its rows."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

__all__ = ["compute_grouped_dbias", "compute_grouped_dbias_dscales"]


def compute_grouped_dbias(dy: Tensor, offsets: Tensor, num_groups: int, dbias: Tensor | None = None) -> Tensor:
    """``dbias[g] += sum of dy[i]`` over the rows ``offsets[g]`` to ``offsets[g + 1]``, fp32 ``[groups, hidden]``: new, or the one given."""
    dbias = torch.zeros(num_groups, dy.shape[1], dtype=torch.float32, device=dy.device) if dbias is None else dbias
    for i, (start, end) in enumerate(pairwise(offsets[: num_groups + 1].tolist())):
        dbias[i] += dy[start:end].sum(0, dtype=torch.float32)
    return dbias


def compute_grouped_dbias_dscales(
    dy: Tensor, scales: Tensor, bias: Tensor, offsets: Tensor, dbias: Tensor | None = None, dscales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``dbias[g] += sum of dy[i] * scales[i]`` and ``dscales[i] += sum of dy[i] * bias[g]``, fp32 ``[groups, hidden]`` and ``[rows]``: new, or those
    given."""
    dbias = torch.zeros(bias.shape, dtype=torch.float32, device=dy.device) if dbias is None else dbias
    dscales = torch.zeros(len(dy), dtype=torch.float32, device=dy.device) if dscales is None else dscales
    for i, (start, end) in enumerate(pairwise(offsets[: len(bias) + 1].tolist())):
        rows = dy[start:end].float()
        dbias[i] += scales[start:end].float() @ rows
        dscales[start:end] += rows @ bias[i].float()
    return dbias, dscales
