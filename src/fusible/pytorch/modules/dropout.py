"""``Dropout``."""

from __future__ import annotations

from torch import nn

from fusible import ops
from fusible.pytorch.modules.base import BaseModule

__all__ = ["Dropout"]


class Dropout(BaseModule):
    """While training, each element is zero with probability ``p``, else divided by ``1 - p``. Seeded by torch's default generator."""

    def __init__(self, p: float = 0.5) -> None:
        nn.Module.__init__(self)
        self.p = p
        super().__init__(ops.Dropout(p))

    def extra_repr(self) -> str:
        return f"p={self.p}"
