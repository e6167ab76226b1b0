"""Models whose weights are held in 8 bits, or in 4, alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from fusible.errors import ShapeError
from fusible.nvte import Tensor, flatten_storage
from fusible.ops import Op
from fusible.pytorch.engine.bound import BoundOp, in_shape
from fusible.pytorch.engine.weights import stored_type
from fusible.pytorch.modules.base import BaseModule
from fusible.pytorch.product_weights import quantizer_of_weights, weights_of_products
from fusible.quantized import DelayedScalingRequest, Float8CurrentScalingQuantizer, QuantizedTensor, Quantizer, Recipe
from fusible.tex import DType
from fusible.tex.calls.transaction import Write, run

__all__ = ["hold_parameters", "parameter_bytes", "quantize_parameters"]

M = TypeVar("M", bound=nn.Module)


def quantize_parameters(model: M, fp8_dtype: DType = DType.kFloat8E4M3, *, recipe: Recipe | None = None) -> M:
    """Replace the weights of matrix products in ``model`` by their 8-bit values, one scale each, and give the model back; for inference.

    ``recipe`` says otherwise how: weights are held as it quantizes them, in MXFP8 (33/32 of a byte an element), FP8 in blocks, or NVFP4 (9/16 of a
    byte), e.g. ``quantize_parameters(model, recipe=MXFP8BlockScaling())``; ``fp8_dtype`` is then the recipe's own. Under ``DelayedScaling``, too, a
    weight's one scale follows from its own largest magnitude.

    What they were is not kept, and no call makes another copy. They get no gradient. Every recipe takes them as they are; outside of ``autocast``,
    activations stay in their own precision. A weight that is quantized already stays as it is. A parameter that several modules share is quantized
    once. Raises ``ShapeError`` for a weight whose sizes the format does not hold and ``ArgumentError`` for a recipe that quantizes no weights, before
    anything is changed.
    """
    quantizer = _quantizer(fp8_dtype, recipe)
    done: dict[int, nn.Parameter] = {}
    modules = {module: path for path, module in model.named_modules() if isinstance(module, BaseModule)}
    for module in modules:
        module.forget_plans()

    def quantized(name: str, parameter: torch.Tensor) -> nn.Parameter:
        if id(parameter) not in done:
            done[id(parameter)] = _quantized(parameter, quantizer, name)
        return done[id(parameter)]

    # Made at once: an interrupt finds all weights in 8 bits or none.
    run([write for module, path in modules.items() for write in _writes(module, f"{path}." if path else "", quantized)])
    return model


def hold_parameters(module: BaseModule, quantized: Mapping[str, torch.Tensor]) -> None:
    """Let ``module``, which no module around it has called yet, hold ``quantized``, by name, in the place of the weights of its products; for
    inference."""
    module.forget_plans()
    run(_writes(module, "", lambda name, _: nn.Parameter(quantized[name], requires_grad=False)))


def _writes(module: BaseModule, begin: str, quantized: Callable[[str, torch.Tensor], nn.Parameter]) -> list[Write]:
    """What is assigned for ``module`` to hold ``quantized(name, weight)`` in the place of each weight of a product that is not quantized yet; of
    several that are one parameter each by itself. ``begin``: of the names."""
    unstacked, changed, found = module.unstacked(), dict[Op, Op](), dict[str, nn.Parameter]()
    parameters: Mapping[str, Any] = unstacked.get("_parameters", module._parameters)
    bound: Sequence[BoundOp] = unstacked.get("_bound", module.local_ops())
    for op, name, own, parameter in weights_of_products(bound, parameters):
        made = found[own] = quantized(f"{begin}{own}", parameter)
        changed[op] = changed.get(op, op).with_(**{name: in_shape(Tensor(made, stored_type(made)))})
    if not unstacked:
        writes: list[Write] = [partial(module._parameters.__setitem__, own, made) for own, made in found.items()]
        return [*writes, partial(vars(module).update, module.exchanged(changed))] if changed else []
    unstacked["_parameters"] = {**parameters, **found}
    unstacked["_bound"] = tuple(b._replace(op=changed.get(b.op, b.op)) for b in bound)
    unstacked["_ops"] = tuple(b.op for b in unstacked["_bound"])
    return [partial(vars(module).update, unstacked)]


def parameter_bytes(model: nn.Module) -> int:
    """The memory that the parameters of ``model`` take as they are held: of a quantized one its values, their scales, and its copies."""
    return sum(tensor.nbytes for parameter in model.parameters() for tensor in _tensors_of(parameter))


def _tensors_of(parameter: torch.Tensor) -> list[torch.Tensor]:
    return flatten_storage(parameter.storage_without_autograd())[0] if isinstance(parameter, QuantizedTensor) else [parameter]


def _quantizer(fp8_dtype: DType, recipe: Recipe | None) -> Quantizer:
    """What makes the rows of weights, and no copy by columns, which nothing but a backward reads."""
    if recipe is None:
        return Float8CurrentScalingQuantizer(fp8_dtype, columnwise=False)
    quantizer = quantizer_of_weights(recipe, "quantize_parameters")
    if isinstance(quantizer, DelayedScalingRequest):
        return Float8CurrentScalingQuantizer(quantizer.fp8_format.forward, columnwise=False)
    return quantizer.with_usages(rowwise=True, columnwise=False)


def _quantized(parameter: torch.Tensor, quantizer: Quantizer, name: str) -> nn.Parameter:
    try:
        with torch.no_grad():
            return nn.Parameter(quantizer(parameter), requires_grad=False)
    except ShapeError as error:
        raise ShapeError(f"{name}: {error}") from None
