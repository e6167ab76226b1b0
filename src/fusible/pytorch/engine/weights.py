"""Parameters as the passes of a plan take them: those that a plan wants in 8 bits are quantized when they have changed, not at every call."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fusible.compute_pipeline import Plan, QuantizedArg, quantize_args
from fusible.nvte import DType, QuantizedType, Tensor, Type, flatten, make_nvte_tensor, nvte_dtype, unflatten
from fusible.pytorch.engine.frozen import current_frozen_weights
from fusible.pytorch.engine.program import Executor
from fusible.pytorch.engine.scaling import ScalingOwner, Snapshot
from fusible.quantized import DelayedScaling, Float8Quantizer, Float8Tensor, Float8TensorStorage, GroupedTensor, QuantizedTensor, Quantizer
from fusible.tex.backends.cpu import fingerprints

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["DelayedWeights", "PLAIN", "QuantizedWeights", "WeightCopy", "stored_key", "stored_type", "without_unread_copy"]

PLAIN = (torch.nn.Parameter, torch.Tensor)
"""Classes of parameters that are held as they are."""

Fingerprint = tuple[int, int]


def stored_type(parameter: torch.Tensor) -> Type:
    """The type in which a parameter is held."""
    if type(parameter) in PLAIN or not isinstance(parameter, QuantizedTensor):
        return nvte_dtype(parameter.dtype)
    if isinstance(parameter, Float8Tensor):
        return _under_one_scale(parameter._fp8_dtype)
    return QuantizedType.of(parameter._quantizer).read(**parameter.get_usages())


def stored_key(parameter: torch.Tensor) -> Hashable:
    """What tells the ``stored_type`` of a parameter from others, in the form in which it is at hand."""
    if parameter.__class__ in PLAIN or not isinstance(parameter, QuantizedTensor) or isinstance(parameter, Float8Tensor):
        return stored_type(parameter)
    kind = parameter._quantizer.__class__
    if getattr(kind, "_value_key", None) is not Quantizer._value_key:  # it is equal by other than its options
        return stored_type(parameter)
    options = [_Unchanged(value) if isinstance(value, torch.Tensor) else value for value in vars(parameter._quantizer).values()]
    if any([option.__class__ is _Unchanged and option.version is None for option in options]):
        return stored_type(parameter)
    return (kind, *parameter.get_usages().values(), *options)


class _Unchanged:
    """A tensor that is one of the options of a quantizer: equal to the same one with the same values."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.version = None if tensor.is_inference() else tensor._version

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Unchanged) and other.tensor is self.tensor and other.version == self.version

    def __hash__(self) -> int:
        return id(self.tensor)


@functools.cache
def _under_one_scale(dtype: int) -> QuantizedType:
    """One object a dtype: keys of plans are compared at every call, and what is the same is equal without a look."""
    return QuantizedType(DType(int(dtype)), "current")


@dataclass(eq=False)
class WeightCopy:
    """An 8-bit copy, and of what it is one: of these bytes at this address, cast with these scales; not of a tensor object, which may be swapped."""

    look: Any
    """The result of ``_look`` when it was made."""
    fingerprint: Fingerprint | None
    """The fingerprint of the bytes that it was made of; None where none was taken, so that nothing vouches for it."""
    tensor: Tensor
    amaxes: dict[str, torch.Tensor]
    recurs: bool
    """Whether its parameter has come more than once looking the same, so that a fingerprint is worth its time."""


