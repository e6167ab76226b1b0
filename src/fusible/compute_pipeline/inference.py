"""Type inference: from the requests that ops carry to the type of every edge.

A request for an 8-bit type becomes a type with the recipe's format and the name of its scaling state, or is widened to the activations' precision
where the recipe does not quantize. A producer that can write 8 bits emits its consumer's type; otherwise the consumer casts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fusible.compute_pipeline.request import PlanRequest
from fusible.nvte import DType, QuantizedType, Type, bit_width, element, is_quantized_type
from fusible.ops import Op
from fusible.quantized import DelayedScaling, Float8CurrentScaling, HighPrecision

__all__ = ["StateLayout", "activation_type", "infer_types", "state_layout"]

_LOWEST = {"bfloat16": DType.BFloat16, "float16": DType.Float16, "float32": DType.Float32}


@dataclass(frozen=True)
class StateLayout:
    """The names of the scales that a list of ops reads: by forward passes, and by backward passes."""

    forward: tuple[str, ...]
    backward: tuple[str, ...]

    def between(self, start: int, stop: int) -> StateLayout:
        """The names that belong to the ops ``[start, stop)``."""
        return StateLayout(*(tuple(s for s in slots if start <= int(s.split(".", 1)[0]) < stop) for slots in (self.forward, self.backward)))

    def __bool__(self) -> bool:
        return bool(self.forward or self.backward)


def _asks_for_fp8(op: Op, name: str) -> bool:
    request = getattr(op, f"{name}_dtype", None)
    return request is not None and is_quantized_type(request)


def _forward_inputs(op: Op) -> tuple[str, ...]:
    return ("x", *op.arg_names)


def state_layout(ops: Sequence[Op]) -> StateLayout:
    """One slot for each input that asks for 8 bits, named ``<position>.<input>``: it depends on the ops alone, never on the order of calls."""
    forward = tuple(f"{i}.{name}" for i, op in enumerate(ops) for name in _forward_inputs(op) if _asks_for_fp8(op, name))
    backward = tuple(f"{i}.dy" for i, op in enumerate(ops) if _asks_for_fp8(op, "dy"))
    return StateLayout(forward, backward)


def activation_type(request: PlanRequest) -> DType:
    """The precision of whatever is not quantized: that of x, widened to the recipe's lowest."""
    if isinstance(request.recipe, HighPrecision) and request.recipe.lowest is not None:
        lowest = _LOWEST[request.recipe.lowest]
        return lowest if bit_width(lowest) >= bit_width(request.activation) else request.activation
    return request.activation


def infer_types(ops: Sequence[Op], request: PlanRequest) -> list[dict[str, Any]]:
    """Per op, the resolved value of each of its ``*_dtype`` attributes."""
    activation = activation_type(request)
    resolved = [_resolve_inputs(op, i, request, activation) for i, op in enumerate(ops)]
    for i, op in enumerate(ops):
        consumer = resolved[i + 1]["x_dtype"] if i + 1 < len(ops) else None
        resolved[i]["y_dtype"] = _emitted(op.y_dtype, consumer, op.quantizes_y, activation)
        consumer = resolved[i - 1]["dy_dtype"] if i > 0 else None
        resolved[i]["dx_dtype"] = _emitted(op.dx_dtype, consumer, op.quantizes_dx, activation)
    return resolved


def _resolve_inputs(op: Op, position: int, request: PlanRequest, activation: DType) -> dict[str, Any]:
    types: dict[str, Any] = {}
    for name in (*_forward_inputs(op), "dy"):
        wanted: Type | None = getattr(op, f"{name}_dtype", None)
        types[f"{name}_dtype"] = None if wanted is None else _resolve(wanted, f"{position}.{name}", name, request, activation)
    for name, (held, _) in zip(op.arg_names, request.args[position], strict=True):
        if is_quantized_type(held):
            types[f"{name}_dtype"] = held  # a parameter that is held in 8 bits stays in them, whatever the recipe
        types[f"d{name}_dtype"] = element(held)
    return types


def _resolve(wanted: Type, slot: str, name: str, request: PlanRequest, activation: DType) -> Type:
    if not is_quantized_type(wanted):
        return _widened(element(wanted), activation)
    recipe = request.recipe
    if isinstance(recipe, DelayedScaling):
        return QuantizedType(_format(recipe, name), "delayed", slot)
    if isinstance(recipe, Float8CurrentScaling):
        options = {"x": recipe.fp8_quant_fwd_inp, "dy": recipe.fp8_quant_bwd_grad}.get(name, recipe.fp8_quant_fwd_weight)
        assert options is not None
        return QuantizedType(
            _format(recipe, name), "current", power_2_scale=options.power_2_scale, amax_epsilon=options.amax_epsilon
        )
    return activation


def _format(recipe: DelayedScaling | Float8CurrentScaling, name: str) -> DType:
    return DType(int(recipe.fp8_format.backward if name == "dy" else recipe.fp8_format.forward))


def _emitted(asked: Type, consumer: Type | None, can_quantize: bool, activation: DType) -> Type:
    if consumer is not None and is_quantized_type(consumer) and can_quantize:
        return consumer
    return activation if is_quantized_type(asked) else _widened(element(asked), activation)


def _widened(asked: DType, activation: DType) -> DType:
    return asked if bit_width(asked) > bit_width(activation) else activation
