"""The number formats that a model's weights can be held in, by the names that the command line has for them."""

from __future__ import annotations

from fusible.errors import ArgumentError, expected
from fusible.models.checkpoints import MXFP4WeightQuantizer
from fusible.pytorch import CustomRecipe, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling, Recipe
from fusible.quantized import QuantizerRole

__all__ = ["HELD_FORMATS", "held_format"]


def _mxfp4(role: QuantizerRole) -> MXFP4WeightQuantizer | None:
    return MXFP4WeightQuantizer() if role.tensor_type == "weight" else None


HELD_FORMATS: dict[str, Recipe | None] = {
    "bf16": None,
    "fp8": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True),
    "mxfp4": CustomRecipe(qfactory=_mxfp4),
}
"""By name the recipe whose weights are meant; None for weights as they are in bf16."""


def held_format(name: str) -> Recipe | None:
    """The recipe of a name. Raises ``ArgumentError`` for one that is not known."""
    if name not in HELD_FORMATS:
        raise ArgumentError(expected(f"one of {', '.join(HELD_FORMATS)}", of="--format", got=repr(name), do="name one of these"))
    return HELD_FORMATS[name]
