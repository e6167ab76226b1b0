"""Parameters as the passes of a plan take them: those that a plan wants in 8 bits are quantized when they have changed, not at every call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fusible.compute_pipeline import Plan, QuantizedArg, quantize_args
from fusible.nvte import DType, QuantizedType, Tensor, Type, flatten, make_nvte_tensor, nvte_dtype, unflatten
from fusible.pytorch.engine.frozen import current_frozen_weights
from fusible.pytorch.engine.program import Executor
from fusible.pytorch.engine.scaling import ScalingOwner, Snapshot
from fusible.quantized import DelayedScaling, Float8Quantizer, Float8Tensor, Float8TensorStorage, QuantizedTensor
from fusible.tex.backends.cpu import fingerprints

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["DelayedWeights", "PLAIN", "QuantizedWeights", "WeightCopy", "stored_type"]

PLAIN = (torch.nn.Parameter, torch.Tensor)
"""Classes of parameters that are held as they are."""

Fingerprint = tuple[int, int]


def stored_type(parameter: torch.Tensor) -> Type:
    """The type in which a parameter is held."""
    if type(parameter) in PLAIN or not isinstance(parameter, QuantizedTensor):
        return nvte_dtype(parameter.dtype)
    if isinstance(parameter, Float8Tensor):
        return QuantizedType(DType(int(parameter._fp8_dtype)), "current")
    storage = parameter.storage_without_autograd()
    return QuantizedType.of(storage._quantizer).read(**storage.get_usages())


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
        self._held: dict[QuantizedArg, WeightCopy] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_held": {}}

    def prepare(
        self, plan: Plan, args: Sequence[torch.Tensor], snapshot: Snapshot | None, executor: Executor
    ) -> tuple[Sequence[Any], dict[str, torch.Tensor]]:
        """The parameters as ``Tensor``s in the plan's ``arg_types``, and by slot the amaxes of those that are quantized by delayed scaling. Where the
        plan wants none in 8 bits they are ``args``."""
        if not plan.quantized_args:
            return args, {}
        params = [Tensor(arg, type) for arg, type in zip(args, plan.arg_types, strict=True)]
        held = self._held  # read once, and replaced as a whole: another thread may be here too
        looks = {arg: _look(args[arg.place], arg, snapshot) for arg in plan.quantized_args}
        again = {arg for arg, look in looks.items() if look is not None and arg in held and held[arg].look == look}
        frozen = current_frozen_weights()
        sure = {arg for arg in again if frozen.vouches_for(held[arg])} if frozen is not None else set[QuantizedArg]()
        asked = [arg for arg, look in looks.items() if look is not None and arg not in sure]
        taken = _fingerprints([arg for arg in asked if frozen is not None or arg not in held or held[arg].recurs or arg in again], args)
        stale = [arg for arg in looks if arg not in sure and (arg not in again or not _vouched(held[arg], taken.get(arg), args[arg.place]))]
        for arg in again:
            held[arg].recurs = True
        if stale:
            tensors, amaxes_of = _take(plan, stale, args, snapshot, executor)
            made = {arg: WeightCopy(looks[arg], taken.get(arg), tensors[arg], amaxes_of[arg], arg in again) for arg in stale}
            held = self._held = {**held, **made}
        if frozen is not None:
            for arg in taken:
                frozen.keep(held[arg], args[arg.place])
        amaxes: dict[str, torch.Tensor] = {}
        for arg in plan.quantized_args:
            params[arg.place] = held[arg].tensor
            amaxes.update(held[arg].amaxes)
        return params, amaxes


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
        held = {slot: arg._quantizer for slot, arg in zip(plan.arg_slots, args, strict=True) if isinstance(arg, Float8Tensor)}
        found = {slot: quantizer for slot, quantizer in held.items() if _records(quantizer) and slot in plan.state.forward}
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


def _records(quantizer: Any) -> bool:
    return isinstance(quantizer, Float8Quantizer) and isinstance(quantizer.amax, torch.Tensor)


def _look(parameter: torch.Tensor, arg: QuantizedArg, snapshot: Snapshot | None) -> Any:
    """A cheap key (address, version, dtype, shape, scales) that differs where a parameter or its scale is another than before. None on a device whose
    scales would have to be waited for."""
    if isinstance(parameter, QuantizedTensor):
        return _Fields(parameter.get_metadata().values())
    if not parameter.is_cpu:
        return None
    scales = tuple([snapshot.values[slot] for slot in arg.slots]) if snapshot is not None else ()
    version = None if parameter.is_inference() else parameter._version
    return parameter.data_ptr(), version, parameter.dtype, parameter.shape, scales


class _Fields(tuple[Any, ...]):
    """The fields of a quantized tensor, compared by identity, whatever their values."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Fields) and len(self) == len(other) and all(a is b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]


def _fingerprints(chosen: Sequence[QuantizedArg], args: Sequence[torch.Tensor]) -> dict[QuantizedArg, Fingerprint]:
    read = [arg for arg in chosen if not isinstance(args[arg.place], QuantizedTensor)]
    found = fingerprints([args[arg.place] for arg in read]) if read else None
    return {} if found is None else dict(zip(read, found, strict=True))


def _vouched(copy: WeightCopy, now: Fingerprint | None, parameter: torch.Tensor) -> bool:
    """Whether a copy whose ``look`` is the same may be used: the bytes have the same fingerprint, or the parameter is quantized and is the copy."""
    return isinstance(parameter, QuantizedTensor) or (now is not None and now == copy.fingerprint)


def _take(
    plan: Plan, stale: Sequence[QuantizedArg], args: Sequence[torch.Tensor], snapshot: Snapshot | None, executor: Executor
) -> tuple[dict[QuantizedArg, Tensor], dict[QuantizedArg, dict[str, torch.Tensor]]]:
    """The 8-bit copies of the parameters in ``stale``, and the amaxes of each by slot; one that is held in 8 bits is its own."""
    parameters = {arg: args[arg.place] for arg in stale}
    taken = {arg: _as_it_is(parameter) for arg, parameter in parameters.items() if isinstance(parameter, QuantizedTensor)}
    amaxes: Mapping[str, torch.Tensor] = {}
    chosen = [arg for arg in stale if arg not in taken]
    if chosen:
        tensors, amaxes = _quantize(plan, chosen, args, snapshot, executor)
        taken.update(zip(chosen, tensors, strict=True))
    return taken, {arg: {slot: amaxes[slot] for slot in arg.slots if slot in amaxes} for arg in stale}


def _as_it_is(parameter: QuantizedTensor) -> Tensor:
    """Its copies; of one scaled as a whole its rows, as a transposed copy may come and go, and the passes' programs are made for one or the other."""
    if not isinstance(parameter, Float8Tensor):
        return Tensor(parameter.storage_without_autograd(), stored_type(parameter))
    parameter.update_usage(rowwise_usage=True)
    fields = {**parameter.get_metadata(), "data_transpose": None}
    return Tensor(Float8TensorStorage(**fields), stored_type(parameter))


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
