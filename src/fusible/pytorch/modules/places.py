"""Places for scaling states, as ``torch.distributed.checkpoint`` looks for them in the model that it is about to load.

``set_model_state_dict`` hands over what it finds the name of in the model: under ``broadcast_from_rank0`` a process that has no such name gets
nothing, and where ``DistributedDataParallel`` or ``torch.compile`` wraps the model, it is by the model's names that those of the dictionary get
their prefix. A module that nobody has called has no scaling state, so no name of one; and it cannot always have one, for then a dictionary without
would lack it. So a name is shown while such a load asks, where the dictionary has it.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["Place", "asked_for", "without_places"]

_ASKING = "torch.distributed.checkpoint.state_dict"


class Place(torch.Tensor):
    """A scalar that stands where a scaling state may come."""

    def __new__(cls) -> Place:
        return torch.Tensor._make_subclass(cls, torch.zeros((), dtype=torch.uint8, device="cpu"))


def without_places(state_dict: dict[str, Any]) -> None:
    """Take out the places that nothing came to."""
    for key in [key for key, value in state_dict.items() if isinstance(value, Place)]:
        del state_dict[key]


def asked_for(module: nn.Module, names: Iterable[str]) -> Iterator[str]:
    """Those of the module's ``names`` that the running load of torch's, which asks for the model's names, has in its dictionary or may be sent."""
    loading = _loading()
    if loading is None:
        return
    model, state_dict, info = (loading[name] for name in ("model", "state_dict", "info"))
    sent = info.broadcast_from_rank0 and torch.distributed.get_rank() != 0
    at = next((name for name, inside in model.named_modules() if inside is module), None)
    for name in names if at is not None else ():
        # By torch's own rule for the names that wrappers add. What this process may be sent, the first one decides.
        told = sys.modules[_ASKING]._get_fqns(model, f"{at}.{name}" if at else name, info.dsd_fqn_modifiers)
        if sent or any(key in state_dict for key in told):
            yield name


def _loading() -> Mapping[str, Any] | None:
    """The arguments of torch's load that is asking, or None where nobody is.

    A module is asked for its names without a word of what is loaded: that is known to the caller alone, so its frame is looked for.
    """
    asking = sys.modules.get(_ASKING)
    load = getattr(asking, "_load_model_state_dict", None)
    if asking is not None and load is None:
        warnings.warn(f"{_ASKING} has no _load_model_state_dict: set_model_state_dict may leave scaling states out", RuntimeWarning, stacklevel=2)
    code = getattr(inspect.unwrap(load), "__code__", None) if load is not None else None
    frame = inspect.currentframe() if code is not None else None
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame.f_locals if frame is not None else None
