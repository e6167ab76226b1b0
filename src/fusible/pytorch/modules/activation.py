"""The activations of ``tex.activations`` as modules; each is the op of its name."""

from __future__ import annotations

from torch import nn

from fusible import ops
from fusible.pytorch.modules.base import BaseModule
from fusible.tex.activations import ACTIVATIONS, Activation


def _made(row: Activation) -> type[BaseModule]:
    op = getattr(ops, row.title)

    def __init__(self: BaseModule) -> None:
        nn.Module.__init__(self)
        BaseModule.__init__(self, op())

    halves = "\n\nOf the two halves ``[a | b]`` of the last dimension, which it halves." if row.gated else ""
    return type(row.title, (BaseModule,), {"__module__": __name__, "__doc__": row.doc + halves, "__init__": __init__})


_classes = {row.title: _made(row) for row in ACTIVATIONS if not row.options}
globals().update(_classes)

__all__ = sorted(_classes)  # pyright: ignore[reportUnsupportedDunderAll]
