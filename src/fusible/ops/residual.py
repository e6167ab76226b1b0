"""The two ends of a residual connection: an extra tensor named ``residual``. Nothing is stored on the ops."""

from __future__ import annotations

from typing import Unpack

from fusible.ops.extra import AddExtra, MakeExtra
from fusible.ops.op import OpTypes

__all__ = ["ResidualBegin", "ResidualEnd"]


class ResidualBegin(MakeExtra):
    """``y = x``, and ``x`` goes around as ``residual``; ``dx = dy + dresidual``."""

    def __init__(self, **types: Unpack[OpTypes]) -> None:
        super().__init__("residual", **types)

    def extra_repr(self) -> str:
        return ""


class ResidualEnd(AddExtra):
    """``y = x + residual``; ``dx = dresidual = dy``."""

    def __init__(self, **types: Unpack[OpTypes]) -> None:
        super().__init__("residual", **types)

    def extra_repr(self) -> str:
        return ""
