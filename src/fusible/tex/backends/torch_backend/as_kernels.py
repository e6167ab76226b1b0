"""A method made of torch's operations, called as the one kernel that it stands for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint as checkpoint
from torch.utils import _python_dispatch

__all__ = ["as_kernel"]

_records_graphs = torch.is_grad_enabled
_record_graphs = torch._C._set_grad_enabled
_modes = torch._C._len_torch_dispatch_stack
_SELECTIVE = tuple(getattr(checkpoint, name) for name in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode") if hasattr(checkpoint, name))
"""The modes of selective activation checkpointing, which keep the results of the operations that a user names, say ``aten.mm``. The names are torch's
private ones: in a torch that has others, such checkpointing refuses what it kept, and nothing else changes."""


def as_kernel(method: Callable[..., Any]) -> Callable[..., Any]:
    """``method`` without autograd graphs, since its callers define its gradient, and hidden from selective activation checkpointing.

    Selective checkpointing would keep the result of a product to which the method then adds a bias in place, and refuse it as modified when it is
    needed again.
    """

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _modes() and isinstance(_python_dispatch._get_current_dispatch_mode(), _SELECTIVE):
            with _python_dispatch._pop_mode_temporarily():
                return call(*args, **kwargs)
        if not _records_graphs():
            return method(*args, **kwargs)
        _record_graphs(False)
        try:
            return method(*args, **kwargs)
        finally:
            _record_graphs(True)

    return call
