"""``autocast``: which recipe the modules called inside it follow."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

from fusible.errors import DTypeError, expected
from fusible.quantized import DelayedScaling, Recipe

__all__ = ["OUTSIDE", "autocast", "current_autocast"]

_local = threading.local()


class autocast:
    """``with autocast(recipe=DelayedScaling()): y = model(x)``: the modules called inside quantize as ``recipe`` says.

    ``enabled=False`` switches quantization off; ``recipe`` defaults to ``DelayedScaling()``. ``amax_reduction_group``: the processes over which
    delayed scaling takes the maximum of its amaxes, where ``recipe.reduce_amax``. Contexts nest, per thread. Raises ``DTypeError`` for anything but a
    recipe.
    """

    def __init__(self, enabled: bool = True, recipe: Recipe | None = None, *, amax_reduction_group: Any = None) -> None:
        if recipe is not None and not isinstance(recipe, Recipe):
            raise DTypeError(expected("a recipe", of="autocast", got=repr(recipe), do="give e.g. fusible.DelayedScaling() or Float8CurrentScaling()"))
        self.recipe: Recipe | None = (recipe if recipe is not None else DelayedScaling()) if enabled else None
        self.amax_reduction_group = amax_reduction_group
        self._former: list[autocast | None] = []

    def __enter__(self) -> autocast:
        self._former.append(getattr(_local, "current", None))
        _local.current = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _local.current = self._former.pop()


OUTSIDE = autocast(enabled=False)
"""What is in force outside of every ``autocast``."""


def current_autocast() -> autocast:
    """The innermost ``autocast`` of this thread."""
    return getattr(_local, "current", None) or OUTSIDE
