"""Tensors that are on their way: torch's functional collectives, and so its ``DTensor``s, give a tensor before another process's part has come."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["arrived"]


def arrived(x: torch.Tensor) -> torch.Tensor:
    """``x``, waited for where it is on its way."""
    return _Arrived.apply(x) if hasattr(x, "trigger_wait") else x  # type: ignore[no-any-return, no-untyped-call]


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> torch.Tensor:
        return x.trigger_wait().detach()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> Any:
        return dys[0]
