"""What a custom quantizer's ``qgemm`` is told of the matrix product that it computes. Names are those of ``custom_recipes.gemm``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

__all__ = ["GEMMParams", "GEMMType"]


class GEMMType(Enum):
    """The product of a linear layer: ``y = x @ w.T``, ``dx = dy @ w``, or ``dw = dy.T @ x``."""

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


@dataclass(frozen=True)
class GEMMParams:
    """``out_dtype``: the dtype of the result. ``use_split_accumulator``: accumulate in full fp32."""

    out_dtype: torch.dtype | None = None
    use_split_accumulator: bool = True
