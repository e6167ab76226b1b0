"""Memory that a caller gives for what is computed: results and gradients are written there."""

from __future__ import annotations

from typing import Any

import torch

from fusible.errors import ShapeError, expected

__all__ = ["gradient_into", "into"]


def into(y: torch.Tensor, out: torch.Tensor | None, rows: int) -> torch.Tensor:
    """``out``, with the first ``rows`` of ``y`` in it, where it is given; its other rows stay. It takes part in autograd as ``y`` does."""
    if out is None:
        return y
    _check(out, y, "out")
    return _Into.apply(y, out, rows)  # type: ignore[no-any-return]


def gradient_into(x: torch.Tensor, buffer: torch.Tensor | None) -> torch.Tensor:
    """``x``, whose gradient is written to ``buffer``, where that is given, and is that."""
    if buffer is None:
        return x
    _check(buffer, x, "dgrad_out")
    return _GradientInto.apply(x, buffer)  # type: ignore[no-any-return]


def _check(buffer: torch.Tensor, like: torch.Tensor, name: str) -> None:
    if buffer.shape != like.shape or buffer.dtype != like.dtype or not buffer.is_contiguous() or buffer.requires_grad:
        got = f"{buffer.dtype} {list(buffer.shape)}{' that records gradients' if buffer.requires_grad else ''}"
        what = f"a contiguous {like.dtype} tensor {list(like.shape)} without gradient"
        raise ShapeError(expected(what, of=f"{name} of GroupedLinear", got=got, do="make it so, and pass buffer.detach() where it is used again"))


class _Into(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, out: torch.Tensor, rows: int) -> torch.Tensor:
        out[:rows].copy_(y[:rows])
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None, None


class _GradientInto(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        ctx.buffer = buffer
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.buffer.copy_(grads[0]), None
