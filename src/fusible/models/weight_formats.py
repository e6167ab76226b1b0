"""The number formats that a model's weights can have, by the names that the command line has for them."""

from __future__ import annotations

from fusible.errors import ArgumentError, expected
from fusible.models.checkpoints import MXFP4WeightQuantizer
from fusible.pytorch import CustomRecipe, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling, Recipe
from fusible.quantized import QuantizerRole

__all__ = ["WEIGHT_FORMATS", "weight_recipe"]


def _mxfp4(role: QuantizerRole) -> MXFP4WeightQuantizer | None:
    return MXFP4WeightQuantizer() if role.tensor_type == "weight" else None


WEIGHT_FORMATS: dict[str, Recipe | None] = {
    "bf16": None,
    "fp8": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True),
    "mxfp4": CustomRecipe(qfactory=_mxfp4),
}
"""By name the recipe whose weights are meant; None for weights as they are in bf16."""


def weight_recipe(name: str) -> Recipe | None:
    """The recipe of a name. Raises ``ArgumentError`` for one that is not known."""
    if name not in WEIGHT_FORMATS:
        raise ArgumentError(expected(f"one of {', '.join(WEIGHT_FORMATS)}", of="--format", got=repr(name), do="name one of these"))
    return WEIGHT_FORMATS[name]
