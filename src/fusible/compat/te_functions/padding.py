"""``Fp8Padding`` and ``Fp8Unpadding``: rows of zeros behind the rows of each group, as quantized grouped products want them, and away again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fusible import tex
from fusible.compat.te_quantization import FP8GlobalStateManager
from fusible.errors import ShapeError, expected
from fusible.pytorch.engine.refusals import check_dense
from fusible.quantized import get_align_size_for_quantization
from fusible.tex.calls.constructors import check_constructor, check_forward

__all__ = ["Fp8Padding", "Fp8Unpadding"]


class _Resized(torch.autograd.Function):
    """The groups of ``x`` with ``after`` rows each in the place of ``before``: padded with zeros where ``padded``, else cut. Backward does the
    opposite."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, before: list[int], after: list[int], padded: bool) -> torch.Tensor:
        ctx.rest = before, after, padded
        return _resized(x, before, after, padded)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        before, after, padded = ctx.rest
        return _resized(grads[0].contiguous(), after, before, not padded), None, None, None


def _resized(x: torch.Tensor, before: list[int], after: list[int], padded: bool) -> torch.Tensor:
    out = x.new_empty(sum(after), x.shape[-1])
    kernel = tex.fused_multi_row_padding if padded else tex.fused_multi_row_unpadding
    kernel(x.reshape(-1, x.shape[-1]), out, before, after)
    return out


class _Aligned(nn.Module):
    """``num_gemms`` groups, whose numbers of rows are rounded up to ``align_size``: by default what the recipe of the first call wants (32 for
    MXFP8, 128 for NVFP4, a custom recipe's own, else 16)."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size

    def _sizes(self, inp: torch.Tensor, m_splits: Sequence[int]) -> tuple[list[int], list[int]]:
        """The numbers of rows without padding and with it."""
        check_dense(inp, f"inp of {type(self).__name__}")
        if len(m_splits) != self.num_gemms:
            of = f"m_splits of {type(self).__name__}"
            raise ShapeError(expected(f"{self.num_gemms} numbers", of=of, got=len(m_splits), do="give one for each group"))
        if self.align_size is None:
            self.align_size = get_align_size_for_quantization(FP8GlobalStateManager.get_fp8_recipe())
        rows = [int(m) for m in m_splits]
        return rows, [-(-m // self.align_size) * self.align_size for m in rows]


class Fp8Padding(_Aligned):
    __doc__ = f"``forward(inp [tokens, columns], m_splits) -> (padded, padded_m_splits)``: zeros behind each group. {_Aligned.__doc__}"

    def forward(self, inp: torch.Tensor, m_splits: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
        rows, padded = self._sizes(inp, m_splits)
        return (inp, m_splits) if rows == padded else (_Resized.apply(inp, rows, padded, True), padded)  # type: ignore[return-value]


class Fp8Unpadding(_Aligned):
    __doc__ = f"``forward(inp [padded tokens, columns], m_splits) -> [tokens, columns]``: what ``Fp8Padding`` added is left out. {_Aligned.__doc__}"

    def forward(self, inp: torch.Tensor, m_splits: Sequence[int]) -> torch.Tensor:
        rows, padded = self._sizes(inp, m_splits)
        return inp if rows == padded else _Resized.apply(inp, padded, rows, False)  # type: ignore[no-any-return]


check_constructor(_Aligned)
check_forward(Fp8Padding)
check_forward(Fp8Unpadding)
