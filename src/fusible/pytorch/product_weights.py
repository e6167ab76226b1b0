"""The weights of products in modules, and by what a recipe quantizes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from fusible.errors import ArgumentError, DTypeError, expected
from fusible.nvte import is_quantized_type
from fusible.ops import Op
from fusible.pytorch.engine.bound import BoundOp
from fusible.quantized import DelayedScalingRequest, QuantizedTensor, Quantizer, QuantizerRole, Recipe, quantizer_for_role

__all__ = ["WEIGHT", "quantizer_of_weights", "weights_of_products"]

WEIGHT = QuantizerRole("linear", "weight")


def quantizer_of_weights(recipe: Recipe, of: str) -> Quantizer | DelayedScalingRequest:
    """By what ``recipe`` quantizes weights. Raises ``DTypeError`` for what is no recipe, and ``ArgumentError`` for one that does not quantize them;
    ``of``: whose argument it is."""
    if not isinstance(recipe, Recipe):
        raise DTypeError(expected("a recipe", of=of, got=repr(recipe), do="give e.g. fusible.MXFP8BlockScaling()"))
    quantizer = quantizer_for_role(recipe.immutable(), WEIGHT)
    if not isinstance(quantizer, (Quantizer, DelayedScalingRequest)):
        do = "give one of a format of 8 or 4 bits"
        raise ArgumentError(expected("a recipe that quantizes weights", of=of, got=repr(recipe), do=do))
    return quantizer


def weights_of_products(bound: Sequence[BoundOp], parameters: Mapping[str, Any]) -> Iterator[tuple[Op, str, str, torch.Tensor]]:
    """Of ``bound`` each op that takes a weight which it may quantize, by which name, the module's name of it in ``parameters``, and the weight. One
    that is quantized already is none."""
    for op, names in ((b.op, b.parameters) for b in bound):
        for name, own in zip(op.arg_names, names, strict=True):
            asked, parameter = op.type_of(name), parameters.get(own)  # a buffer is no parameter
            if asked is not None and parameter is not None and is_quantized_type(asked) and not isinstance(parameter, QuantizedTensor):
                yield op, name, own, parameter
