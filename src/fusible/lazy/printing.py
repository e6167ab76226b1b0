"""How every IR prints the type of a tensor, and how a sentence shows a value."""

from __future__ import annotations

from typing import Any

from fusible.lazy.device import device
from fusible.lazy.dtypes import dtype

__all__ = ["Shape", "print_type", "shown"]

Shape = tuple[int, ...]
"""The sizes of a tensor. While a function with dynamic dimensions is compiled, some are ``fusible.lazy.dims.Size``, which compute as ints do."""


def print_type(shape: Shape, dtype: dtype, device: device) -> str:
    """``[shape=(2, 3,), dtype=(float32), loc=(gpu:0)]``."""
    dims = ", ".join(map(str, shape)) + ("," if shape else "")
    return f"[shape=({dims}), dtype=({dtype}), loc=({device})]"


def shown(value: Any) -> str:
    """A value in a sentence, on one line. Of a tensor nothing is evaluated."""
    recorded = getattr(value, "trace_tensor", None)
    text = repr(value) if recorded is None else str(recorded)
    return text if len(text) <= 100 and "\n" not in text else f"a {type(value).__qualname__}"
