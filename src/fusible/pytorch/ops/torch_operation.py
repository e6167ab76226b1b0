"""Operations written in plain torch as entries of a plan: passes that call their ``fuser_forward`` and ``fuser_backward``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch

from fusible import nvte
from fusible.compute_pipeline import needs_backward, outer_sides
from fusible.errors import ArgumentError, expected
from fusible.nvte import DType, QuantizedType, Tensor, Type, current_pass, make_nvte_tensor
from fusible.ops import Context, Op
from fusible.ops.protocols import OpaqueCode
from fusible.pytorch.engine.bound import in_shape
from fusible.pytorch.engine.torch_autocast import ambient
from fusible.pytorch.ops.context import OperationContext
from fusible.pytorch.ops.protocols import BasicOperationLike, FusibleOperationLike
from fusible.pytorch.ops.saved_context import check_saved, tell
from fusible.pytorch.ops.tensors import wrapped
from fusible.quantized import Float8Quantizer
from fusible.tex.calls.argument_kinds import shown

__all__ = [
    "TorchOperation",
    "fused_backward",
    "fused_forward",
    "pass_of",
]


class TorchOperation(OpaqueCode, Op):
    """The entry of a plan that calls a basic operation's own ``fuser_forward`` and ``fuser_backward``."""

    overridable = True
    quantizes_y = True
    quantizes_dx = True

    def __init__(self, module: BasicOperationLike) -> None:
        self.module = module
        self.parameters = [in_shape(make_nvte_tensor(parameter)) for parameter in module._parameters.values() if parameter is not None]
        self._forward_names = _names("x", "forward", module.num_quantizers("forward"))
        self._backward_names = _names("dy", "backward", module.num_quantizers("backward"))
        self.roles = {}
        for names, mode, request in ((self._forward_names, "forward", DType.Float8E4M3), (self._backward_names, "backward", DType.Float8E5M2)):
            vars(self).update({f"{name}_dtype": request for name in names})
            self.roles.update(zip(names, module.get_quantizer_roles(mode) or (), strict=False))  # type: ignore[arg-type]

    @property
    def args(self) -> list[Tensor]:
        return self.parameters

    @property
    def arg_names(self) -> tuple[str, ...]:
        return tuple(f"parameter_{i}" for i in range(len(self.parameters)))

    @property
    def forward_names(self) -> tuple[str, ...]:
        return self._forward_names

    @property
    def backward_names(self) -> tuple[str, ...]:
        return self._backward_names

    def width(self, width: int | None) -> None:
        """Nobody knows what the module makes of its input."""
        return None

    def forward(self, x: Tensor, **sides: Tensor) -> Any:
        y, contexts, *more = fused_forward(self.module, [self], x, sides)
        return y, contexts[0], *more

    def backward(self, ctx: Context, dy: Tensor, **sides: Tensor) -> Any:
        dx, grads, *more = fused_backward(self.module, [self], [ctx], dy, sides)
        return dx, grads[0], *more

    @property
    def title(self) -> str:
        return type(self.module).__name__

    def __repr__(self) -> str:
        return self.title


def _names(first: str, mode: str, count: int) -> tuple[str, ...]:
    return tuple(first if i == 0 else f"{mode}_{i}" for i in range(count))


def fused_forward(module: FusibleOperationLike, members: Sequence[Op], x: Tensor, sides: Mapping[str, Any]) -> Any:
    """``(y, contexts[, side outputs])`` of ``module.fuser_forward``, which stands for ``members``.

    ``sides``: their side inputs from outside, and the values of the whole call.
    """
    state = current_pass()
    inputs, outputs = outer_sides(members)
    contexts = [_context(member, state.kind) for member in members]
    for member, context in zip(members, contexts, strict=True):
        context._call_inputs = {name: sides[name] for name in member.call_inputs}
        state.call[member.position] = context
    following, y_slot = _descriptor(members[-1].y_dtype)
    before, dx_slot = _descriptor(members[0].dx_dtype)
    state.call["before", members[0].position] = before, dx_slot
    with _Scaled(module, members, "forward", [(following, y_slot)]), ambient():
        returned = module.fuser_forward(
            contexts,
            nvte.unpadded(x).data,
            basic_op_extra_inputs=[
                tuple(sides[name].data if name in outer else None for name in member.side_inputs)  # type: ignore[misc]
                for member, outer in zip(members, inputs, strict=True)
            ],
            prev_op_grad_output_quantizer=before,
            next_op_input_quantizer=following,
            basic_op_kwargs=[state.call.get(("kwargs", member.position), {}) for member in members],
        )
    output, extra = _returned(module, "fuser_forward", returned, ("output", "extra outputs"))
    if output is None:
        raise _without(module, "fuser_forward", "an output")
    y = wrapped(output, members[-1].y_dtype)
    if state.kind == "forward":
        check_saved(module, members, contexts)
    saved = [context._flattened() if state.kind == "forward" else {} for context in contexts]
    return (y, saved, _outgoing(module, members, outputs, extra)) if any(outputs) else (y, saved)