class QuantizedWeights:
    """The 8-bit copies of a pipeline's parameters.

    A copy is used again only where its scales are those that it was cast with, and the parameter holds the bytes that it was made of. For the bytes
    a fingerprint vouches, for which a native kernel reads all of them: no counter sees a write to ``parameter.data``, to a numpy array over it, or of
    another process. Where there is no fingerprint (a device other than the CPU, which one would have to wait for) nothing vouches for a copy, and
    every call makes its own. A parameter that is held in 8 bits is taken as it lies, and is not copied.

    A copy that nobody comes back for has cost its fingerprint for nothing; then the next ones go without, until a parameter comes twice looking the
    same. So training that takes a step after each forward takes no fingerprints, and where weights do recur (micro-batches, forwards that are
    repeated, frozen weights, inference) one copy serves all. In a block of ``frozen_weights`` one fingerprint vouches for all of its calls.
    """

    def __init__(self) -> None:
        self._copies: dict[QuantizedArg, WeightCopy] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_copies": {}}

    def prepare(
        self, plan: Plan, args: Sequence[torch.Tensor], snapshot: Snapshot | None, executor: Executor
    ) -> tuple[Sequence[Any], dict[str, torch.Tensor]]:
        """The parameters as ``Tensor``s in the plan's ``arg_types``, and by slot the amaxes of those that are quantized by delayed scaling. Where the
        plan wants none in 8 bits they are ``args``."""
        if not plan.quantized_args:
            return args, {}
        params = [Tensor(arg, type) for arg, type in zip(args, plan.arg_types, strict=True)]
        copied: list[QuantizedArg] = []
        for arg in plan.quantized_args:
            parameter = args[arg.place]
            if isinstance(parameter, QuantizedTensor):
                params[arg.place] = _as_it_is(parameter, arg.stored)
            else:
                copied.append(arg)
        return params, self._copy(plan, copied, params, args, snapshot, executor) if copied else {}

    def _copy(
        self,
        plan: Plan,
        wanted: Sequence[QuantizedArg],
        params: list[Tensor],
        args: Sequence[torch.Tensor],
        snapshot: Snapshot | None,
        executor: Executor,
    ) -> dict[str, torch.Tensor]:
        """Put the copies of the parameters ``wanted`` into ``params``: those that are there, and new ones of what has changed. Their amaxes, by
        slot."""
        copies = self._copies  # read once, and replaced as a whole: another thread may be here too
        looks = {arg: _look(args[arg.place], arg, snapshot) for arg in wanted}
        again = {arg for arg, look in looks.items() if look is not None and arg in copies and copies[arg].look == look}
        frozen = current_frozen_weights()
        sure = {arg for arg in again if frozen.vouches_for(copies[arg])} if frozen is not None else set[QuantizedArg]()
        asked = [arg for arg, look in looks.items() if look is not None and arg not in sure]
        taken = _fingerprints([arg for arg in asked if frozen is not None or arg not in copies or copies[arg].recurs or arg in again], args)
        stale = [arg for arg in looks if arg not in sure and (arg not in again or not _vouched(copies[arg], taken.get(arg)))]
        for arg in again:
            copies[arg].recurs = True
        if stale:
            tensors, observed = _quantize(plan, stale, args, snapshot, executor)
            of_slots = [{slot: observed[slot] for slot in arg.slots if slot in observed} for arg in stale]
            quantized = zip(stale, tensors, of_slots, strict=True)
            made = {arg: WeightCopy(looks[arg], taken.get(arg), tensor, found, arg in again) for arg, tensor, found in quantized}
            copies = self._copies = {**copies, **made}
        if frozen is not None:
            for arg in taken:
                frozen.keep(copies[arg], args[arg.place])
        amaxes: dict[str, torch.Tensor] = {}
        for arg in wanted:
            params[arg.place] = copies[arg].tensor
            amaxes.update(copies[arg].amaxes)
        return amaxes


