"""NVIDIA's native library (``transformer_engine_torch``), where it is installed and there is a GPU for it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from inspect import Parameter
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from fusible.tex import classes
from fusible.tex.backends.nvidia.border import Crossing
from fusible.tex.backends.nvidia.limits import out_of_reach, refused
from fusible.tex.backends.nvidia.native import find, is_aside
from fusible.tex.enums import DType
from fusible.tex.interface.base import TEXBackendBase
from fusible.tex.interface.declare import DECLARATIONS, Declaration, Request
from fusible.tex.selection.dispatch import hand_over
from fusible.tex.selection.registry import registry

__all__ = ["NvidiaBackend"]

_CLASSES = "transformer_engine.pytorch"
_QUANTIZERS = ("quantizer", "quantizer_list", "o_quantizer", "dqkv_quantizer")
"""The parameters that say how results are quantized."""


@functools.cache
def _workspace(device: torch.device, stream: int, place: int) -> torch.Tensor:
    """Memory for the products of one stream: cuBLAS asks for 32 MiB on GPUs from capability 9.0 on, as NVIDIA's Python package gives it. ``place``:
    among those that one call of many products works in at once."""
    return torch.empty((1 << 25) + 1024, dtype=torch.uint8, device=device)


def _with_workspace(arguments: dict[str, Any], native: ModuleType) -> None:
    """Give a product the memory that it works in, where the caller left that to the backend."""
    workspace = arguments.get("workspace", ...)
    if workspace is None or workspace == []:
        stream = torch.cuda.current_stream()
        places = range(1 if workspace is None else native.get_num_cublas_streams())
        each = [_workspace(stream.device, stream.cuda_stream, place) for place in places]
        size = "workspace_size" if workspace is None else "workspaceSize"
        arguments.update({"workspace": each[0] if workspace is None else each, size: each[0].numel()})
    if arguments.get("bias_type", ...) is None:
        arguments["bias_type"] = DType.kBFloat16  # read where there is a bias


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
        if not is_aside(self._native) and out_of_reach(declaration.name, bound.arguments, quantizer):
            return hand_over(self, declaration.name, *bound.args, **bound.kwargs)
        _with_workspace(bound.arguments, self.native())
        for name, value in bound.arguments.items():
            bound.arguments[name] = crossing.enter(value, declaration.name, name)
        return crossing.leave(function(*bound.args, **bound.kwargs), quantizer)

    call.__name__, call.__doc__ = declaration.name, declaration.doc
    return call


@registry.register_backend
class NvidiaBackend(TEXBackendBase):
    """What of the native library gives the interface's results (``limits``), and all that no other backend has; its own errors for what it does not
    take."""

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
        return super().supports(request) or refused(request, is_aside(self._native))


for _declaration in DECLARATIONS.values():
    if not _declaration.name.startswith("prim_"):
        setattr(NvidiaBackend, _declaration.name, _forwarding(_declaration))


def _native_class(name: str) -> Any:
    backend: Any = registry.find("nvidia")
    reason = registry.reason_unavailable(backend)
    return reason if reason is not None else getattr(backend.native(), name)


classes.provide_classes(_native_class)
