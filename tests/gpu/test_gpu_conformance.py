"""The conformance suite on a GPU: every function of every backend that serves tensors there, against float64."""

from __future__ import annotations

import pytest
from gpu_cases import DEVICE

from fusible.conformance import check_backend
from fusible.conformance.table import load
from fusible.tex.selection.registry import registry


@pytest.mark.parametrize("function", sorted(load()))
@pytest.mark.parametrize("backend", ["flaggems", "nvidia", "torch"])
def test_agrees_with_float64(backend: str, function: str) -> None:
    found = registry.find(backend)
    reason = registry.reason_unavailable(found) or found.lacks(function)
    if reason is not None:
        pytest.skip(reason)
    rows = list(check_backend(backend, [function], device=str(DEVICE)))
    assert not [f"{row.dtype}: {row.verdict}: {row.detail}" for row in rows if row.wrong]
