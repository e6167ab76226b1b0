"""``Dropout``."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from fusible import ops
from fusible.ops import Op
from fusible.pytorch.modules.options import ModuleWithOptions

__all__ = ["Dropout"]


class Dropout(ModuleWithOptions):
    """While training, each element is zero with probability ``p``, else divided by ``1 - p``. Seeded by torch's default generator."""

    def __init__(self, p: float = 0.5) -> None:
        nn.Module.__init__(self)
        self.p = p
        super().__init__(*self.make_ops())

    def make_ops(self) -> Iterator[Op]:
        yield ops.Dropout(self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}"