def pass_of(module: FusibleOperationLike, kind: str, count: int) -> Callable[..., Any]:
    """A pass of ``count`` ops, with the parameters of a fused pass, that calls the code of ``module``."""

    def forward(*values: Any, **sides: Any) -> Any:
        return fused_forward(module, values[:count], values[count], sides)

    def inference(*values: Any, **sides: Any) -> Any:
        result = forward(*values, **sides)
        return result if len(result) > 2 else result[0]

    def backward(*values: Any, **sides: Any) -> Any:
        return fused_backward(module, values[:count], values[count : 2 * count], values[2 * count], sides)

    chosen = {"forward": forward, "inference": inference, "backward": backward}[kind]
    chosen.__name__ = type(module).__name__
    return chosen


def _context(member: Op, kind: str) -> OperationContext:
    context = OperationContext(requires_grad=kind == "forward" and needs_backward(member))
    context._op = None if isinstance(member, OpaqueCode) else member
    return context


def _outgoing(module: FusibleOperationLike, members: Sequence[Op], outputs: Sequence[tuple[str, ...]], extra: Any) -> dict[str, Tensor]:
    """By name, the side outputs that leave the fused operation, taken from the extra outputs that the module returned."""
    found: dict[str, Tensor] = {}
    for member, names, values in zip(members, outputs, _each(module, members, extra, "fuser_forward"), strict=True):
        if names and len(values) != len(member.routes):
            do, of = "return all of them, in order", f"what {type(module).__name__}.fuser_forward returns for {member!r}"
            raise ArgumentError(expected(f"{len(member.routes)} extra outputs", of=of, got=len(values), do=do))
        for route, value in zip(member.routes, values, strict=False):
            found.update({name: make_nvte_tensor(value) for name in route if name in names})
    return found


def fused_backward(module: FusibleOperationLike, members: Sequence[Op], ctxs: Sequence[Context], dy: Tensor, sides: Mapping[str, Any]) -> Any:
    """``(dx, gradients of each member's parameters[, gradients of side inputs])`` of ``module.fuser_backward``.

    ``sides``: the gradients of their side outputs that leave, and the values of the whole call.
    """
    state = current_pass()
    inputs, outputs = outer_sides(members)
    contexts: list[OperationContext] = []
    for member, ctx in zip(members, ctxs, strict=True):
        context = state.call.get(member.position) or OperationContext()
        context._op = None if isinstance(member, OpaqueCode) else member
        context._call_inputs = {name: sides[name] for name in member.call_inputs}
        context._unflatten(ctx)
        contexts.append(context)
    extra = [
        tuple(_sum([sides[name] for name in route if name in outer]) for route in member.routes)
        for member, outer in zip(members, outputs, strict=True)
    ]
    lent = [state.call.get(("before", members[0].position)) or _descriptor(members[0].dx_dtype)]
    for index, (basic, member, context) in enumerate(zip(module.basic_operations(), members, contexts, strict=True)):
        if not isinstance(member, OpaqueCode):
            tell(context, basic, member, None if index else lent[0][0])
    with _Scaled(module, members, "backward", lent), ambient():
        returned = module.fuser_backward(contexts, nvte.unpadded(dy).data, basic_op_grad_extra_outputs=extra)
    for context in contexts:
        context._let_go()
    dx, grads, extra_grads = _returned(module, "fuser_backward", returned, _GRADIENTS)
    if dx is None and members[0].wants("x"):
        raise _without(module, "fuser_backward", "the gradient of the input")
    result = wrapped(dx, members[0].dx_dtype) if dx is not None else None
    each = _each(module, members, grads, "fuser_backward")
    parameters = [_parameter_grads(module, member, list(values)) for member, values in zip(members, each, strict=True)]
    if not any(inputs):
        return result, parameters
    found: dict[str, Tensor | None] = {}
    for member, outer, values in zip(members, inputs, _each(module, members, extra_grads, "fuser_backward"), strict=True):
        if outer and len(values) != len(member.side_inputs):
            do, of = "return one each, None for what needs none", f"what {type(module).__name__}.fuser_backward returns for {member!r}"
            raise ArgumentError(expected(f"{len(member.side_inputs)} gradients of extra inputs", of=of, got=len(values), do=do))
        grads_of = zip(member.side_inputs, values, strict=False)
        found.update({name: None if v is None else make_nvte_tensor(v) for name, v in grads_of if name in outer})
    return result, parameters, found


