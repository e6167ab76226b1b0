"""Calls that are under way: within a call of the module around them layers compute together, and a layer that is called by itself does so alone.

What a layer has computed for others lives no longer than that call. Where activation checkpointing begins within it, layers compute alone, too: the
forward that backward repeats then is no call of the module, and would take another path than the first one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Call", "call_of"]

_Mode = tuple[bool, Any]


def _mode() -> _Mode:
    """Whether gradients are recorded, and the hooks on what they are made of: what activation checkpointing changes where it begins."""
    if torch.compiler.is_compiling():
        return torch.is_grad_enabled(), None
    return torch.is_grad_enabled(), torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore[reportAttributeAccessIssue]


class Call(threading.local):
    """Of a module, the call that each thread is in."""

    def __init__(self) -> None:  # for each thread: torch.compile guards that attributes are there
        self._begun: _Mode | None = None

    def begin(self) -> None:
        self._begun = _mode()

    def end(self) -> None:
        self._begun = None

    def is_under_way(self) -> bool:
        """Whether the module is being called, and what is computed now is repeated with it, if at all."""
        return self._begun is not None and self._begun == _mode()


def call_of(call: Call, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What ``forward`` gives, in a call."""
    if torch.compiler.is_compiling():  # a graph that ends within a try statement is none
        call.begin()
        y = forward(*args, **kwargs)
        call.end()
        return y
    try:
        call.begin()
        return forward(*args, **kwargs)
    finally:
        call.end()
