"""The mode in which every call into torch is seen, and devices among its arguments are mapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

__all__ = ["CPU", "OnCpu", "is_cuda", "is_in_force", "itself", "on_cpu", "without_cuda"]

CPU = torch.device("cpu")


def is_cuda(device: Any) -> bool:
    """Whether a device, as an object or by name, is a CUDA device."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.partition(":")[0] == "cuda"


def on_cpu(device: Any) -> Any:
    """A device as the CPU where it is a CUDA device: by name, as an object or as an index."""
    return CPU if is_cuda(device) or (isinstance(device, int) and not isinstance(device, bool)) else device


def without_cuda(tensor_type: Any) -> Any:
    """The name of a class of tensors, or a class, as the host's."""
    return tensor_type.replace("torch.cuda.", "torch.", 1) if isinstance(tensor_type, str) else tensor_type


_getter_is_cuda = torch.Tensor.is_cuda.__get__  # pyright: ignore[reportAttributeAccessIssue]


_parse_to = torch._C._nn._parse_to  # pyright: ignore[reportAttributeAccessIssue]


def itself(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """``tensor``: a move to the device where it is."""
    return tensor


def _is_mapped(tensor: Any) -> bool:
    return tensor.device.type == "cpu"


def _device(*args: Any, **kwargs: Any) -> torch.device:
    asked = on_cpu(args[0] if args else kwargs.get("type", kwargs.get("device")))
    return asked if isinstance(asked, torch.device) else torch.device(*args, **kwargs)


def _type(tensor: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    if dtype is not None:
        return tensor.type(without_cuda(dtype), *args, **kwargs)
    return tensor.type().replace("torch.", "torch.cuda.", 1) if _is_mapped(tensor) else tensor.type()


def _index(tensor: Any) -> int:
    return 0 if _is_mapped(tensor) else torch.Tensor.get_device(tensor)


_CALLS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.cuda: itself,
    torch.Tensor.pin_memory: itself,
    torch.Tensor.to: lambda tensor, *args, **kwargs: tensor.to(*map(on_cpu, args[:1]), *args[1:], **kwargs),
    torch.Tensor.type: _type,
    torch.Tensor.get_device: _index,
    torch.get_device: _index,
    _parse_to: lambda *args, **kwargs: _parse_to(*map(on_cpu, args[:1]), *args[1:], **kwargs),  # of Module.to
    torch.device: _device,
    _getter_is_cuda: _is_mapped,
}
"""The calls that mean something else on the host."""


class OnCpu(TorchFunctionMode):
    """Maps devices among the arguments of every call into torch of this thread."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs:
            kwargs = {**kwargs, "device": on_cpu(kwargs["device"])}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        meaning = _CALLS.get(func)
        return func(*args, **kwargs) if meaning is None else meaning(*args, **kwargs)


def is_in_force() -> bool:
    """Whether the map is in force in this thread."""
    return any(isinstance(mode, OnCpu) for mode in _get_current_function_mode_stack())
