"""Sizes as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusible.lazy.dims import FUNCTIONS, Atom, Call, Size, SizeLike, Symbol, assembled

__all__ = ["from_json", "to_json"]


def to_json(of: SizeLike) -> Any:
    """A size as numbers and lists, which ``from_json`` reads: an int, or ``[[coefficient, factor, ...], ...]``."""
    if not isinstance(of, Size):
        return of
    return [[factor, *[a.name if isinstance(a, Symbol) else {a.kind: [to_json(n) for n in a.operands]} for a in m]] for m, factor in of.terms]


def from_json(data: Any, known: Mapping[str, Symbol]) -> SizeLike:
    """The size that ``to_json`` wrote. Raises ``ValueError`` or ``KeyError`` for anything else."""
    if type(data) is int:
        return data
    if not isinstance(data, list):
        raise ValueError(f"a size is a number or a list, not {data!r}")
    return assembled({tuple(_atom(a, known) for a in factors): int(factor) for factor, *factors in data})


def _atom(data: Any, known: Mapping[str, Symbol]) -> Atom:
    if isinstance(data, str):
        return known[data]
    ((kind, operands),) = data.items()
    if kind not in FUNCTIONS:
        raise ValueError(f"no function of sizes is called {kind!r}")
    return Call(kind, tuple(from_json(n, known) for n in operands))
