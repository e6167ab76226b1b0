"""``transformer_engine.pytorch.triton.pad``: scales padded to whole tiles."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

__all__ = ["pad_columnwise_scale_inv"]


def pad_columnwise_scale_inv(inp: Tensor) -> Tensor:
    """A matrix with zeros after it, up to multiples of 128 rows and 4 columns."""
    rows, columns = inp.shape
    return pad(inp, (0, -columns % 4, 0, -rows % 128))
