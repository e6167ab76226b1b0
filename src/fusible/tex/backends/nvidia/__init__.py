"""NVIDIA's native library (``transformer_engine_torch``), where it is installed and there is a GPU for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from inspect import Parameter
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from fusible.tex import classes
from fusible.tex.backends.nvidia.border import Crossing
from fusible.tex.backends.nvidia.native import find
from fusible.tex.formats import DELAYED, scheme_named
from fusible.tex.interface.base import TEXBackendBase
from fusible.tex.interface.context_parallel import ContextParallel
from fusible.tex.interface.declare import DECLARATIONS, Declaration, Request
from fusible.tex.selection.registry import registry

__all__ = ["NvidiaBackend"]

_CLASSES = "transformer_engine.pytorch"
_HALF = frozenset({torch.float16, torch.bfloat16})
_HALF_ALONE = ("dropout_fwd", "dropout_bwd")
_GROUP_QUANTIZING = ("group_quantize", "bgrad_group_quantize")
_IN_DOUBLE = frozenset(vars(ContextParallel))
_QUANTIZERS = ("quantizer", "quantizer_list", "o_quantizer", "dqkv_quantizer")
"""The parameters that say how results are quantized."""


def _forwarding(declaration: Declaration) -> Callable[..., Any]:
    """A method that calls the native function of the same name, everything but keyword-only parameters by position: most have no names there."""
    variadic = any(p.kind is Parameter.VAR_POSITIONAL for p in declaration.signature.parameters.values())

    def call(self: NvidiaBackend, *args: Any, **kwargs: Any) -> Any:
        function, crossing = getattr(self.native(), declaration.name), self.crossing()
        if variadic:  # a query of one object or of a list of values
            return crossing.leave(function(*(crossing.enter(value, declaration.name, "fused_attn_params") for value in (*args, *kwargs.values()))))
        bound = declaration.signature.bind(*args, **kwargs)
        quantizer = next((bound.arguments[name] for name in _QUANTIZERS if name in bound.arguments), None)
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            bound.arguments[name] = crossing.enter(value, declaration.name, name)
        return crossing.leave(function(*bound.args, **bound.kwargs), quantizer)

    call.__name__, call.__doc__ = declaration.name, declaration.doc
    return call


@registry.register_backend
class NvidiaBackend(TEXBackendBase):
    """Every function that the native library has; its own errors for what it does not take."""

    NAME = "nvidia"
    VENDOR = "NVIDIA"
    VENDOR_NAMES = frozenset({"cuda"})
    PRIORITY = 100
    DEVICES = frozenset({"cuda"})
    HELPERS = frozenset({"native", "crossing"})

    def __init__(self) -> None:
        self._native: ModuleType | None = None

    def unavailable(self) -> str | None:
        found = find()
        self._native = None if isinstance(found, str) else found
        return found if isinstance(found, str) else None

    def native(self) -> ModuleType:
        """The native module; only of an available backend."""
        assert self._native is not None
        return self._native

    def crossing(self) -> Crossing:
        """The way of one call. NVIDIA's classes are those that the program has loaded; there are none where it uses plain tensors alone."""
        loaded: Any = sys.modules.get(_CLASSES) or SimpleNamespace()
        return Crossing(self.native(), loaded)

    def lacks(self, function: str) -> str | None:
        lacking = super().lacks(function)
        if lacking is None and self._native is not None and not hasattr(self._native, function):
            return "the installed native library has no such function"
        return lacking

    def supports(self, request: Request) -> str | None:
        reason = super().supports(request)
        if reason is None and ("softmax" in request.function or request.function in _HALF_ALONE):
            for name, kind in request.kinds:
                if isinstance(kind, tuple) and len(kind) == 2 and kind[1] not in _HALF and name != "mask":
                    return f"its native kernel reads float16 and bfloat16, and {name} is {kind[1]}"
        if reason is None and request.function not in _IN_DOUBLE:
            double = [name for name, kind in request.kinds if isinstance(kind, tuple) and len(kind) == 2 and kind[1] is torch.float64]
            if double:
                return f"its native kernels have no float64, and {double[0]} is of it"
        if reason is None and request.function in _GROUP_QUANTIZING:
            for name, kind in request.kinds:
                if name == "quantizer" and isinstance(kind, tuple) and scheme_named(kind[0]) is DELAYED:
                    return "its native kernel has no delayed scaling"
        return reason


for _declaration in DECLARATIONS.values():
    if not _declaration.name.startswith("prim_"):
        setattr(NvidiaBackend, _declaration.name, _forwarding(_declaration))


def _native_class(name: str) -> Any:
    backend: Any = registry.find("nvidia")
    reason = registry.reason_unavailable(backend)
    return reason if reason is not None else getattr(backend.native(), name)


classes.provide_classes(_native_class)
