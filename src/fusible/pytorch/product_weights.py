"""The weights of products in modules, and by what a recipe quantizes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from fusible.compute_pipeline import role_of
from fusible.errors import ArgumentError, DTypeError, expected
from fusible.nvte import is_quantized_type
from fusible.ops import Op
from fusible.pytorch.engine.bound import BoundOp
from fusible.pytorch.engine.shares import Share, local_of
from fusible.pytorch.quantized_init import check_held
from fusible.quantized import (
    DelayedScalingRequest,
    GroupedTensor,
    IdentityQuantizer,
    QuantizedTensor,
    Quantizer,
    QuantizerRole,
    Recipe,
    quantizer_for_role,
)

__all__ = ["HeldWeight", "WEIGHT", "check_layout", "check_quantizes", "quantized_together", "quantizer_of_weight", "weights_of_products"]

WEIGHT = QuantizerRole("linear", "weight")


class HeldWeight(NamedTuple):
    """A weight of a product: ``op``'s ``name``, which its module calls ``own``. ``parts``: the module's parameters that are joined to it, by their
    names; one, but for what processes share out by parts (``share``)."""

    op: Op
    name: str
    own: str
    parts: dict[str, torch.Tensor]
    share: Share


def weights_of_products(bound: Sequence[BoundOp], parameters: Mapping[str, Any], shares: Mapping[str, Share]) -> Iterator[HeldWeight]:
    """Of ``bound`` the weights which their ops may quantize, as a module of such ``parameters`` and ``shares`` holds them. One that is quantized
    already is none."""
    for op, names in ((b.op, b.parameters) for b in bound):
        for name, own in zip(op.arg_names, names, strict=True):
            asked, share = op.type_of(op.parts.get(name, (name,))[0]), shares.get(own) or Share.all_of(own)
            parts = {part: parameters[part] for part in share.names if parameters.get(part) is not None}  # a buffer is no parameter
            if asked is None or not is_quantized_type(asked) or len(parts) < len(share.names):
                continue
            if not any(isinstance(local_of(part), QuantizedTensor) for part in parts.values()):
                yield HeldWeight(op, name, own, parts, share)


def check_quantizes(recipe: Recipe, weights: Iterable[HeldWeight], of: str) -> None:
    """Raise ``DTypeError`` for what is no recipe, and ``ArgumentError`` for one that quantizes none of the weights; ``of``: whose argument it is."""
    if not isinstance(recipe, Recipe):
        raise DTypeError(expected("a recipe", of=of, got=repr(recipe), do="give e.g. fusible.MXFP8BlockScaling()"))
    if all(each is None for each in [quantizer_of_weight(recipe, weight) for weight in weights] or [_quantizer(recipe, WEIGHT)]):
        do = "give one of a format of 8 or 4 bits"
        raise ArgumentError(expected("a recipe that quantizes weights", of=of, got=repr(recipe), do=do))


def quantizer_of_weight(recipe: Recipe, weight: HeldWeight) -> Quantizer | DelayedScalingRequest | None:
    """By what passes under ``recipe`` quantize that weight; None for not at all."""
    return _quantizer(recipe, role_of(weight.op, weight.op.parts.get(weight.name, (weight.name,))[0]))


def _quantizer(recipe: Recipe, role: QuantizerRole) -> Quantizer | DelayedScalingRequest | None:
    made = quantizer_for_role(recipe.immutable(), role)
    return made if isinstance(made, (Quantizer, DelayedScalingRequest)) and not isinstance(made, IdentityQuantizer) else None


def check_layout(module: Any, weight: HeldWeight, of: str) -> None:
    """Raise ``ArgumentError`` for a weight that is shared out as only another knows; ``of``: whose argument it is."""
    name = next((name for name, part in weight.parts.items() if local_of(part) is not part), None)
    if name is not None and weight.own not in module.shares:
        got, do = f"a {type(module).__name__} whose {name} is a DTensor of another's making", "lay the model out by parallelize, or call it before"
        raise ArgumentError(expected("parameters that are whole or laid out by parallelize", of=of, got=got, do=do))


def quantized_together(parts: Sequence[torch.Tensor], quantizer: Quantizer, group: Any) -> list[QuantizedTensor] | None:
    """The parts of what a product takes as one, quantized as one: by the largest magnitude of all of them, and of those in the processes of
    ``group``, where that is how ``quantizer`` scales; of matrices that are stacked each by itself. None where a part would cut blocks of another.
    Raises ``ShapeError`` for what the format does not hold, ``NotServedError`` for a quantizer that gives no tensors."""
    if parts[0].dim() == 3:
        return [GroupedTensor.of_stack(part, quantizer) for part in parts]
    by: Any = quantizer.copy()
    if group is not None and hasattr(by, "with_amax_reduction"):
        by.with_amax_reduction, by.amax_reduction_group = True, group
    whole: Any = by(parts[0] if len(parts) == 1 else torch.cat(list(parts)))
    check_held(whole, quantizer)
    whole._quantizer = quantizer.copy()
    ends = list(accumulate(len(part) for part in parts))
    made = [whole] if len(parts) == 1 else [whole._rows(end - len(part), end) for end, part in zip(ends, parts, strict=True)]
    return None if any(part is None for part in made) else made
