"""Properties of two functions together, which no sample of either one can show: the backward draws the same random numbers as the forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusible.conformance.cases.attention_drawn import drawn_backward, drawn_forward
from fusible.conformance.table import Disagreement

__all__ = ["PAIRS"]

Call = Callable[..., Any]


def _attention_drops_the_same(call: Call, dtype: torch.dtype) -> None:
    """The values' gradient of ``fused_attn_bwd`` counts the very elements that ``fused_attn_fwd`` kept.

    All probabilities are the same, and values and gradients are the rows of a unit matrix: the output holds which keys each query kept, and the
    values' gradient its transpose.
    """
    generator = torch.Generator().manual_seed(11)
    forward = next(drawn_forward(generator, dtype)).arguments
    tokens, width = forward["V"].shape[1], forward["V"].shape[3]
    unit = torch.eye(width, dtype=dtype).repeat(tokens // width, 1)[None, :, None].expand(forward["V"].shape).contiguous()
    # Keys that share a column are told apart by their weights.
    unit *= (1 + torch.arange(tokens) // width)[None, :, None, None].to(dtype)
    out, *auxiliary = call("fused_attn_fwd", **{**forward, "V": unit})
    backward = next(drawn_backward(generator, dtype)).arguments
    for query in (0, tokens - 1):
        gradient = torch.zeros_like(unit)
        gradient[:, query] = 1.0
        kept = call("fused_attn_bwd", **{**backward, "V": unit, "O": out, "dO": gradient, "Aux_CTX_Tensors": [*auxiliary]})[2]
        again = (kept[..., :1].double() * unit.double()).sum(1)
        if not torch.allclose(again, out[:, query].double(), rtol=4 * torch.finfo(dtype).eps, atol=0.0):
            raise Disagreement(f"of dropout, the gradient of what query {query} kept is not that of what the forward pass kept")


PAIRS: dict[str, Callable[[Call, torch.dtype], None]] = {"fused_attn_bwd": _attention_drops_the_same}
"""Checks by the function of whose record they are a part; each may raise ``NotServedError``."""
