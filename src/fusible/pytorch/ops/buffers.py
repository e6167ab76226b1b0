"""Memory that a caller gives for what is computed: results and gradients are written there."""

from __future__ import annotations

from typing import Any

import torch

from fusible.errors import DTypeError, ShapeError, expected

__all__ = ["check_buffer", "gradient_into", "into", "write_rows"]


def into(y: torch.Tensor, out: torch.Tensor | None, rows: int) -> torch.Tensor:
    """``out``, with the first ``rows`` of ``y`` in it, where it is given; its other rows stay. It takes part in autograd as ``y`` does."""
    if out is None:
        return y
    check_buffer(out, y.shape, y.dtype, y.device, "out of GroupedLinear")
    return _Into.apply(y, out, rows)  # type: ignore[no-any-return]


def gradient_into(x: torch.Tensor, buffer: torch.Tensor | None) -> torch.Tensor:
    """``x``, whose gradient is written to ``buffer``, where that is given, and is that."""
    if buffer is None:
        return x
    check_buffer(buffer, x.shape, x.dtype, x.device, "dgrad_out of GroupedLinear")
    return _GradientInto.apply(x, buffer)  # type: ignore[no-any-return]


def write_rows(y: torch.Tensor, buffer: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """``buffer``, with those rows of ``y [*, columns]`` in it that belong to a group, as many as ``sizes`` add up to; its other rows stay. The sizes
    are not read by the host."""
    columns = y.shape[-1]
    if y.numel():
        taken = torch.arange(y.numel() // columns, device=y.device) < sizes.sum().to(y.device)
        flat = buffer.view(-1, columns)
        flat.copy_(torch.where(taken[:, None], y.reshape(-1, columns), flat))
    return buffer


def check_buffer(buffer: Any, shape: torch.Size | tuple[int, ...], dtype: torch.dtype, device: torch.device, of: str) -> None:
    """Raise ``DTypeError`` for what is no tensor, ``ShapeError`` for one in which such a result cannot lie."""
    what = f"a contiguous {dtype} tensor {list(shape)} on {device} without gradient"
    do = "make it so, and pass buffer.detach() where it is used again"
    if not isinstance(buffer, torch.Tensor):
        raise DTypeError(expected(what, of=of, got=f"a {type(buffer).__name__}", do=do))
    alike = buffer.shape == shape and buffer.dtype is dtype and buffer.device == device and buffer.layout is torch.strided
    if not alike or not buffer.is_contiguous() or buffer.requires_grad:
        more = " that records gradients" if buffer.requires_grad else " whose rows lie apart" if alike else ""
        raise ShapeError(expected(what, of=of, got=f"{buffer.dtype} {list(buffer.shape)} on {buffer.device}{more}", do=do))


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
