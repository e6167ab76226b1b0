"""How every IR prints the type of a tensor and the attributes of an operation."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any

from fusible.lazy.device import device
from fusible.lazy.dtypes import dtype

__all__ = ["Shape", "print_attributes", "print_type", "printed_fields", "shown"]

Shape = tuple[int, ...]
"""The sizes of a tensor. While a function with dynamic dimensions is compiled, some are ``fusible.lazy.dims.Size``, which compute as ints do."""


def print_type(shape: Shape, dtype: dtype, device: device) -> str:
    """``[shape=(2, 3,), dtype=(float32), loc=(gpu:0)]``."""
    dims = ", ".join(map(str, shape)) + ("," if shape else "")
    return f"[shape=({dims}), dtype=({dtype}), loc=({device})]"


def print_attributes(op: Any, hidden: frozenset[str]) -> list[str]:
    """``name=value`` for every field of an operation's dataclass that is not hidden, in order."""
    return [f"{name}={getattr(op, name)}" for name in printed_fields(type(op), hidden)]


@cache
def printed_fields(kind: type, hidden: frozenset[str]) -> tuple[str, ...]:
    """The fields of an operation's dataclass that are printed, in order."""
    return tuple(f.name for f in fields(kind) if f.name not in hidden)


def shown(value: Any) -> str:
    """A value in a sentence, on one line. Of a tensor nothing is evaluated."""
    recorded = getattr(value, "trace_tensor", None)
    text = repr(value) if recorded is None else str(recorded)
    return text if len(text) <= 100 and "\n" not in text else f"a {type(value).__qualname__}"
