"""Calls of tex by the compiled kernels and by plain torch, for tests that compare the two."""

from __future__ import annotations

from typing import Any

import torch

from fusible import tex

__all__ = ["by_torch", "native"]

_SEED = 7
"""Of what both draw."""


def native(function: Any, *args: Any) -> Any:
    """What the compiled kernels give; they must be who is asked."""
    torch.manual_seed(_SEED)
    with tex.record() as calls:
        result = function(*args)
    assert [call.backend for call in calls if call.function == function.__name__] == ["cpu"]
    return result


def by_torch(function: Any, *args: Any) -> Any:
    torch.manual_seed(_SEED)
    with tex.set_backend("torch"):
        return function(*args)