@dataclass(frozen=True)
class DelayedWeights:
    """The parameters of a call that are held in 8 bits and written by delayed scaling: by slot, the quantizers that what is written to them goes by.

    Their scales follow from the pipeline's state: what was written before an iteration is observed in it, and what is written after it goes by the
    scale that follows.
    """

    quantizers: dict[str, Float8Quantizer]
    recipe: DelayedScaling
    device: torch.device
    group: ProcessGroup | None

    @classmethod
    def of(cls, plan: Plan, args: Sequence[torch.Tensor], device: torch.device, group: ProcessGroup | None) -> DelayedWeights | None:
        if plan.delayed is None or not any([isinstance(arg, Float8Tensor) for arg in args]):
            return None
        quantizers = {slot: arg._quantizer for slot, arg in zip(plan.arg_slots, args, strict=True) if isinstance(arg, Float8Tensor)}
        found = {slot: quantizer for slot, quantizer in quantizers.items() if _records(quantizer) and slot in plan.state.forward}
        return cls(found, plan.delayed, device, group) if found else None

    def amaxes(self) -> dict[str, torch.Tensor]:
        """The largest magnitudes that were written since the last iteration; 0 where nothing was."""
        return {slot: quantizer.amax.detach().to(self.device, torch.float32).view(1).clone() for slot, quantizer in self.quantizers.items()}

    def update_scales(self, owner: ScalingOwner) -> None:
        """The call has succeeded, and its amaxes are observed: scale what comes next by what follows from them."""
        scales = owner.snapshot(self.recipe, self.device, self.group).scales
        for slot, quantizer in self.quantizers.items():
            quantizer.scale.copy_(scales[slot].view_as(quantizer.scale))
            quantizer.amax.zero_()
            if quantizer.first_scale is not None:
                quantizer.first_scale.observed = True


def _records(quantizer: Any) -> bool:
    return isinstance(quantizer, Float8Quantizer) and isinstance(quantizer.amax, torch.Tensor)


def _look(parameter: torch.Tensor, arg: QuantizedArg, snapshot: Snapshot | None) -> Any:
    """A cheap key (address, version, shape, scales) that differs where a parameter or its scale is another than before; its dtype is the arg's. None
    on a device whose scales would have to be waited for."""
    if not parameter.is_cpu:
        return None
    scales = tuple([snapshot.values[slot] for slot in arg.slots]) if snapshot is not None else ()
    version = None if parameter.is_inference() else parameter._version
    return parameter.data_ptr(), version, parameter.shape, scales


def _fingerprints(chosen: Sequence[QuantizedArg], args: Sequence[torch.Tensor]) -> dict[QuantizedArg, Fingerprint]:
    found = fingerprints([args[arg.place] for arg in chosen]) if chosen else None
    return {} if found is None else dict(zip(chosen, found, strict=True))


def _vouched(copy: WeightCopy, now: Fingerprint | None) -> bool:
    """Whether a copy whose ``look`` is the same may be used: the bytes have the same fingerprint."""
    return now is not None and now == copy.fingerprint


def without_unread_copy(quantizer: Quantizer) -> Quantizer:
    """``quantizer`` of weights without the column-wise copy, where passes read the rows alone: of a tensor under one scale (``_as_it_is``)."""
    return quantizer.with_usages(rowwise=True, columnwise=False) if QuantizedType.of(quantizer).per_tensor else quantizer


def _as_it_is(parameter: QuantizedTensor, type: Type) -> Tensor:
    """Its copies; of one scaled as a whole its rows, as a transposed copy may come and go, and the passes' programs are made for one or the other."""
    if isinstance(parameter, GroupedTensor):
        return Tensor(parameter.storage_without_autograd(), type)
    if not isinstance(parameter, Float8Tensor):
        return Tensor(parameter, type)
    if parameter._data is None:
        parameter.update_usage(rowwise_usage=True)
    fields = {"data": parameter._data, "fp8_scale_inv": parameter._scale_inv, "fp8_dtype": parameter._fp8_dtype, "fake_dtype": parameter._dtype}
    return Tensor(Float8TensorStorage(**fields, quantizer=parameter._quantizer), type)


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

    with torch.inference_mode(False), torch.no_grad():  # the next call, for which the copies are kept, may be one that trains
        outputs, (spec, observed) = executor((plan, "weights", tuple(arg.place for arg in chosen)), program, [*inputs, *scales])
    end = len(outputs) - len(observed)
    return unflatten(outputs[:end], spec), dict(zip(observed, outputs[end:], strict=True))
