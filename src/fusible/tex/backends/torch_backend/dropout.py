"""Dropout with a bit mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusible.errors import ShapeError, expected
from fusible.tex.backends.torch_backend.operands import plain, write
from fusible.tex.calls.checks import check_probability
from fusible.tex.interface.dropout import Dropout

__all__ = ["DropoutKernels"]


class DropoutKernels(Dropout):
    def dropout_fwd(self, input: Any, dropout_probability: float, out: Any = None) -> list[Any]:
        check_probability(dropout_probability, "dropout_fwd")
        x = plain(input)
        if x.numel() % 16:
            raise ShapeError(expected("a multiple of 16 elements", of="the input of dropout_fwd", got=x.numel(), do="pad the input"))
        random = torch.empty(x.numel(), dtype=torch.uint8, device=x.device).random_(0, 256)
        keep = random >= int(256 * dropout_probability)
        bits = keep.view(-1, 8).to(torch.uint8) << torch.arange(8, dtype=torch.uint8, device=x.device)
        y = _kept(x, keep.view(x.shape), dropout_probability)
        return [write(y, x.dtype, out), bits.sum(-1, dtype=torch.uint8)]

    def dropout_bwd(self, grad_output: Any, mask: Any, dropout_probability: float, grad_input: Any = None) -> Any:
        check_probability(dropout_probability, "dropout_bwd")
        g = plain(grad_output)
        if mask.numel() * 8 != g.numel() or mask.dtype is not torch.uint8:
            got = f"{mask.dtype} {list(mask.shape)}"
            raise ShapeError(expected(f"uint8 [{g.numel() // 8}]", of="mask of dropout_bwd", got=got, do="pass the mask of dropout_fwd"))
        keep = (mask.view(-1, 1) >> torch.arange(8, dtype=torch.uint8, device=mask.device)).bitwise_and_(1).bool()
        return write(_kept(g, keep.view(g.shape), dropout_probability), g.dtype, grad_input)


def _kept(x: Tensor, keep: Tensor, probability: float) -> Tensor:
    """``x / (1 - probability)`` in fp32 where kept, else 0."""
    return torch.where(keep, x.float().mul(1 / (1 - probability)), 0.0)
