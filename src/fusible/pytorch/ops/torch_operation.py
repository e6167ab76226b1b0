"""Between operations written in plain torch and a plan: entries that call ``fuser_forward`` and ``fuser_backward``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fusible import nvte
from fusible.compute_pipeline import needs_backward, outer_sides
from fusible.errors import ArgumentError, expected
from fusible.nvte import DType, QuantizedType, Tensor, Type, current_pass, make_nvte_tensor
from fusible.ops import Context, Op
from fusible.ops.protocols import OpaqueCode
from fusible.pytorch.engine.torch_autocast import ambient
from fusible.quantized import Float8Quantizer, QuantizedTensor, QuantizedTensorStorage

if TYPE_CHECKING:
    from fusible.pytorch.ops.op import BasicOperation, FusibleOperation

__all__ = [
    "OperationContext",
    "TorchOperation",
    "context_names",
    "fused_backward",
    "fused_forward",
    "maybe_dequantize",
    "pass_of",
    "routes_of",
    "wrapped",
]

Saved = tuple[tuple[Any, ...], ...]


@dataclass(eq=False)
class OperationContext:
    """What the forward of one basic operation leaves for its backward: tensors by ``save_for_backward``, anything else as attributes.

    ``saved_tensors``: in backward, the tensors that forward saved, in their order. ``requires_grad``: whether backward will come by.
    """

    saved_tensors: tuple[Any, ...] | None = None
    to_save: tuple[Any, ...] | None = None
    _saved_tensors_range: tuple[int, int] | None = None  # a field of NVIDIA's, which nothing here reads
    requires_grad: bool = True

    def __post_init__(self) -> None:
        self._op: Op | None = None  # an operation of ours, as the plan resolved it,
        self._given: dict[str, Any] = {}  # the values of the whole call that it takes,
        self._tensors: Context | None = None  # and what it saves, by name; None before it has
        self._spec: list[nvte.StorageSpec | nvte.Shell | str] | None = None

    def save_for_backward(self, *tensors: Any) -> None:
        """Keep tensors (torch's, quantized ones, or None) for a backward that is written in torch too. To be called in forward, once.

        For the backward of an operation of ours: ``operation.save_for_backward(ctx, ...)``, by name.
        """
        self.to_save = tensors

    def _taken_apart(self) -> Context:
        """What autograd is to keep, as entries of a plan's context; the rest stays here."""
        if self._op is not None and self.to_save is None:
            tensors, self._tensors = self._tensors or {}, None
            return tensors
        leaves: list[Any] = []
        self._spec = []
        for value in self.to_save or ():
            if value is None:
                self._spec.append("none")
            elif isinstance(value, torch.Tensor):
                self._spec.append("tensor")
                leaves.append(value)
            else:
                parts, spec = nvte.take_apart(value)
                self._spec.append(spec)
                leaves += parts
        self.to_save = None
        return {f"saved_{i}": Tensor(leaf, DType.Byte) for i, leaf in enumerate(leaves)}  # whatever it is: nobody but the operation looks at it

    def _put_together(self, context: Context) -> None:
        """The inverse, for backward."""
        if self._spec is None:
            self._tensors = context
            self.saved_tensors = tuple(tensor.data for tensor in context.values())
            return
        leaves = iter([tensor.data for tensor in context.values()])
        values: list[Any] = []
        for spec in self._spec:
            values.append(None if spec == "none" else next(leaves) if isinstance(spec, str) else nvte.put_together(leaves, spec))
        self.saved_tensors = _not_cleared(values)

    def _let_go(self) -> None:
        """Forget what was saved, which would live as long as the call."""
        self.saved_tensors, self._tensors = None, None


def _not_cleared(tensors: Iterable[Any]) -> tuple[Any, ...]:
    """Tensors for code that may have been written for NVIDIA's package, whose functions empty what a backward has used, but for what is marked so:
    these may be the caller's."""
    found = tuple(tensors)
    for tensor in found:
        if isinstance(tensor, torch.Tensor):
            tensor._do_not_clear = True  # type: ignore[attr-defined]
    return found


class TorchOperation(OpaqueCode, Op):
    """The entry of a plan that calls a basic operation's own ``fuser_forward`` and ``fuser_backward``."""

    overridable = True
    quantizes_y = True
    quantizes_dx = True

    def __init__(self, module: BasicOperation) -> None:
        self.module = module
        self.parameters = [make_nvte_tensor(parameter) for parameter in module._parameters.values() if parameter is not None]
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


def fused_forward(module: FusibleOperation, members: Sequence[Op], x: Tensor, sides: Mapping[str, Any]) -> Any:
    """``(y, contexts[, side outputs])`` of ``module.fuser_forward``, which stands for ``members``.

    ``sides``: their side inputs from outside, and the values of the whole call.
    """
    state = current_pass()
    inputs, outputs = outer_sides(members)
    contexts = [_context(member, state.kind) for member in members]
    for member, context in zip(members, contexts, strict=True):
        context._given = {name: sides[name] for name in member.given}
        state.call[member.position] = context
    following, y_slot = _descriptor(members[-1].y_dtype)
    before, dx_slot = _descriptor(members[0].dx_dtype)
    state.call["before", members[0].position] = before, dx_slot
    with _Scaled(module, members, "forward", [(following, y_slot)]), ambient():
        output, extra = module.fuser_forward(
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
    y = wrapped(output, members[-1].y_dtype)
    if state.kind == "forward":
        _check_saved(module, members, contexts)
    saved = [context._taken_apart() if state.kind == "forward" else {} for context in contexts]
    return (y, saved, _outgoing(module, members, outputs, extra)) if any(outputs) else (y, saved)


def pass_of(module: FusibleOperation, kind: str, count: int) -> Callable[..., Any]:
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


def _outgoing(module: FusibleOperation, members: Sequence[Op], outputs: Sequence[tuple[str, ...]], extra: Any) -> dict[str, Tensor]:
    """The side outputs that leave, of the extra outputs that a module returned."""
    found: dict[str, Tensor] = {}
    for member, names, values in zip(members, outputs, _each(module, members, extra, "fuser_forward"), strict=True):
        routes = routes_of(member)
        if names and len(values) != len(routes):
            do, of = "return all of them, in order", f"what {type(module).__name__}.fuser_forward returns for {member!r}"
            raise ArgumentError(expected(f"{len(routes)} extra outputs", of=of, got=len(values), do=do))
        for route, value in zip(routes, values, strict=False):
            found.update({name: make_nvte_tensor(value) for name in route if name in names})
    return found


def fused_backward(module: FusibleOperation, members: Sequence[Op], ctxs: Sequence[Context], dy: Tensor, sides: Mapping[str, Any]) -> Any:
    """``(dx, gradients of each member's parameters[, gradients of side inputs])`` of ``module.fuser_backward``.

    ``sides``: the gradients of their side outputs that leave, and the values of the whole call.
    """
    state = current_pass()
    inputs, outputs = outer_sides(members)
    contexts: list[OperationContext] = []
    for member, ctx in zip(members, ctxs, strict=True):
        context = state.call.get(member.position) or OperationContext()
        context._op = None if isinstance(member, OpaqueCode) else member
        context._given = {name: sides[name] for name in member.given}
        context._put_together(ctx)
        contexts.append(context)
    extra = [
        tuple(_sum([sides[name] for name in route if name in outer]) for route in routes_of(member))
        for member, outer in zip(members, outputs, strict=True)
    ]
    lent = [state.call.get(("before", members[0].position)) or _descriptor(members[0].dx_dtype)]
    for index, (basic, member, context) in enumerate(zip(module.basic_operations(), members, contexts, strict=True)):
        if not isinstance(member, OpaqueCode):
            _tell(context, basic, member, None if index else lent[0][0])
    with _Scaled(module, members, "backward", lent), ambient():
        dx, grads, extra_grads = module.fuser_backward(contexts, nvte.unpadded(dy).data, basic_op_grad_extra_outputs=extra)
    for context in contexts:
        context._let_go()
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


def routes_of(op: Op) -> tuple[tuple[str, ...], ...]:
    """For each extra output of an op, in NVIDIA's sense, the side outputs that it goes to."""
    return op.routes or tuple((name,) for name in op.side_outputs)


@functools.cache
def context_names(op: type[Op]) -> tuple[str, ...]:
    """The names of what an op's backward needs, of ``Op.context``."""
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return tuple(name for name, p in inspect.signature(op.context).parameters.items() if name != "self" and p.kind not in kinds)


def _check_saved(module: FusibleOperation, members: Sequence[Op], contexts: Sequence[OperationContext]) -> None:
    """Whether a forward that was written in torch has left what the backward of our ops will look for: by name, or in the order in which the forward
    of NVIDIA's operation of that kind saves it."""
    for index, (basic, member, context) in enumerate(zip(module.basic_operations(), members, contexts, strict=True)):
        done = isinstance(member, OpaqueCode) or not context.requires_grad or context._tensors is not None or module.fuses[1]
        if done or _named(basic, member, context):
            continue
        place = f"basic_ops[{index}]" if module.is_fused_op else "self"
        names = [name for name in context_names(type(member)) if name not in member.arg_names]
        written = f"{type(module).__name__}.{'fuser_forward' if module.is_fused_op else 'op_forward'}"
        of = f"the context of {place} ({type(basic).__name__}) after {written}"
        got = "nothing" if context.to_save is None else "tensors without names"
        do = f"call {place}.save_for_backward(ctx, {', '.join(f'{name}=...' for name in names)})"
        if basic.keeps_unnamed:
            do = f"call {place}.fuser_forward with that context"
        wanted = f" ({', '.join(context_names(type(member)))})" if names else ""
        raise ArgumentError(expected(f"what its own backward needs{wanted}", of=of, got=got, do=do))


def _named(basic: BasicOperation, member: Op, context: OperationContext) -> bool:
    """Give tensors that were saved without names theirs, where they are what NVIDIA's operation of that kind saves."""
    found = None if basic.keeps_unnamed else basic.from_theirs(member, context.to_save, context)
    if found:
        basic.save_for_backward(context, **found)
    if found is not None:
        context.to_save = None
    return found is not None


def _tell(context: OperationContext, basic: BasicOperation, member: Op, lent: Any) -> None:
    """Leave in the context of an op's own forward what a backward that is written for NVIDIA's reads there."""
    if context._tensors is None:
        return
    kept = {name: nvte.unpadded(tensor).data for name, tensor in context._tensors.items()}
    context.saved_tensors = _not_cleared(basic.as_theirs(member, kept))
    for name, value in basic.told(member, kept, lent).items():
        if not hasattr(context, name):
            setattr(context, name, value)


def _each(module: FusibleOperation, members: Sequence[Op], values: Iterable[Iterable[Any]], name: str) -> list[tuple[Any, ...]]:
    found = [tuple(value) for value in values]
    if len(found) != len(members):
        of, what = f"what {type(module).__name__}.{name} returns", "gradients" if name == "fuser_backward" else "extra outputs"
        raise ArgumentError(expected(f"{what} of {len(members)} basic operations", of=of, got=len(found), do="give an entry, () perhaps, each"))
    return found


def _parameter_grads(module: FusibleOperation, member: Op, grads: list[Any]) -> list[Tensor | None]:
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


def wrapped(data: Any, type: Type | None) -> Tensor:
    """What a module returned or hands on, as a tensor of a plan: quantized as it was asked for, or not at all."""
    if isinstance(data, QuantizedTensor):
        data = data.storage_without_autograd()  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(data, QuantizedTensorStorage):
        return Tensor(data, type) if isinstance(type, QuantizedType) else make_nvte_tensor(data)
    return make_nvte_tensor(data)


def maybe_dequantize(tensor: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A plain tensor of the values of ``tensor``, which may be quantized, in ``dtype`` (default: its own)."""
    if isinstance(tensor, (QuantizedTensor, QuantizedTensorStorage)):
        return tensor.dequantize(dtype=dtype)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    return tensor if dtype is None or tensor.dtype is dtype else tensor.to(dtype)


class _Scaled:
    """While open, the quantizers of delayed scaling that belong to ``members`` have the scales of the running pass. What they saw goes to the
    pass."""

    def __init__(self, module: FusibleOperation, members: Sequence[Op], mode: Any, lent: Sequence[tuple[Any, str]]) -> None:
        self._quantizers = [(quantizer, slot) for quantizer, slot in lent if isinstance(quantizer, Float8Quantizer)]
        for member, basic in zip(members, module.basic_operations(), strict=True):
            for name, quantizer in zip(basic.quantized_names(mode), (basic._quantizers or {}).get(mode, ()), strict=False):
                if isinstance(quantizer, Float8Quantizer):
                    slot = f"{member.position}.{name}"
                    quantizer.scale, quantizer.amax = current_pass().scale(slot), None
                    self._quantizers.append((quantizer, slot))

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            for quantizer, slot in self._quantizers:
                if quantizer.amax is not None and slot not in current_pass().amaxes:
                    nvte.note_amax(slot, quantizer.amax)
