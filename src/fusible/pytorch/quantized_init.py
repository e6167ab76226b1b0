"""``quantized_model_init``: parameters that are made quantized, and stay so."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

import torch
from torch import nn

from fusible.errors import DTypeError, NotServedError, expected
from fusible.pytorch.engine.weights import without_unread_copy
from fusible.quantized import (
    DelayedScaling,
    DelayedScalingRequest,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    GroupedTensor,
    QuantizedTensor,
    Quantizer,
    Recipe,
    quantizer_for_role,
)
from fusible.quantized import QuantizerRole as Role
from fusible.quantized.first_scale import FirstScale
from fusible.tex.calls.constructors import check_constructor

__all__ = ["as_parameter", "check_held", "current_model_init", "leave_model_inits", "quantized_model_init"]

_local = threading.local()
_WEIGHT = Role("linear", "weight")


class quantized_model_init:
    """``with quantized_model_init(recipe=MXFP8BlockScaling()): model = Linear(...)``: weights of products are held as ``recipe`` quantizes them.

    No copy in high precision is kept, unless ``preserve_high_precision_init_val``: then each has one on the CPU, which
    ``weight.get_high_precision_init_val()`` gives and ``weight.clear_high_precision_init_val()`` lets go. ``recipe`` defaults to
    ``DelayedScaling()``, whose weights are scaled by their own largest magnitude when they are made, and when they are written before a training
    iteration has observed them, or by ``load_state_dict``. What else is written is scaled by what was seen before, in the iterations of the pipeline
    that they are called in, and saturates beyond; but for those of experts that are held as one (``MixtureOfExperts``), each of which is scaled by
    its own largest magnitude whenever it is written. Contexts nest, per thread.

    Weights keep the format that they are held in, whatever recipe a call is under, as with ``quantize_parameters``: each product reads their own
    values, and the recipe says how what they are multiplied by is quantized. So a model that is held in one format is served, and trained, under any
    recipe. (Transformer Engine refuses a recipe of another format.)
    """

    def __init__(self, enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False) -> None:
        if recipe is not None and not isinstance(recipe, Recipe):
            raise DTypeError(expected("a recipe", of="quantized_model_init", got=repr(recipe), do="give e.g. fusible.MXFP8BlockScaling()"))
        self.recipe: Recipe | None = (recipe.immutable() if recipe is not None else DelayedScaling()) if enabled else None
        self.preserve_high_precision_init_val = preserve_high_precision_init_val
        self._former: list[quantized_model_init | None] = []

    def __enter__(self) -> quantized_model_init:
        self._former.append(getattr(_local, "current", None))
        _local.current = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _local.current = self._former.pop()


check_constructor(quantized_model_init)


def _delayed(values: torch.Tensor, recipe: DelayedScaling) -> torch.Tensor:
    """``values`` under a scale that follows from their largest magnitude, as if that had been seen in an iteration before; so does that of what is
    written until there has been one."""
    scale, amax = (torch.full((1,), value, dtype=torch.float32, device=values.device) for value in (1.0, 0.0))
    quantizer = Float8Quantizer(scale, amax, recipe.fp8_format.forward)
    quantizer.first_scale = first = FirstScale(recipe)
    made = quantizer(values)
    first.fitted = False
    return made  # type: ignore[no-any-return]


def check_held(weight: Any, quantizer: Quantizer) -> None:
    """Raise ``NotServedError`` for a weight whose class no parameter can have: the bare storage that a user's quantizer gives."""
    if not isinstance(weight, QuantizedTensor):
        of, do = f"a weight that is held as {type(quantizer).__name__} quantizes it", "let it give one, or leave the weight in high precision"
        raise NotServedError(expected("a QuantizedTensor", of=of, got=type(weight).__qualname__, do=do))


def _quantized(values: torch.Tensor, quantizer: Any) -> torch.Tensor:
    if isinstance(quantizer, DelayedScalingRequest):
        return _delayed(values, quantizer.recipe())
    made: torch.Tensor = quantizer(values)
    check_held(made, quantizer)
    return made


def _stacked(values: torch.Tensor, quantizer: Any) -> GroupedTensor:
    """Matrices that are held as one, each quantized by itself."""
    if isinstance(quantizer, DelayedScalingRequest):
        quantizer = Float8CurrentScalingQuantizer(quantizer.fp8_format.forward)
    return GroupedTensor.of_stack(values, without_unread_copy(quantizer))


def current_model_init() -> quantized_model_init | None:
    """The innermost that is open in this thread."""
    return getattr(_local, "current", None)


def leave_model_inits() -> None:
    """Be outside of every ``quantized_model_init`` in this thread. Those that are open put back what was before them when they are left."""
    _local.current = None


def as_parameter(weight: torch.Tensor, role: Role = _WEIGHT) -> nn.Parameter:
    """A parameter of the values of ``weight``, a matrix or a stack: quantized where a ``quantized_model_init`` is open, and its recipe quantizes
    ``role``."""
    context = current_model_init()
    quantizer: Any = None if context is None or context.recipe is None else quantizer_for_role(context.recipe, role)
    if context is None or quantizer is None:
        return weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight)
    values = weight.detach()
    parameter = nn.Parameter(_stacked(values, quantizer) if values.dim() == 3 else _quantized(values, quantizer))
    if context.preserve_high_precision_init_val:
        parameter._high_precision_init_val = values.cpu()  # type: ignore[attr-defined]
        parameter.get_high_precision_init_val = lambda: getattr(parameter, "_high_precision_init_val", None)  # type: ignore[attr-defined]
        parameter.clear_high_precision_init_val = lambda: vars(parameter).pop("_high_precision_init_val", None)  # type: ignore[attr-defined]
    return parameter
