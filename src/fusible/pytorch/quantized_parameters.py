"""Models whose weights are held in 8 bits, or in 4, alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from fusible.errors import NotServedError, ShapeError, expected
from fusible.nvte import Tensor, flatten_storage
from fusible.ops import Op
from fusible.pytorch.engine.bound import BoundOp, in_shape
from fusible.pytorch.engine.shares import laid_out_like, local_of
from fusible.pytorch.engine.weights import stored_type
from fusible.pytorch.modules.base import BaseModule
from fusible.pytorch.product_weights import HeldWeight, check_layout, check_quantizes, quantized_together, quantizer_of_weight, weights_of_products
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

    What they were is not kept, and no call makes another copy. They get no gradient; that of what they are multiplied by is made of their values.
    Every recipe takes them as they are; outside of ``autocast``, activations stay in their own precision. A weight that is quantized already stays as
    it is. A parameter that several modules share is quantized once. Of a model that ``parallelize`` has laid out every process calls it, and
    quantizes its own part of each weight, by the largest magnitude in all of them where a scale is for the whole.

    Raises ``ShapeError`` for a weight whose sizes the format does not hold, ``ArgumentError`` for a recipe that quantizes no weights, and
    ``NotServedError`` for weights that ``fully_shard`` shares out, before anything is changed.
    """
    done: dict[tuple[int, ...], list[nn.Parameter]] = {}
    modules = {module: path for path, module in model.named_modules() if isinstance(module, BaseModule)}
    weights = _checked(model, modules)
    if recipe is not None:
        check_quantizes(recipe, weights, "quantize_parameters")
    for module in modules:
        module.forget_plans()

    def quantized(name: str, weight: HeldWeight, group: Any) -> list[nn.Parameter] | None:
        key = tuple(map(id, weight.parts.values()))
        if key not in done and (quantizer := _quantizer(weight, fp8_dtype, recipe)) is not None:
            done[key] = _quantized(weight, quantizer, group, name)
        return done.get(key)

    # Made at once: an interrupt finds all weights in 8 bits or none.
    run([write for module, path in modules.items() for write in _writes(module, f"{path}." if path else "", quantized)])
    return model


def hold_parameters(module: BaseModule, quantized: Mapping[str, torch.Tensor]) -> None:
    """Let ``module``, which no module around it has called yet, hold ``quantized``, by name, in the place of the weights of its products; for
    inference."""
    module.forget_plans()
    run(_writes(module, "", lambda name, *_: [nn.Parameter(quantized[name], requires_grad=False)]))


def _checked(model: nn.Module, modules: Iterable[BaseModule]) -> list[HeldWeight]:
    """The weights that are to be replaced. Raises for parameters of which this process has parts that are not the module's to replace."""
    of = "the model of quantize_parameters"
    if any(hasattr(module, "set_requires_gradient_sync") for module in model.modules()):  # FSDP2's class, which is not imported for this
        do = "call it before fully_shard"
        raise NotServedError(expected("weights that FSDP does not share out", of=of, got="a model under fully_shard", do=do))
    found = [(module, weight) for module in modules for weight in weights_of_products(module.local_ops(), module._parameters, module.shares)]
    for module, weight in found:
        check_layout(module, weight, "quantize_parameters")
    return [weight for _, weight in found]


_Quantized = Callable[[str, HeldWeight, Any], list[nn.Parameter] | None]
"""What is held in the place of each part of a weight, given its name and the group of the processes that have its parts; None for what it is."""


def _writes(module: BaseModule, begin: str, quantized: _Quantized) -> list[Write]:
    """What is assigned for ``module`` to hold what ``quantized`` gives in the place of each weight of a product that is not quantized yet; of several
    that are one parameter each by itself. ``begin``: of the names."""
    unstacked, changed, found = module.unstacked(), dict[Op, Op](), dict[str, nn.Parameter]()
    parameters: Mapping[str, Any] = unstacked.get("_parameters", module._parameters)
    bound: Sequence[BoundOp] = unstacked.get("_bound", module.local_ops())
    for weight in weights_of_products(bound, parameters, module.shares):
        made = quantized(f"{begin}{weight.own}", weight, module.amax_group)
        if made is None:
            continue
        found |= zip(weight.parts, made, strict=True)
        taken = weight.share.joined([local_of(part) for part in made])
        changed[weight.op] = changed.get(weight.op, weight.op).with_(**{weight.name: in_shape(Tensor(taken, stored_type(taken)))})
    if not unstacked:
        writes: list[Write] = [partial(module._parameters.__setitem__, own, made) for own, made in found.items()]
        return [*writes, partial(vars(module).update, module.exchanged(changed))] if changed else []
    unstacked["_parameters"] = {**parameters, **found}
    unstacked["_bound"] = tuple(b._replace(op=changed.get(b.op, b.op)) for b in bound)
    unstacked["_ops"] = tuple(b.op for b in unstacked["_bound"])
    return [partial(vars(module).update, unstacked)]


def parameter_bytes(model: nn.Module) -> int:
    """The memory that the parameters of ``model`` take in this process as they are held: of a quantized one its values, their scales, and its
    copies."""
    return sum(tensor.nbytes for parameter in model.parameters() for tensor in _tensors_of(local_of(parameter)))


def _tensors_of(parameter: torch.Tensor) -> list[torch.Tensor]:
    return flatten_storage(parameter.storage_without_autograd())[0] if isinstance(parameter, QuantizedTensor) else [parameter]


def _quantizer(weight: HeldWeight, fp8_dtype: DType, recipe: Recipe | None) -> Quantizer | None:
    """What makes the rows of a weight, and no copy by columns, which nothing but a backward reads; None for one that ``recipe`` leaves as it is."""
    if recipe is None:
        return Float8CurrentScalingQuantizer(fp8_dtype, columnwise=False)
    quantizer = quantizer_of_weight(recipe, weight)
    if isinstance(quantizer, DelayedScalingRequest):
        return Float8CurrentScalingQuantizer(quantizer.fp8_format.forward, columnwise=False)
    return None if quantizer is None else quantizer.with_usages(rowwise=True, columnwise=False)


def _quantized(weight: HeldWeight, quantizer: Quantizer, group: Any, name: str) -> list[nn.Parameter]:
    parts = weight.parts.values()
    try:
        with torch.no_grad():
            made = quantized_together([local_of(part).detach() for part in parts], quantizer, group)
    except ShapeError as error:
        raise ShapeError(f"{name}: {error}") from None
    if made is None or not isinstance(weight.share.joined(made), QuantizedTensor):
        do = "take a format without blocks, or fewer processes along tp"
        raise ShapeError(expected("parts of rows in whole blocks", of=name, got=", ".join(str(list(local_of(part).shape)) for part in parts), do=do))
    return [laid_out_like(part, each, False) for part, each in zip(parts, made, strict=True)]
