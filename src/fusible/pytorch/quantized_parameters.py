"""Models whose weights are held in 8 bits alone."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from fusible.errors import ArgumentError, expected
from fusible.nvte import Tensor, is_quantized_type, take_apart
from fusible.ops import Op
from fusible.pytorch.engine.weights import stored_type
from fusible.pytorch.modules.base import BaseModule
from fusible.quantized import (
    DelayedScalingRequest,
    Float8CurrentScalingQuantizer,
    QuantizedTensor,
    Quantizer,
    QuantizerRole,
    Recipe,
    quantizer_for_role,
)
from fusible.tex import DType
from fusible.tex.calls.transaction import Write, run

__all__ = ["parameter_bytes", "quantize_parameters"]

M = TypeVar("M", bound=nn.Module)


def quantize_parameters(model: M, fp8_dtype: DType = DType.kFloat8E4M3, *, recipe: Recipe | None = None) -> M:
    """Replace the weights of matrix products in ``model`` by their 8-bit values, one scale each, and give the model back; for inference.

    ``recipe``: by their values in its number format for weights, with the scales that it has. What they were is not kept, so they take a byte an
    element, or half of one, and no call makes another copy. They get no gradient. Every recipe takes them as they are; outside of ``autocast``,
    activations stay in their own precision. A parameter that several modules share is quantized once. Raises ``ArgumentError`` for a recipe that
    quantizes no weights, ``ShapeError`` for a weight that its format has no blocks for, and changes nothing then.
    """
    quantizer = Float8CurrentScalingQuantizer(fp8_dtype, columnwise=False) if recipe is None else _of_weights(recipe)
    done: dict[int, nn.Parameter] = {}
    writes: list[Write] = []  # made at once: an interrupt finds all weights in 8 bits or none
    modules = [module for module in model.modules() if isinstance(module, BaseModule)]
    for module in modules:
        module.forget_plans()
    for module in modules:
        changed: dict[Op, Op] = {}
        for bound in module.local_ops():
            for name, parameter_name in zip(bound.op.arg_names, bound.parameters, strict=True):
                asked = bound.op.type_of(name)
                parameter = module._parameters[parameter_name]
                if asked is None or parameter is None or not is_quantized_type(asked) or isinstance(parameter, QuantizedTensor):
                    continue
                if id(parameter) not in done:
                    done[id(parameter)] = _quantized(parameter, quantizer)
                held = done[id(parameter)]
                writes.append(partial(module._parameters.__setitem__, parameter_name, held))
                changed[bound.op] = changed.get(bound.op, bound.op).with_(**{name: Tensor(held, stored_type(held))})
        if changed:
            writes.append(partial(vars(module).update, module.exchanged(changed)))
    run(writes)
    return model


def parameter_bytes(model: nn.Module) -> int:
    """The memory that the parameters of ``model`` take as they are held: of a quantized one its values, their scales, and its copies."""
    return sum(tensor.nbytes for parameter in model.parameters() for tensor in _held(parameter))


def _held(parameter: torch.Tensor) -> list[torch.Tensor]:
    return take_apart(parameter.storage_without_autograd())[0] if isinstance(parameter, QuantizedTensor) else [parameter]


def _of_weights(recipe: Recipe) -> Any:
    """What quantizes the weights of products under ``recipe``, row-wise alone: no backward will read them."""
    made = quantizer_for_role(recipe, QuantizerRole("linear", "weight"))
    if isinstance(made, DelayedScalingRequest):  # a weight that nobody trains is scaled by what it is
        return Float8CurrentScalingQuantizer(made.fp8_format.forward, columnwise=False)
    if not isinstance(made, Quantizer):
        got, do = repr(recipe), "give e.g. fusible.MXFP8BlockScaling()"
        raise ArgumentError(expected("a recipe that quantizes weights", of="quantize_parameters", got=got, do=do))
    made.set_usage(rowwise=True, columnwise=False)
    return made


def _quantized(parameter: torch.Tensor, quantizer: Any) -> nn.Parameter:
    with torch.no_grad():
        return nn.Parameter(quantizer(parameter), requires_grad=False)
