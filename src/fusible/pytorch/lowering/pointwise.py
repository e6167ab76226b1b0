"""Ops that take each number, or each row, by itself: activations, biases, residuals."""

from __future__ import annotations

from typing import Any

import torch

from fusible import ops
from fusible.errors import ArgumentError, expected
from fusible.pytorch.lowering.registry import Args, lowers, written
from fusible.tex.activations import ACTIVATIONS
from fusible.tex.backends.torch_backend.pointwise import GATES, POINTWISE

__all__ = ["wide"]


def wide(x: torch.Tensor) -> torch.Tensor:
    """``x`` in fp32, in which functions are computed before they are rounded once; fp64 stays."""
    return x if x.dtype is torch.float64 else x.float()


_ROWS = {row.title: row for row in ACTIVATIONS}


@lowers(*(getattr(ops, title) for title in _ROWS))
def _activation(op: Any, x: torch.Tensor, args: Args) -> torch.Tensor:
    row, x = _ROWS[type(op).__name__], wide(x)
    if not row.gated:
        return written(POINTWISE[row.name].f(x), op.y_dtype)
    size = getattr(op, "glu_interleave_size", None)
    a, b = x.chunk(2, -1) if size is None else x.unflatten(-1, (-1, 2, size)).movedim(-2, 0).flatten(-2).unbind(0)
    return written(GATES[row.name].f(a, b, *getattr(op, "numbers", ())), op.y_dtype)


@lowers(ops.Add)
def _add(op: ops.Add, x: torch.Tensor, args: Args) -> torch.Tensor:
    return written(x + args["bias"].to(x.dtype), op.y_dtype)


@lowers(ops.MakeExtra, ops.ResidualBegin)
def _make_extra(op: ops.MakeExtra, x: torch.Tensor, args: Args) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return x, dict.fromkeys(op.side_outputs, x)


@lowers(ops.AddExtra, ops.ResidualEnd)
def _add_extra(op: ops.AddExtra, x: torch.Tensor, args: Args) -> torch.Tensor:
    return written(x + args[op.name], op.y_dtype)


@lowers(ops.ConstantScale)
def _scale(op: ops.ConstantScale, x: torch.Tensor, args: Args) -> torch.Tensor:
    return written(wide(x) * op.scale, op.y_dtype)


@lowers(ops.Identity, ops.Dropout)
def _identity(op: Any, x: torch.Tensor, args: Args) -> torch.Tensor:
    if isinstance(op, ops.Dropout) and op.drops:
        raise ArgumentError(expected("one that drops nothing", of="a model to export", got=repr(op), do="call model.eval() first"))
    return x
