"""Type inference: from the requests that ops carry to the type of every edge.

A request for an 8-bit type becomes a type with the recipe's format and the name of its scaling state, or is widened to the activations' precision
where the recipe does not quantize. A producer that can write 8 bits emits its consumer's type; otherwise the consumer casts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fusible.compute_pipeline.request import PlanRequest
from fusible.errors import ArgumentError, DTypeError, expected
from fusible.nvte import DType, QuantizedType, Type, bit_width, element, is_quantized_type
from fusible.ops import Op
from fusible.ops.protocols import AttentionOperands
from fusible.quantized import (
    CustomRecipe,
    DelayedScaling,
    DelayedScalingRequest,
    HighPrecision,
    IdentityQuantizer,
    QuantizerRole,
    Recipe,
    quantizer_for_role,
)

__all__ = ["StateLayout", "activation_type", "delayed_recipe", "infer_types", "role_of", "state_layout"]

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
    return is_quantized_type(op.type_of(name))


def state_layout(ops: Sequence[Op]) -> StateLayout:
    """One slot for each input that asks for 8 bits, named ``<position>.<input>``: it depends on the ops alone, never on the order of calls."""
    forward = tuple(f"{i}.{name}" for i, op in enumerate(ops) for name in op.forward_names if _asks_for_fp8(op, name))
    backward = tuple(f"{i}.{name}" for i, op in enumerate(ops) for name in op.backward_names if _asks_for_fp8(op, name))
    return StateLayout(forward, backward)


def activation_type(request: PlanRequest) -> DType:
    """The precision of whatever is not quantized: the recipe's lowest, or that of x."""
    if isinstance(request.recipe, HighPrecision) and request.recipe.lowest is not None:
        _check_not_double(request, f"a call under {request.recipe}")
        return _LOWEST[request.recipe.lowest]
    return request.activation


def _check_not_double(request: PlanRequest, of: str) -> None:
    """Raise ``DTypeError`` for an input in fp64: it is there to check gradients by, which whatever rounds would spoil."""
    if request.activation is DType.Float64:
        do = "call it outside the autocast, of parameters that are not quantized, or cast model and input"
        raise DTypeError(expected("fp32, fp16 or bf16", of=f"the input of {of}", got="fp64", do=do))


def infer_types(ops: Sequence[Op], request: PlanRequest) -> list[dict[str, Any]]:
    """Per op, the resolved value of each of its ``*_dtype`` attributes."""
    activation = activation_type(request)
    resolved = [_resolve_inputs(op, i, request, activation) for i, op in enumerate(ops)]
    _look_through(ops, resolved)
    for i, op in enumerate(ops):
        consumer = resolved[i]["x_dtype"] if op.transparent else _taken(resolved[i + 1]) if i + 1 < len(ops) else None
        resolved[i]["y_dtype"] = _emitted(op.y_dtype, consumer, op.quantizes_y or op.transparent, activation)
        consumer = resolved[i]["dy_dtype"] if op.transparent else resolved[i - 1]["dy_dtype"] if i > 0 else None
        resolved[i]["dx_dtype"] = _emitted(op.dx_dtype, consumer, op.quantizes_dx or op.transparent, activation)
    return resolved


def _taken(types: dict[str, Any]) -> Type | None:
    """The type in which a producer hands an op its x. Not in 8 bits under ``backward_override="high_precision"``: backward wants x as it was."""
    return None if types["override"] == "high_precision" else types["x_dtype"]


def _check_overridable(op: Op, override: str) -> None:
    if not op.overridable:
        do = "leave backward_override at None"
        raise ArgumentError(expected("a layer of one process and one weight", of=f"backward_override={override!r}", got=repr(op), do=do))


def _look_through(ops: Sequence[Op], resolved: list[dict[str, Any]]) -> None:
    """A transparent op takes what the op behind it asks for in 8 bits, so that its producer writes that."""
    for name, places, step in (("x_dtype", range(len(ops) - 2, -1, -1), 1), ("dy_dtype", range(1, len(ops)), -1)):
        for i in places:
            asked = _taken(resolved[i + step]) if name == "x_dtype" else resolved[i + step][name]
            if ops[i].transparent and is_quantized_type(asked) and ops[i].passes(asked):
                resolved[i][name] = asked


