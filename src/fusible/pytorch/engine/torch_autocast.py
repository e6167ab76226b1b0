"""``torch.autocast`` around a pipeline: the pipeline computes in its precision, and it is switched off for the kernels inside."""

from __future__ import annotations

import threading
from types import TracebackType

import torch

__all__ = ["activation_of", "ambient", "is_in_force", "is_in_force_on", "without_torch_autocast"]

_is_any_in_force = torch._C._is_any_autocast_enabled

_local = threading.local()


def is_in_force(device_type: str) -> bool:
    """Whether a ``torch.autocast`` is in force on devices of a type; of tensors without data torch has none, and raises when it is asked."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def is_in_force_on(x: torch.Tensor) -> bool:
    """``is_in_force`` where ``x`` is. Every call asks, and the name of a device's type costs microseconds."""
    return _is_any_in_force() and is_in_force(x.device.type)


def activation_of(x: torch.Tensor) -> torch.Tensor:
    """``x`` in the precision of the ``torch.autocast`` in force on its device: float32 and 16-bit values are cast, others left alone."""
    kind = x.device.type
    if not is_in_force(kind) or x.dtype not in _CAST:
        return x
    return x.to(torch.get_autocast_dtype(kind))


_CAST = frozenset({torch.float32, torch.float16, torch.bfloat16})


class without_torch_autocast:
    """While open, no ``torch.autocast`` is in force on a device: a kernel that is a torch function would be given other operands than its plan says.

    ``ambient`` puts it in force again, for code of the caller's own.
    """

    def __init__(self, device_type: str) -> None:
        self._kind = device_type

    def __enter__(self) -> None:
        self._was = is_in_force(self._kind)
        if self._was:
            self._former: str | None = getattr(_local, "set_aside", None)
            _local.set_aside = self._kind
            torch.set_autocast_enabled(self._kind, False)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._was:
            torch.set_autocast_enabled(self._kind, True)
            _local.set_aside = self._former


class ambient:
    """While open, the ``torch.autocast`` that ``without_torch_autocast`` has set aside in this thread is in force, if there is one."""

    def __enter__(self) -> None:
        self._kind: str | None = getattr(_local, "set_aside", None)
        if self._kind is not None:
            torch.set_autocast_enabled(self._kind, True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._kind is not None:
            torch.set_autocast_enabled(self._kind, False)
