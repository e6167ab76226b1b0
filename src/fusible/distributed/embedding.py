"""``WholeEmbedding``: an embedding that all processes have alike."""

from __future__ import annotations

import torch
from torch import nn

from fusible.pytorch.engine.shares import Share, localized

__all__ = ["WholeEmbedding"]


class WholeEmbedding(nn.Embedding):
    """``nn.Embedding`` whose weight is a ``DTensor`` that every process has whole; ``share``: what becomes of its gradient."""

    share: Share

    @classmethod
    def take(cls, module: nn.Embedding, share: Share) -> None:
        """Make ``module`` one of this class."""
        module.__class__ = cls
        module.share = share  # type: ignore[assignment]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        (weight,) = localized([(self, self.share)])
        options = self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
        return nn.functional.embedding(input, weight, *options)
