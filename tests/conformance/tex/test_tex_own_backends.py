"""What a vendor's backend is held to holds of ours: each function agrees in all that ``fusible check-backend`` asks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusible.conformance import Verdict, check_backend
from fusible.conformance.table import load
from fusible.tex.selection.registry import registry

CHECKED = ("torch", "cpu")
"""Backends of a CPU's tensors. Lazy tensors make a program of each sample: ``fusible check-backend xla`` takes an hour."""


def pairs() -> list[Any]:
    """Each backend with each function that it has and the table knows."""
    found = []
    for name in CHECKED:
        backend = registry.find(name)
        if registry.reason_unavailable(backend) is None:
            found += [pytest.param(name, function, id=f"{name}-{function}") for function in sorted(load()) if backend.lacks(function) is None]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "function"), pairs())
def test_a_backend_agrees_in_every_dtype(backend: str, function: str) -> None:
    rows = list(check_backend(backend, [function]))
    assert rows and [f"{row.dtype}: {row.detail}" for row in rows if row.verdict not in (Verdict.AGREES, Verdict.REFUSED)] == []


@pytest.mark.parametrize("function", ["prim_attention", "te_general_grouped_gemm_for_discrete_in"])
def test_the_reference_agrees_where_values_are_planted(function: str) -> None:
    """Where one infinite score, or a sum that cancels, asks more of the expectation than of the kernel."""
    assert {row.verdict for row in check_backend("torch", [function], [torch.float16])} == {Verdict.AGREES}
