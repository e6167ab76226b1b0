"""``Batch``: the parameters that an optimizer steps in one call; and helpers for parameters that are ``DTensor``s, or quantized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from fusible.nvte import flatten_storage
from fusible.quantized import QuantizedTensor
from fusible.tex.calls.transaction import Write
from fusible.tex.formats import is_quantized

__all__ = ["Batch", "PLAIN", "STRIDED", "SURELY_MEMORY", "local", "needs_own_step", "placed_as", "requantized"]

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
STRIDED = {torch.strided}
SURELY_MEMORY = 2**40


@dataclass
class Batch:
    """Parameters that one call steps: of one group, on one device, all whose first gradient this is (``begins``) or none of them, all quantized or
    none, all with masters or none.

    ``new``: the states that the optimizer does not have yet, or not all of. ``lists``: the tensors that the kernels see,
    gradients first, then what moves, then a list for each slot. ``scales``: of each slot, and of the masters, where the optimizer has scales; of what
    is held without one an empty tensor. ``targets``: where kernels write parameters that are not what moves.
    """

    group: dict[str, Any]
    begins: bool
    quantized: bool
    masters: bool
    parameters: list[Any] = field(default_factory=list)
    new: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    lists: list[list[Any]] = field(default_factory=list)
    scales: list[list[Any]] = field(default_factory=list)
    targets: list[Any] = field(default_factory=list)

    def add(self, p: Any, gradient: Any, state: dict[str, Any], new: bool, slots: Sequence[str]) -> None:
        self.parameters.append(p)
        if new:
            self.new.append((p, state))
        tensors = [gradient, state["master_param"] if self.masters else p, *[state.get(name) for name in slots]]
        if p.__class__ not in PLAIN:
            tensors = [local(x) for x in tensors]
        for of_kind, tensor in zip(self.lists, tensors):  # noqa: B905 (strict costs more than the rest)
            of_kind.append(tensor)

    def add_scales(self, state: dict[str, Any], names: Sequence[str], none: torch.Tensor) -> None:
        """The scales of the parameter that was added last; ``none`` of what has none."""
        if not self.scales:
            self.scales = [[] for _ in names]
        for of_kind, name in zip(self.scales, names, strict=True):
            of_kind.append(state.get(name, none))


def needs_own_step(x: Any) -> bool:
    """Whether kernels cannot step a parameter as it is: it has a format of tex, or is another quantized tensor, as a hybrid one."""
    return isinstance(x, QuantizedTensor) or is_quantized(x)


def _buffers(x: Any) -> list[torch.Tensor]:
    """The plain tensors of which a quantized tensor consists."""
    if is_quantized(x):
        return flatten_storage(x.storage_without_autograd())[0]
    found: list[torch.Tensor] = []
    x._mapped(lambda tensor: found.append(tensor) or tensor)
    return found


def local(x: Any) -> Any:
    """The local part of a ``DTensor``; any other tensor itself."""
    return x.to_local() if x.__class__ not in PLAIN and hasattr(x, "to_local") else x


def placed_as(p: Any, own: torch.Tensor) -> torch.Tensor:
    """A tensor whose part in this process is ``own``, placed as ``p`` is."""
    if not hasattr(p, "to_local"):
        return own
    return type(p).from_local(own, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def requantized(p: Any, values: torch.Tensor) -> list[Write]:
    """The writes that give a quantized tensor new values, and its quantizer the scale that they were quantized by and the amax that this observed."""
    quantizer = p._quantizer
    state = {name: getattr(quantizer, name, None) for name in ("scale", "amax")}
    before = {name: value.clone() for name, value in state.items() if isinstance(value, torch.Tensor)}
    made, writes = p.detach().clone(), list[Write]()
    if getattr(quantizer, "first_scale", None) is not None:
        made._quantizer = quantizer  # a copy has a first scale of its own
    try:
        made.copy_(values)
        for name, value in state.items():
            seen = getattr(quantizer, name, None)
            if isinstance(value, torch.Tensor) and isinstance(seen, torch.Tensor):
                writes.append(partial(value.copy_, seen.clone()))
            elif seen is not value:
                writes.append(partial(setattr, quantizer, name, seen))
    finally:
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                value.copy_(before[name])
            if getattr(quantizer, name, None) is not value:
                setattr(quantizer, name, value)
    return [*writes, *(partial(into.copy_, value) for into, value in zip(_buffers(p), _buffers(made), strict=True))]
