"""What a tensor is to its layer, and how a recipe quantizes it by that. Names are those of ``transformer_engine.pytorch.quantization``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from fusible.errors import ArgumentError, DTypeError, expected
from fusible.quantized.block_quantizer import Float8BlockQuantizer, MXFP8Quantizer, NVFP4Quantizer
from fusible.quantized.block_recipes import Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling
from fusible.quantized.formats import Format
from fusible.quantized.options import Options
from fusible.quantized.quantizer import Float8CurrentScalingQuantizer, Quantizer
from fusible.quantized.recipe import CustomRecipe, DelayedScaling, Float8CurrentScaling, Recipe
from fusible.tex import DType

__all__ = [
    "DelayedScalingRequest",
    "QuantizerRequest",
    "QuantizerRole",
    "TENSOR_TYPES",
    "get_align_size_for_quantization",
    "quantizer_for_role",
]

TENSOR_TYPES = ("input", "weight", "output", "grad_output", "grad_input")
"""The tensors of a matrix product, which every recipe knows."""


@dataclass(frozen=True, repr=False)
class QuantizerRole(Options):
    """What a tensor is to its layer. An empty field says nothing.

    ``module_type``: the layer's kind, as ``"linear"``, ``"grouped_linear"``, ``"dpa"``; ``tensor_type``: one of ``TENSOR_TYPES``, or a word of the
    layer's own; ``name``: the layer's name in its model.
    """

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""

    def __str__(self) -> str:
        return "|".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self) if getattr(self, field.name)) or "QuantizerRole()"


@dataclass(frozen=True, repr=False)
class QuantizerRequest(Options):
    """What stands for a quantizer that needs state, which the owner of the state makes from it."""


@dataclass(frozen=True, repr=False)
class DelayedScalingRequest(QuantizerRequest):
    """A ``Float8Quantizer`` under delayed scaling; the options are those of ``DelayedScaling``, and are checked as there."""

    fp8_format: Format = Format.HYBRID
    margin: float = 0
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[[Any], Any] = "max"
    scaling_factor_compute_algo: Callable[[Any, Any, Any, Any], Any] | None = None
    reduce_amax: bool = True

    def __post_init__(self) -> None:
        self.recipe()

    def recipe(self) -> DelayedScaling:
        """The recipe with these options, which advances the state."""
        return DelayedScaling(**{field.name: getattr(self, field.name) for field in fields(self)}, backward_override=None)


def quantizer_for_role(recipe: Recipe, role: QuantizerRole | None) -> Quantizer | QuantizerRequest | None:
    """How ``recipe`` quantizes the tensor of that role: None for not at all.

    ``CustomRecipe`` gives what its factory gives, for any role. For the roles of ``TENSOR_TYPES``, ``DelayedScaling`` gives a
    ``DelayedScalingRequest``, and the others a new quantizer with both usages that carries all options; those of the same recipe and role are equal.
    Raises ``DTypeError`` where a factory gives anything else, and ``ArgumentError`` for a recipe of no known kind.
    """
    if isinstance(recipe, CustomRecipe):
        return _from_factory(recipe, role)
    if recipe.high_precision():
        return None
    rule = _rule.dispatch(type(recipe))
    if rule is _rule.dispatch(object):
        do = "take one of fusible's, or a CustomRecipe"
        raise ArgumentError(expected("a recipe that quantizes", of="quantizer_for_role", got=repr(recipe), do=do))
    return rule(recipe, role) if role is not None and role.tensor_type in TENSOR_TYPES else None


def get_align_size_for_quantization(recipe: Recipe) -> int:
    """The number that rows of grouped operations are padded to a multiple of, so that each group is quantized alone."""
    if isinstance(recipe, CustomRecipe):
        return recipe.quantization_alignment
    return recipe.alignment


def _from_factory(recipe: CustomRecipe, role: QuantizerRole | None) -> Quantizer | DelayedScalingRequest | None:
    made = recipe.qfactory(role)
    if made is None or isinstance(made, Quantizer | DelayedScalingRequest):
        return made
    do = "return fusible's quantizers"
    raise DTypeError(expected("a Quantizer, a DelayedScalingRequest or None", of=f"CustomRecipe.qfactory for {role}", got=repr(made), do=do))


@functools.singledispatch
def _rule(recipe: Recipe, role: QuantizerRole) -> Quantizer | QuantizerRequest:
    """How a recipe of its class quantizes a tensor of a layer's product."""
    raise NotImplementedError


@_rule.register
def _delayed(recipe: DelayedScaling, role: QuantizerRole) -> DelayedScalingRequest:
    return DelayedScalingRequest(**{field.name: getattr(recipe, field.name) for field in fields(DelayedScalingRequest)})


@_rule.register
def _current(recipe: Float8CurrentScaling, role: QuantizerRole) -> Quantizer:
    options = recipe.qparams(role.tensor_type)
    return Float8CurrentScalingQuantizer(_fp8(recipe, role), force_pow_2_scales=options.power_2_scale, amax_epsilon=options.amax_epsilon)


@_rule.register
def _block(recipe: Float8BlockScaling, role: QuantizerRole) -> Quantizer:
    options = recipe.qparams(role.tensor_type)
    dims = {"weight": recipe.w_block_scaling_dim, "grad_output": recipe.grad_block_scaling_dim, "grad_input": recipe.grad_block_scaling_dim}
    return Float8BlockQuantizer(
        _fp8(recipe, role),
        amax_epsilon=options.amax_epsilon,
        force_pow_2_scales=options.power_2_scale,
        block_scaling_dim=dims.get(role.tensor_type, recipe.x_block_scaling_dim),
    )


@_rule.register
def _mxfp8(recipe: MXFP8BlockScaling, role: QuantizerRole) -> Quantizer:
    tiled = recipe.enable_2d_quantization and role.tensor_type == "weight" and role.module_type in ("linear", "grouped_linear")
    return MXFP8Quantizer(_fp8(recipe, role), with_2d_quantization=tiled)


@_rule.register
def _nvfp4(recipe: NVFP4BlockScaling, role: QuantizerRole) -> Quantizer:
    options = recipe.qparams(role.tensor_type)
    return NVFP4Quantizer(
        recipe.fp4_format.forward,
        with_rht=options.random_hadamard_transform,
        with_post_rht_amax=options.random_hadamard_transform,
        with_2d_quantization=options.fp4_2d_quantization,
        stochastic_rounding=options.stochastic_rounding,
        row_scaled_nvfp4=recipe.row_scaled_activation and role.tensor_type in ("input", "output"),
        nvfp4_use_4over6=recipe.uses_4over6(role.tensor_type),
        nvfp4_e4m3_max=recipe.e4m3_max(role.tensor_type),
        nvfp4_4over6_err_mode=recipe.nvfp4_4over6_err_mode,
    )


def _fp8(recipe: Float8CurrentScaling | Float8BlockScaling | MXFP8BlockScaling, role: QuantizerRole) -> DType:
    return recipe.fp8_format.backward if role.tensor_type.startswith("grad") else recipe.fp8_format.forward