_GRADIENTS = ("gradient of the input", "gradients of parameters", "gradients of extra inputs")


def _returned(module: FusibleOperationLike, name: str, values: Any, parts: Sequence[str]) -> Sequence[Any]:
    """What a pass of ``module`` has returned. Raises ``ArgumentError`` where it has not these parts."""
    if not isinstance(values, tuple | list) or len(values) != len(parts):
        do = "return them, as FusibleOperation says"
        raise ArgumentError(expected(f"({', '.join(parts)})", of=f"what {type(module).__name__}.{name} returns", got=shown(values), do=do))
    return values


def _without(module: FusibleOperationLike, name: str, what: str) -> ArgumentError:
    return ArgumentError(expected(what, of=f"what {type(module).__name__}.{name} returns", got="None", do="return a tensor"))


def _each(module: FusibleOperationLike, members: Sequence[Op], values: Iterable[Iterable[Any]], name: str) -> list[tuple[Any, ...]]:
    there = isinstance(values, Iterable)
    found = [tuple(value) if isinstance(value, Iterable) else None for value in values] if there else []
    if len(found) != len(members) or None in found:
        of, what = f"what {type(module).__name__}.{name} returns", "gradients" if name == "fuser_backward" else "extra outputs"
        got = "None for one of them" if None in found else len(found) if there else shown(values)
        raise ArgumentError(expected(f"{what} of {len(members)} basic operations", of=of, got=got, do="give an entry, () perhaps, each"))
    return [value for value in found if value is not None]


def _parameter_grads(module: FusibleOperationLike, member: Op, grads: list[Any]) -> list[Tensor | None]:
    if len(grads) != len(member.arg_names):
        of = f"what the backward of {type(module).__name__} returns"
        do = "return (dx, gradients), with None for what needs none"
        raise ArgumentError(expected(f"gradients of {len(member.arg_names)} parameters", of=of, got=len(grads), do=do))
    return [None if grad is None else Tensor(grad, DType.Byte) for grad in grads]


def _sum(values: Sequence[Tensor | None]) -> torch.Tensor | None:
    there: list[torch.Tensor] = [value.data for value in values if value is not None]
    return functools.reduce(torch.add, there) if there else None


def _descriptor(type: Type) -> tuple[Any, str]:
    """A quantizer into the type for a neighbour to use, or None; and its slot under delayed scaling."""
    if not isinstance(type, QuantizedType) or (type.slot and type.slot not in current_pass().scales):
        return None, ""
    return nvte.quantizer_for(type), type.slot


class _Scaled:
    """While open, the quantizers of delayed scaling that belong to ``members`` have the scales of the running pass. At the end the amaxes that they
    observed are noted in the pass. ``lent``: further quantizers with their slots."""

    def __init__(
        self, module: FusibleOperationLike, members: Sequence[Op], mode: Literal["forward", "backward"], lent: Sequence[tuple[Any, str]]
    ) -> None:
        self._quantizers = [(quantizer, slot) for quantizer, slot in lent if isinstance(quantizer, Float8Quantizer)]
        for member, basic in zip(members, module.basic_operations(), strict=True):
            for name, quantizer in zip(basic.quantized_names(mode), (basic._quantizers or {}).get(mode, ()), strict=False):
                if isinstance(quantizer, Float8Quantizer):
                    slot = f"{member.position}.{name}"
                    quantizer.scale, quantizer.amax = current_pass().scale(slot), None
                    self._quantizers.append((quantizer, slot))

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            for quantizer, slot in self._quantizers:
                if quantizer.amax is not None and slot not in current_pass().amaxes:
                    nvte.note_amax(slot, quantizer.amax)
