"""Conditions on sizes that only a call determines: they are noted while a program is recorded, and checked at each call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from fusible.errors import ShapeError, expected
from fusible.lazy.dims import Size, SizeLike, Symbol, bounds, evaluate, symbols
from fusible.lazy.dims_json import from_json, to_json
from fusible.lazy.source import describe, user_line

__all__ = ["Condition", "collected", "holds"]

_NOTED: ContextVar[dict[Condition, None] | None] = ContextVar("fusible_assumptions", default=None)


@dataclass(frozen=True)
class Condition:
    """``left == right`` or ``left >= right``, which ``what`` at ``where`` (a line of the user's) needs."""

    left: SizeLike
    relation: str
    right: SizeLike
    what: str
    where: str

    def holds(self, values: Mapping[Symbol, int]) -> bool:
        """Whether it holds for these sizes."""
        a, b = evaluate(self.left, values), evaluate(self.right, values)
        return a == b or (self.relation == ">=" and a > b)

    def check(self, values: Mapping[Symbol, int], origins: Mapping[Symbol, str]) -> None:
        """Raise ``ShapeError`` where it does not hold for the sizes of a call. ``origins`` names each size, as the dimension of an argument."""
        if self.holds(values):
            return
        a, b = evaluate(self.left, values), evaluate(self.right, values)
        needed = symbols((self.left, self.right))
        places = ", ".join(origins[symbol] for symbol in values if symbol in needed)
        what = f"{self.left} {self.relation} {self.right} (of {places})"
        raise ShapeError(expected(what, of=f"{self.what} at {self.where}", got=f"{a} and {b}", do="pass tensors whose sizes agree"))

    def to_json(self) -> list[Any]:
        return [to_json(self.left), self.relation, to_json(self.right), self.what, self.where]

    @classmethod
    def from_json(cls, data: Any, known: Mapping[str, Symbol]) -> Condition:
        left, relation, right, what, where = data
        if relation not in ("==", ">=") or not isinstance(what, str) or not isinstance(where, str):
            raise ValueError(f"a condition is not written as {data!r}")
        return cls(from_json(left, known), relation, from_json(right, known), what, where)


@contextmanager
def collected() -> Iterator[dict[Condition, None]]:
    """Collect the conditions that this thread notes while the context is open, in order."""
    noted: dict[Condition, None] = {}
    token = _NOTED.set(noted)
    try:
        yield noted
    finally:
        _NOTED.reset(token)


def holds(left: SizeLike, relation: str, right: SizeLike, what: str) -> bool:
    """Whether ``left == right`` (or ``>=``) can hold. Where that depends on a call, the condition is noted for ``what``, to be checked at each
    call."""
    if left == right:
        return True
    low, high = bounds(left - right)
    if relation == "==" and (low > 0 or high < 0):
        return False
    if relation == ">=" and low >= 0:
        return True
    if high < 0:
        return False
    noted = _NOTED.get()
    if noted is not None and (isinstance(left, Size) or isinstance(right, Size)):
        noted[Condition(left, relation, right, what, describe(user_line()))] = None
    return True
