"""The recipes of 8 bits and fewer, by the names that tests give them; ``bf16`` is none."""

from typing import Any

import transformer_engine.pytorch as te
from transformer_engine.common import recipe

RECIPES: dict[str, Any] = {
    "bf16": None,
    "delayed": recipe.DelayedScaling,
    "current": recipe.Float8CurrentScaling,
    "block": recipe.Float8BlockScaling,
    "mxfp8": recipe.MXFP8BlockScaling,
    "nvfp4": recipe.NVFP4BlockScaling,
}


def autocast(mode: str) -> Any:
    """What a step's forward pass runs in."""
    chosen = RECIPES[mode]
    return te.autocast(enabled=chosen is not None, recipe=chosen() if chosen else None)
