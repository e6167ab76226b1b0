"""``Dropout``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fusible import ops
from fusible.nvte import te_to_torch_dtype
from fusible.ops import Op
from fusible.pytorch.ops.op import BasicOperation, OperationContext
from fusible.quantized import Quantizer

__all__ = ["Dropout"]


class Dropout(BasicOperation):
    """In training ``y = x * keep / (1 - p)``, where ``keep`` is 0 with probability ``p`` for each element, exactly; else ``y = x``."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.dropout_probability = p
        self.make_op()  # refuses what the operation refuses

    def make_op(self) -> Op:
        return ops.Dropout(self.dropout_probability)

    def from_theirs(self, op: Op, saved: Sequence[Any] | None, context: OperationContext) -> Mapping[str, Any] | None:
        assert isinstance(op, ops.Dropout)
        if not op.drops:
            return {}
        bits = getattr(context, "impl", None) == "fused"  # whose shape nothing tells
        if bits or saved is None or len(saved) != 1 or not isinstance(saved[0], torch.Tensor):
            return None
        return {"mask": (saved[0] != 0).to(torch.uint8)}

    def as_theirs(self, op: Op, kept: Mapping[str, Any]) -> tuple[Any, ...]:
        mask = kept.get("mask")
        return (None if mask is None else mask.to(te_to_torch_dtype(op.activation)) / (1 - self.dropout_probability),)

    def told(self, op: Op, kept: Mapping[str, Any], lent: Quantizer | None) -> dict[str, Any]:
        own = {"impl": "unfused" if "mask" in kept else "evaluation", "dropout_probability": self.dropout_probability}
        return {**super().told(op, kept, lent), **own}

    def extra_repr(self) -> str:
        return f"p={self.dropout_probability}"
