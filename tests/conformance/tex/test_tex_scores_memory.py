"""The peak memory of attention whose scores have a cap and slopes, and whose probabilities are dropped by a seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tex_backends import REFERENCE
from tex_peak_bytes import check_peak

from fusible.conformance.cases import attention, attention_beyond
from fusible.tex.enums import NVTE_QKV_Layout

__all__ = ["CALLS"]

CASES = {
    "bshd": attention.Problem("bshd", NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD, lengths=(256, 256)),
    "thd": attention.Problem("thd", NVTE_QKV_Layout.NVTE_THD_THD_THD, causal=True, lengths=(300, 200, 12)),
}


def forward(problem: attention.Problem, t: torch.dtype) -> dict[str, Any]:
    case = attention_beyond.Beyond(problem, cap=2.0, slopes=(0.5, 0.25, 0.125, 0.0625), dropped=0.1 if problem.label == "bshd" else 0.0)
    return {**attention_beyond.arguments(case, attention.inputs_of(problem, torch.Generator().manual_seed(1), t)), "page_table": None}


def backward(problem: attention.Problem, t: torch.dtype) -> dict[str, Any]:
    arguments = forward(problem, t)
    o, stats = REFERENCE("prim_attention", **arguments)
    del arguments["page_table"]
    return {"do": torch.randn_like(o), "o": o, "stats": stats, **arguments}


def merged(t: torch.dtype) -> dict[str, Any]:
    o, lse = torch.randn(2, 128, 4, 64).to(t), torch.randn(2, 4, 128, 1)
    return {"o": o, "lse": lse, "o_step": torch.randn_like(o), "lse_step": torch.randn_like(lse)}


CALLS: dict[str, tuple[str, Callable[[torch.dtype], dict[str, Any]]]] = {
    **{f"prim_attention {name}": ("prim_attention", lambda t, p=p: forward(p, t)) for name, p in CASES.items()},
    **{f"prim_attention_backward {name}": ("prim_attention_backward", lambda t, p=p: backward(p, t)) for name, p in CASES.items()},
    "prim_attention_merge": ("prim_attention_merge", merged),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_holds_at_most_three_times_its_arguments_and_results(name: str, dtype: torch.dtype) -> None:
    function, make = CALLS[name]
    check_peak(function, make(dtype))
