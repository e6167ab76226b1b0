"""``torch.compile`` of a program for the mapped device: it is compiled for the host."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _triton

from fusible.compat.device_map import streams
from fusible.compat.device_map.mode import OnCpu
from fusible.compat.device_map.places import everywhere, loaded

__all__ = ["compiling_replacements"]


def _has_triton(*args: Any, **kwargs: Any) -> bool:
    """Whether Inductor has Triton to write kernels for the device with: within the map it writes C++ for the host. Modules of torch that are imported
    within it keep this function, so that it asks whether the map is open still. Which devices count is asked by newer versions of torch."""
    return torch.compile is not _compile and _torch_has_triton(*args, **kwargs)


_torch_has_triton = _triton.has_triton


def _compile(*args: Any, **kwargs: Any) -> Any:
    _tell_dynamo()
    return _torch_compile(*args, **kwargs)


_torch_compile = torch.compile


@functools.cache
def _tell_dynamo() -> None:
    """Dynamo answers some attributes of tensors itself, for programs that it traces. While the map is not in force, as it did."""
    variable: Any = importlib.import_module("torch._dynamo.variables.tensor").TensorVariable
    build: Any = importlib.import_module("torch._dynamo.variables.base").VariableTracker.build
    former = variable.method_attr_is_cuda

    def method_attr_is_cuda(self: Any, tx: Any) -> Any:
        mapped = self.device is not None and self.device.type == "cpu" and any(isinstance(mode, OnCpu) for mode in _modes(tx))
        return build(tx, True) if mapped else former(self, tx)

    variable.method_attr_is_cuda = method_attr_is_cuda
    utils: Any = importlib.import_module("torch._dynamo.utils")
    of_device = utils.get_current_stream

    def get_current_stream(device: torch.device) -> Any:
        """Newer versions of torch ask C++, which knows of no streams of a host."""
        return streams.current_stream() if device.type == "cpu" else of_device(device)

    for module in loaded("torch._dynamo"):
        if vars(module).get("get_current_stream") is of_device:
            vars(module)["get_current_stream"] = get_current_stream


def _modes(tx: Any) -> list[Any]:
    """The modes that the traced program runs in."""
    return [variable.value for variable in tx.symbolic_torch_function_state.mode_stack if hasattr(variable, "value")]


def compiling_replacements() -> Iterator[tuple[Any, str, Any]]:
    """``(owner, name, value)`` of what is put in place, wherever torch holds it."""
    yield torch, "compile", _compile
    yield from everywhere(loaded("torch"), _triton.has_triton, "has_triton", _has_triton)
