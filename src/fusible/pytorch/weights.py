"""Parameters as the passes of a plan take them: those that a plan wants in 8 bits are quantized when they have changed, not at every call."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from fusible.compute_pipeline import Plan, QuantizedArg, quantize_args
from fusible.nvte import DType, QuantizedType, Tensor, Type, flatten, make_nvte_tensor, nvte_dtype, unflatten
from fusible.pytorch.executors import Executor
from fusible.pytorch.scaling import Snapshot
from fusible.quantized import Float8Tensor, Float8TensorStorage, QuantizedTensor

__all__ = ["PLAIN", "QuantizedWeights", "held_type"]

PLAIN = (torch.nn.Parameter, torch.Tensor)
"""Classes of parameters that are held as they are."""
_steps = 0


def _count_step(*_: Any) -> None:
    """Some optimizers write by ``.data``, which leaves a tensor's version as it was."""
    global _steps
    _steps += 1


register_optimizer_step_post_hook(_count_step)


def held_type(parameter: torch.Tensor) -> Type:
    """The type that a parameter is held in."""
    if type(parameter) in PLAIN or not isinstance(parameter, QuantizedTensor):
        return nvte_dtype(parameter.dtype)
    if isinstance(parameter, Float8Tensor):
        return QuantizedType(DType(int(parameter._fp8_dtype)), "current")
    storage = parameter.storage_without_autograd()
    return QuantizedType.of(storage._quantizer).read(**storage.get_usages())


class _Held(NamedTuple):
    parameter: weakref.ref[torch.Tensor]
    state: Hashable
    tensor: Tensor
    amaxes: dict[str, torch.Tensor]

    def stands_for(self, parameter: torch.Tensor, state: Hashable) -> bool:
        return state is not None and self.parameter() is parameter and self.state == state


class QuantizedWeights:
    """The 8-bit copies of a pipeline's parameters. One is made anew when its parameter has been written to since: by an optimizer of torch, or by
    any operation that torch's version counter sees. Writing to ``parameter.data`` elsewhere goes unseen, as it does in autograd.
    """

    def __init__(self) -> None:
        self._held: dict[QuantizedArg, _Held] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_held": {}}

    def prepare(
        self, plan: Plan, args: Sequence[torch.Tensor], snapshot: Snapshot | None, executor: Executor
    ) -> tuple[Sequence[Any], dict[str, torch.Tensor]]:
        """The parameters as ``Tensor``s in the plan's ``arg_types``, and by slot the amaxes of those that are quantized by delayed scaling. Where the
        plan wants none in 8 bits they are ``args``.

        A parameter that has not changed keeps the copy, and so the scale, that it was given when it last did.
        """
        if not plan.quantized_args:
            return args, {}
        params = [Tensor(arg, type) for arg, type in zip(args, plan.arg_types, strict=True)]
        held = self._held
        stale: dict[QuantizedArg, Hashable] = {}
        for arg in plan.quantized_args:
            parameter = args[arg.place]
            state, known = _state_of(parameter), held.get(arg)
            if known is None or not known.stands_for(parameter, state):
                stale[arg] = state
        if stale:
            held = self._held = {**held, **_take(plan, stale, args, snapshot, executor)}
        amaxes: dict[str, torch.Tensor] = {}
        for arg in plan.quantized_args:
            params[arg.place] = held[arg].tensor
            amaxes.update(held[arg].amaxes)
        return params, amaxes


def _state_of(parameter: torch.Tensor) -> Hashable | None:
    """What changes when a parameter does; None where that cannot be told."""
    if parameter.is_inference():
        return None
    if isinstance(parameter, QuantizedTensor):
        return tuple(id(value) for value in parameter.get_metadata().values())
    steps = _steps if parameter.requires_grad else 0
    return parameter.data_ptr(), parameter._version, steps


def _take(
    plan: Plan, stale: Mapping[QuantizedArg, Hashable], args: Sequence[torch.Tensor], snapshot: Snapshot | None, executor: Executor
) -> dict[QuantizedArg, _Held]:
    """The 8-bit copies of the parameters in ``stale``; one that is held in 8 bits is its own."""
    parameters = {arg: args[arg.place] for arg in stale}
    taken = {arg: _as_it_is(parameter) for arg, parameter in parameters.items() if isinstance(parameter, QuantizedTensor)}
    amaxes: Mapping[str, torch.Tensor] = {}
    chosen = [arg for arg in stale if arg not in taken]
    if chosen:
        tensors, amaxes = _quantize(plan, chosen, args, snapshot, executor)
        taken.update(zip(chosen, tensors, strict=True))
    observed = {arg: {slot: amaxes[slot] for slot in arg.slots if slot in amaxes} for arg in stale}
    return {arg: _Held(weakref.ref(parameters[arg]), state, taken[arg], observed[arg]) for arg, state in stale.items()}


def _as_it_is(parameter: QuantizedTensor) -> Tensor:
    """Its copies; of one scaled as a whole its rows, as a transposed copy may come and go, and the passes' programs are made for one or the other."""
    if not isinstance(parameter, Float8Tensor):
        return Tensor(parameter.storage_without_autograd(), held_type(parameter))
    parameter.update_usage(rowwise_usage=True)
    fields = {**parameter.get_metadata(), "data_transpose": None}
    return Tensor(Float8TensorStorage(**fields), held_type(parameter))


def _quantize(
    plan: Plan, chosen: Sequence[QuantizedArg], args: Sequence[torch.Tensor], snapshot: Snapshot | None, executor: Executor
) -> tuple[list[Tensor], dict[str, torch.Tensor]]:
    slots = [slot for arg in chosen for slot in arg.slots]
    inputs = [args[arg.place] for arg in chosen]
    scales = [snapshot.scales[slot] for slot in slots] if snapshot is not None else []

    def program(leaves: list[Any]) -> tuple[list[Any], Any]:
        values = [make_nvte_tensor(leaf) for leaf in leaves[: len(chosen)]]
        quantized, amaxes = quantize_args(values, chosen, dict(zip(slots, leaves[len(chosen) :], strict=True)))
        results, spec = flatten(quantized)
        return [*results, *amaxes.values()], (spec, tuple(amaxes))

    with torch.no_grad():
        outputs, (spec, observed) = executor((plan, "weights", tuple(arg.place for arg in chosen)), program, [*inputs, *scales])
    end = len(outputs) - len(observed)
    return unflatten(outputs[:end], spec), dict(zip(observed, outputs[end:], strict=True))
