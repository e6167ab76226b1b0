"""The mode in which every call into torch is seen, and devices among its arguments are mapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["CPU", "OnCpu", "is_cuda", "itself", "on_cpu"]

CPU = torch.device("cpu")


def is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.partition(":")[0] == "cuda"


def on_cpu(device: Any) -> Any:
    """A device as the CPU where it is a CUDA device: by name, as an object or as an index."""
    return CPU if is_cuda(device) or (isinstance(device, int) and not isinstance(device, bool)) else device


_getter_is_cuda = torch.Tensor.is_cuda.__get__  # pyright: ignore[reportAttributeAccessIssue]


_parse_to = torch._C._nn._parse_to  # pyright: ignore[reportAttributeAccessIssue]


def itself(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    return tensor


_CALLS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.cuda: itself,
    torch.Tensor.pin_memory: itself,
    torch.Tensor.to: lambda tensor, *args, **kwargs: tensor.to(*map(on_cpu, args[:1]), *args[1:], **kwargs),
    _parse_to: lambda *args, **kwargs: _parse_to(*map(on_cpu, args[:1]), *args[1:], **kwargs),  # of Module.to
    torch.device: lambda first, *rest, **kwargs: CPU if is_cuda(first) else torch.device(first, *rest, **kwargs),
    _getter_is_cuda: lambda tensor: tensor.device.type == "cpu",
}
"""The calls that mean something else on the host."""


class OnCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs:
            kwargs = {**kwargs, "device": on_cpu(kwargs["device"])}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        meaning = _CALLS.get(func)
        return func(*args, **kwargs) if meaning is None else meaning(*args, **kwargs)
