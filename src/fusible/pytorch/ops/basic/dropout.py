"""``Dropout``."""

from __future__ import annotations

from fusible import ops
from fusible.ops import Op
from fusible.pytorch.ops.op import BasicOperation

__all__ = ["Dropout"]


class Dropout(BasicOperation):
    """In training ``y = x * keep / (1 - p)``, where ``keep`` is 0 with probability ``p`` for each element, exactly; else ``y = x``."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.dropout_probability = p
        self.make_op()  # refuses what the operation refuses

    def make_op(self) -> Op:
        return ops.Dropout(self.dropout_probability)

    def extra_repr(self) -> str:
        return f"p={self.dropout_probability}"
