"""``ParallelResidual``: branches side by side over one norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fusible.pytorch import KVCache, Sequential
from fusible.pytorch.engine.chain import ChainCall, ChainPart

__all__ = ["ParallelResidual"]


class ParallelResidual(nn.Module, ChainPart):
    """``y = x + sum of branch(norm(x))``: attention and MLP that do not wait for one another (Wang & Komatsuzaki 2021, GPT-J).

    ``x [tokens, hidden]`` or ``[batch, seq, hidden]``, as the modules of ``fusible.pytorch`` take it. Each branch is a pipeline of its own.
    """

    reads_whole_parts = True

    def __init__(self, norm: nn.Module, *branches: Sequential) -> None:
        super().__init__()
        self.norm = norm
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor, seq_lens: torch.Tensor | None = None, cache: KVCache | None = None) -> torch.Tensor:
        normal = self.norm(x, seq_lens)
        for branch in self.branches:
            x = x + branch(normal, seq_lens, cache)
        return x

    def in_chain(self, x: Any, extra: Sequence[torch.Tensor], call: ChainCall) -> Any:
        return self(x, call.seq_lens, call.cache)
