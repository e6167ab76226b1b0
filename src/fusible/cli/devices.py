"""The device that a command line names."""

from __future__ import annotations

import torch

from fusible.errors import ArgumentError, expected

__all__ = ["device_named"]


def device_named(name: str, option: str = "--device") -> torch.device:
    """The device of that name. Raises ``ArgumentError`` where torch has none that holds tensors."""
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, NotImplementedError):
        device = None
    if device is None or device.type == "meta":
        raise ArgumentError(expected("a device that torch has here", of=option, got=repr(name), do="name another, such as cpu"))
    return device
