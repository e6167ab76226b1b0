"""A table of vectors."""

from __future__ import annotations

from typing import Any

from fusible.lazy import dtypes
from fusible.lazy.frontend import Tensor
from fusible.lazy.locate import shows_user
from fusible.lazy.modules.checks import check_sizes
from fusible.lazy.modules.module import Module
from fusible.lazy.modules.parameter import DefaultParameter
from fusible.lazy.ops.gather import gather

__all__ = ["Embedding"]


class Embedding(Module):
    """``weight[x]``: the row of ``weight`` ``[num_embeddings, embedding_dim]`` for every index in ``x``.

    Indices are int32, int64 or uint32. One out of bounds reads the nearest row, and a negative one counts from the end, as in ``gather``.
    """

    weight: Tensor

    @shows_user
    def __init__(self, num_embeddings: int, embedding_dim: int, dtype: dtypes.dtype = dtypes.float32) -> None:
        check_sizes("Embedding", num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        self.dtype = dtypes.check_dtype(dtype)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.weight = DefaultParameter((num_embeddings, embedding_dim), dtype)

    def forward(self, x: Any) -> Tensor:
        """``[...]`` to ``[..., embedding_dim]``."""
        return gather(self.weight, 0, x)
