"""The scale of a weight under delayed scaling before an iteration has observed it: that of what it holds."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from fusible.quantized.recipe import DelayedScaling
from fusible.quantized.state import ScalingState
from fusible.tex import DType

__all__ = ["FirstScale", "begin_anew", "of_a_copy"]


@dataclass(eq=False)
class FirstScale:
    """What a delayed-scaling quantizer of a weight goes by until an iteration has observed the weight (``observed``): the largest magnitude of what
    is written, as if ``recipe`` had seen it in an iteration before. It is shared by the quantizers that share the scale; a copy of the weight has its
    own, of which nothing has been observed.

    ``fitted``: a write has changed the scale, and the shards of the weight that other processes hold may have others.
    """

    recipe: DelayedScaling
    observed: bool = False
    fitted: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> FirstScale:
        return FirstScale(self.recipe)

    def fit(self, quantizer: Any, amax: torch.Tensor) -> None:
        """Give ``quantizer`` the scale that follows from ``amax`` (fp32 ``[1]``). One that gives none (0, infinite, NaN) leaves it as it is."""
        if quantizer.scale.is_meta and not amax.is_meta:  # made on meta, and written where there is memory
            quantizer.scale, quantizer.amax = torch.ones_like(amax), torch.zeros_like(amax)
        amax = amax.to(quantizer.scale.device)
        state = ScalingState.create(("weight",), DType(quantizer.dtype), self.recipe.amax_history_len, amax.device)
        scale = state.observe({"weight": amax}).advance(self.recipe).scale
        usable = torch.isfinite(amax) & (amax > 0)
        quantizer.scale.copy_(torch.where(usable, scale, quantizer.scale.view(1)).view_as(quantizer.scale))
        quantizer.amax.copy_(torch.where(usable, amax, quantizer.amax.view(1)).view_as(quantizer.amax))


def of_a_copy(quantizer: Any) -> Any:
    """The quantizer of a copy of what ``quantizer`` has written: its own, where writing to the copy would change the scale of both."""
    return quantizer if getattr(quantizer, "first_scale", None) is None else deepcopy(quantizer)


def begin_anew(weight: Any) -> None:
    """What is written to ``weight`` next goes by its own largest magnitude, where that is how it began."""
    first = getattr(getattr(weight, "_quantizer", None), "first_scale", None)
    if first is not None:
        first.observed = False
