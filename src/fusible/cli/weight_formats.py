"""Options that say what the weights of a directory are to be held in."""

from __future__ import annotations

import sys
from pathlib import Path

from fusible.models.pretrained import stored_formats_in
from fusible.models.weight_formats import weight_recipe
from fusible.pytorch import Recipe

__all__ = ["recipe_of_format"]


def recipe_of_format(folder: str | Path, name: str | None, option: str = "--format") -> Recipe | None:
    """The recipe whose weights the format ``name`` means; None for weights as ``folder`` has them.

    Raises ``ArgumentError`` for an unknown format, and for one that no weight of ``folder`` would take, as all are quantized to another. Where some
    are, standard error says that these stay.
    """
    if name is None:
        return None
    recipe, stored = weight_recipe(name), stored_formats_in(folder)
    stored.check(name, of=option, do="leave it out, or name the directory of the model that was quantized")
    if stored.others(name):
        print(f"{option} {name}: {stored.others(name)} of {stored.total} weights stay as the directory has them, in {stored.names}.", file=sys.stderr)
    return recipe
