"""The activations, of ``tex.activations``. Gated ones take ``[tokens, 2 H]`` and give ``[tokens, H]``: the first half activated, times the second."""

from __future__ import annotations

from abc import ABCMeta
from typing import Any

from fusible import nvte
from fusible.ops.activation_base import Activation
from fusible.ops.op import Op
from fusible.ops.scaled_activation import ScaledActivation
from fusible.tex.activations import ACTIVATIONS, ELEMENTWISE


def _made(title: str, base: type[Op], doc: str, name: str, gradient: str, **declared: Any) -> tuple[str, type[Op]]:
    """The class of an op of two words."""
    words = {"word": staticmethod(getattr(nvte, name)), "dword": staticmethod(getattr(nvte, gradient))}
    return title, ABCMeta(title, (base,), {"__module__": __name__, "__doc__": doc, **words, **declared})


_plain = [_made(row.title, Activation, row.doc, row.name, row.gradient, gated=row.gated) for row in ACTIVATIONS if not row.in_blocks]
_scaled = [
    _made(row.scaled, ScaledActivation, f"``{row.name}(x) * s``, of ``{row.title}``.", f"scaled_{row.name}", f"scaled_{row.gradient}")
    for row in ELEMENTWISE
    if row.scaled
]
globals().update([*_plain, *_scaled])

__all__ = sorted(["Activation", *dict(_plain), *dict(_scaled)])  # pyright: ignore[reportUnsupportedDunderAll]
