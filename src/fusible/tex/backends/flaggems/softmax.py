"""The softmax of scaled scores by FlagGems' kernel, which is for halves and for keys by the eight. Its gradient sums products that are rounded to the
halves' bits, and its others have no scale, mask or causal form: those are left to other backends."""

from __future__ import annotations

from typing import Any

import torch

from fusible.tex.backends.flaggems.operands import refused
from fusible.tex.calls.checks import check_scores
from fusible.tex.interface.declare import Request, requires
from fusible.tex.interface.softmax import Softmax
from fusible.tex.selection.dispatch import hand_over

__all__ = ["SoftmaxKernels"]

_HALF = frozenset({torch.bfloat16, torch.float16})
_MOST_KEYS = 16384


def _refused(request: Request) -> str | None:
    return refused(request, _HALF)


class SoftmaxKernels(Softmax):
    gems: Any

    @requires(_refused)
    def scaled_softmax_forward(self, input: Any, scale_factor: float) -> Any:
        check_scores(input, "scaled_softmax_forward")
        queries, keys = input.shape[-2:]
        if not input.numel() or queries < 2 or keys % 8 or keys > _MOST_KEYS:
            return hand_over(self, "scaled_softmax_forward", input, scale_factor)  # type: ignore[arg-type]
        return self.gems.scaled_softmax_forward(input.contiguous(), scale_factor)
