"""What a conversion did: of each layer that it looked at, whether it was converted, and why not."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from fusible.models.convert.scaled_products import register_anew

__all__ = ["Layer", "Report"]

Outcome = Literal["converted", "kept", "left"]


@dataclass(frozen=True)
class Layer:
    """One layer. ``kind``: what it is, as "linear" or "norm"; ``text``: what it was converted to, or why it was not."""

    name: str
    kind: str
    outcome: Outcome
    text: str


@dataclass(frozen=True)
class Report:
    """What ``convert`` did. ``recipe``: as text. ``layers``: all that it looked at, in the model's order. In print, layers that are alike are one
    line."""

    recipe: str
    layers: tuple[Layer, ...]

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        register_anew()  # for a model of which nothing but the attention is Fusible's

    @property
    def converted(self) -> tuple[Layer, ...]:
        """The layers that compute by Fusible now."""
        return self._of("converted")

    @property
    def kept(self) -> tuple[Layer, ...]:
        """Linear layers that stay in high precision on purpose."""
        return self._of("kept")

    @property
    def left(self) -> tuple[Layer, ...]:
        """The layers that could not be converted, or were not asked for."""
        return self._of("left")

    def with_left(self, reasons: Mapping[str, str]) -> Report:
        """The same, but that the layers of these names are left, each for a reason."""
        changed = (replace(layer, outcome="left", text=reasons[layer.name]) if layer.name in reasons else layer for layer in self.layers)
        return replace(self, layers=tuple(changed)) if reasons else self

    def _of(self, outcome: Outcome) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if layer.outcome == outcome)

    def __str__(self) -> str:
        counts = Counter(layer.kind for layer in self.converted)
        found = ", ".join(f"{count} {kind}{'s' * (count > 1)}" for kind, count in counts.items()) or "nothing"
        lines = [f"converted to Fusible: {found}; recipe: {self.recipe}"]
        for title, layers in (("converted", self.converted), ("kept in high precision", self.kept), ("left as they are", self.left)):
            if layers:
                lines += ["", title, *_rows(layers)]
        return "\n".join(lines)


def _rows(layers: Iterable[Layer]) -> list[str]:
    """One line for layers whose names differ in numbers alone."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for layer in layers:
        alike.setdefault((re.sub(r"\d+", "*", layer.name), layer.kind, layer.text), []).append(layer.name)
    rows = [(name if len(names) > 1 else names[0], f"{len(names)}x", kind, text) for (name, kind, text), names in alike.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return ["  " + "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]).rstrip() for row in rows]