def _resolve_inputs(op: Op, position: int, request: PlanRequest, activation: DType) -> dict[str, Any]:
    asks = any(_asks_for_fp8(op, name) for name in op.forward_names)  # an op without 8-bit operands has nothing to override
    override = request.recipe.backward_override if request.recipe is not None and asks else None
    types: dict[str, Any] = {"activation": activation, "override": override, "x_dtype": None, "dy_dtype": None}
    for name in (*op.forward_names, *op.backward_names):
        wanted = op.type_of(name)
        if override is not None and name in op.backward_names and is_quantized_type(wanted):
            _check_overridable(op, override)
            wanted = activation
        role = role_of(op, name)
        types[f"{name}_dtype"] = None if wanted is None else _resolve(wanted, f"{position}.{name}", role, request, activation)
    stay_quantized = set[str]()
    for name, (stored, _) in zip(op.arg_names, request.args[position], strict=True):
        if is_quantized_type(stored):  # a parameter that is held in 8 bits stays in them, whatever the recipe
            parts = op.parts.get(name, (name,))
            stay_quantized.update(parts)
            types.update({f"{part}_dtype": stored for part in parts})
        types[f"d{name}_dtype"] = activation if is_quantized_type(stored) else element(stored)
    for name, (rowwise, columnwise) in op.with_(override=override).reads.items():
        type = types[f"{name}_dtype"]
        if isinstance(type, QuantizedType) and name not in stay_quantized:
            types[f"{name}_dtype"] = type.read(rowwise=rowwise, columnwise=columnwise)
    if isinstance(op, AttentionOperands):
        types.update(_of_attention(op, request.recipe))
    if any(is_quantized_type(type) for name, type in types.items() if name.endswith("_dtype")):
        _check_not_double(request, f"{op!r} with operands in 8 bits")
    return op.resolved(types)


def _of_attention(op: Op, recipe: Recipe | None) -> dict[str, Type]:
    """The 8-bit types of attention's operands. Raises ``ArgumentError`` for a recipe by which it cannot have them."""
    if recipe is None or not (recipe.fp8_dpa or recipe.fp8_mha):
        return {}
    asked = "fp8_mha" if recipe.fp8_mha else "fp8_dpa"
    if recipe.fp8_mha or not (recipe.float8_current_scaling() or recipe.mxfp8()) or recipe.backward_override is not None:
        do = "ask for fp8_dpa alone, of Float8CurrentScaling or MXFP8BlockScaling without a backward_override"
        raise ArgumentError(expected(f"{asked}=False", of=f"the {type(recipe).__name__} of {op!r}", got=True, do=do))
    made = (quantizer_for_role(recipe, QuantizerRole("dpa", kind)) for kind in ("input", "grad_output"))
    types = [QuantizedType.of(quantizer).read(rowwise=True, columnwise=False) for quantizer in made]  # type: ignore[arg-type]  # pyright: ignore
    return {"qkv_dtype": types[0], "do_dtype": types[1]}


_ROLES = {"x": QuantizerRole("linear", "input"), "dy": QuantizerRole("linear", "grad_output")}
_WEIGHT, _GRAD_INPUT = QuantizerRole("linear", "weight"), QuantizerRole("linear", "grad_input")


def role_of(op: Op, name: str) -> QuantizerRole:
    """What the tensor ``name`` of ``op`` is to its layer, by which recipes quantize it."""
    role = op.roles.get(name) or _ROLES.get(name) or (_WEIGHT if name in op.forward_names else _GRAD_INPUT)
    return replace(role, name=op.layer) if op.layer else role


def _resolve(wanted: Type, slot: str, role: QuantizerRole, request: PlanRequest, activation: DType) -> Type:
    if not is_quantized_type(wanted):
        return _widened(element(wanted), activation)
    if request.recipe is None:
        return activation
    quantizer = quantizer_for_role(request.recipe, role)
    if quantizer is None or (isinstance(quantizer, IdentityQuantizer) and quantizer.dtype is None):
        return activation
    if isinstance(quantizer, DelayedScalingRequest):
        backward = role.tensor_type.startswith("grad")
        return QuantizedType(DType(int(quantizer.fp8_format.backward if backward else quantizer.fp8_format.forward)), "delayed", slot)
    return QuantizedType.of(quantizer)


def delayed_recipe(ops: Sequence[Op], recipe: Recipe | None) -> DelayedScaling | None:
    """The options of the delayed scaling that some tensor of the ops is under, or None. Raises ``ArgumentError`` where a factory gives several."""
    if recipe is None or not isinstance(recipe, CustomRecipe):
        return recipe if isinstance(recipe, DelayedScaling) else None
    roles = [role_of(op, name) for op in ops for name in (*op.forward_names, *op.backward_names) if _asks_for_fp8(op, name)]
    made = [request for role in roles if isinstance(request := quantizer_for_role(recipe, role), DelayedScalingRequest)]
    found = {request.recipe() for request in made}
    if len(found) > 1:
        got, do = " and ".join(map(repr, found)), "give the same options to every tensor under delayed scaling"
        raise ArgumentError(expected("one delayed scaling", of="a pipeline's CustomRecipe", got=got, do=do))
    return next(iter(found), None)


def _emitted(asked: Type, consumer: Type | None, can_quantize: bool, activation: DType) -> Type:
    if is_quantized_type(consumer) and can_quantize:
        return consumer
    return activation if is_quantized_type(asked) else _widened(element(asked), activation)


def _widened(asked: DType, activation: DType) -> DType:
    return asked if bit_width(asked) > bit_width(activation) else activation
