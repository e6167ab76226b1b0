"""The number formats that a model's weights can have, by the names that the command line has for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fusible.errors import ArgumentError, expected
from fusible.models.checkpoints import MXFP4WeightQuantizer
from fusible.pytorch import (
    CustomRecipe,
    Float8BlockScaling,
    Float8CurrentScaling,
    Linear,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    quantize_parameters,
)
from fusible.quantized import QuantizerRole
from fusible.tex.formats import FLOAT8, FLOAT8_BLOCKS, format_of

__all__ = ["WEIGHT_FORMATS", "format_of_recipe", "format_of_weight", "weight_recipe"]

_SIDE = 128
"""Of a weight of whole blocks in all formats."""


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


def format_of_weight(weight: Any) -> str:
    """What a quantized weight is held in: a name of ``WEIGHT_FORMATS``, or another where none of these is it."""
    form = format_of(weight)
    if form is FLOAT8_BLOCKS:
        return "block" if weight._is_2D_scaled else "blocks of 1x128"
    return "fp8" if form is FLOAT8 else form.name.removesuffix("_weight")


def format_of_recipe(recipe: Recipe) -> str:
    """What ``recipe`` holds weights in, as ``format_of_weight`` says it. Raises what ``quantize_parameters`` raises of a recipe."""
    layer = Linear(_SIDE, _SIDE, bias=False, param_dtype=torch.float32, device="cpu", weight_init_method=nn.init.zeros_)
    return format_of_weight(quantize_parameters(layer, recipe=recipe).weight)
