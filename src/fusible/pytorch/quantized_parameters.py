"""Models whose weights are held in 8 bits alone."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

import torch
from torch import nn

from fusible.nvte import Tensor, is_quantized_type, take_apart
from fusible.ops import Op
from fusible.pytorch.engine.weights import stored_type
from fusible.pytorch.modules.base import BaseModule
from fusible.quantized import Float8CurrentScalingQuantizer, Float8Tensor, QuantizedTensor
from fusible.tex import DType
from fusible.tex.calls.transaction import Write, run

__all__ = ["parameter_bytes", "quantize_parameters"]

M = TypeVar("M", bound=nn.Module)


def quantize_parameters(model: M, fp8_dtype: DType = DType.kFloat8E4M3) -> M:
    """Replace the weights of matrix products in ``model`` by their 8-bit values, one scale each, and give the model back; for inference.

    What they were is not kept, so they take a byte an element, and no call makes another copy. They get no gradient. Every recipe takes them as they
    are; outside of ``autocast``, activations stay in their own precision. A parameter that several modules share is quantized once.
    """
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
                if asked is None or parameter is None or not is_quantized_type(asked) or isinstance(parameter, Float8Tensor):
                    continue
                if id(parameter) not in done:
                    done[id(parameter)] = _quantized(parameter, fp8_dtype)
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


def _quantized(parameter: torch.Tensor, fp8_dtype: DType) -> nn.Parameter:
    quantizer = Float8CurrentScalingQuantizer(fp8_dtype, columnwise=False)
    with torch.no_grad():
        return nn.Parameter(quantizer(parameter), requires_grad=False)
