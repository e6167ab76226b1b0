"""A backend to copy: one function of a vendor's library, served where the library is. docs/backends.md takes it from here to a checked backend."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from fusible.tex.calls.checks import check_norm_parameter
from fusible.tex.interface.base import TEXBackendBase
from fusible.tex.interface.declare import Request, requires
from fusible.tex.protocol import check_shape, to_torch
from fusible.tex.selection.registry import Registry

__all__ = ["TemplateBackend", "register"]

LIBRARY = "torch"  # the vendor's package


def reads(request: Request) -> str | None:
    """Why a call is refused, or None: the choice then falls on the next backend."""
    for name, kind in request.kinds:  # of whatever function: not every one has a quantizer or an otype
        if name == "quantizer" and kind is not None:
            return "gives unquantized results, and there is a quantizer"
        if name == "otype" and to_torch(kind) is not torch.float32:
            return f"gives float32, and otype is {kind}"
        if isinstance(kind, tuple) and kind != ("cpu", torch.float32):
            return f"reads float32, and {name} is {kind}"
    return None


class TemplateBackend(TEXBackendBase):
    """What has a method here is served; all else is left to the other backends."""

    NAME = "template"
    VENDOR = "Nobody"
    PRIORITY = 90
    DEVICES = frozenset({"cpu"})

    def unavailable(self) -> str | None:
        return None if importlib.util.find_spec(LIBRARY) else f"{LIBRARY} is not installed"

    @requires(reads)
    def rmsnorm_fwd(self, input: Any, weight: Any, eps: float, ln_out: Any, quantizer: Any, otype: Any, zero_centered_gamma: bool) -> list[Any]:
        check_norm_parameter(weight, input, "weight of rmsnorm_fwd")
        if ln_out is not None:
            check_shape(ln_out, input.shape, "ln_out of rmsnorm_fwd")
        library = importlib.import_module(LIBRARY)
        rsigma = library.rsqrt(input.square().mean(-1, keepdim=True) + eps)
        y = input * rsigma * (weight + 1 if zero_centered_gamma else weight)
        return [y if ln_out is None else ln_out.copy_(y), None, rsigma.view(-1)]


def register(registry: Registry) -> None:
    """Called by Fusible: through the entry-point group ``te_fl.plugin``, or by the module's name in ``TE_FL_PLUGIN_MODULES``."""
    registry.register_backend(TemplateBackend)
