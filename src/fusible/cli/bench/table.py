"""Tables: cases that are measured in turns, and the rows with their figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fusible.cli.bench.machine import Bound, Limits
from fusible.cli.bench.timing import side_by_side

__all__ = ["Case", "Measured", "Row", "Settings"]

_LONG = 2000.0
"""Milliseconds of a call that nobody waits for at twice the size."""


@dataclass(frozen=True)
class Case:
    """A call of torch and the call of Fusible that does the same, with the operations and the memory traffic of Fusible's.

    ``nbytes``: the bytes of every tensor, as often as it has to be read or written without caches. ``kind``: what torch's call is, whatever the size.
    """

    what: str
    torch: Callable[[], object]
    fusible: Callable[[], object]
    target: float | None = None
    flops: float = 0.0
    nbytes: float = 0.0
    kind: str = ""


@dataclass(frozen=True)
class Row:
    """Two figures of one ``unit``, "ms", "tokens/s" or "MB", and their ratio.

    ``torch``: of torch, or of what else the table's figures stand beside. ``ratio``: how many times as fast Fusible is, of which ``target`` is the
    least. With "MB" it is the part of torch's memory that Fusible needs, of which ``target`` is the most.
    """

    what: str
    unit: str
    torch: float
    fusible: float
    target: float | None = None
    bound: Bound | None = None

    @property
    def ratio(self) -> float:
        above, below = (self.torch, self.fusible) if self.unit == "ms" else (self.fusible, self.torch)
        return above / below if below else 0.0

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None where there is none."""
        if self.target is None:
            return None
        return self.ratio <= self.target if self.unit == "MB" else self.ratio >= self.target

    def to_json(self) -> dict[str, Any]:
        """As an object of JSON."""
        return {**asdict(self), "ratio": self.ratio, "met": self.met}


@dataclass
class Measured:
    """The rows of a table, and notes about them: what was left out and why, or what a figure does not show. ``beside``: whose figures stand beside
    Fusible's."""

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    beside: str = "torch"

    def to_json(self) -> dict[str, Any]:
        """As an object of JSON."""
        return {"beside": self.beside, "rows": [row.to_json() for row in self.rows], "notes": self.notes}


@dataclass(frozen=True)
class Settings:
    """How to measure. ``quick``: sizes that take no time."""

    rounds: int
    quick: bool
    threads: int
    limits: Limits

    def measure_apart(self, cases: Iterable[Case]) -> Measured:
        """A row of each case, measured by itself."""
        return Measured([row for case in cases for row in self.measure([case])])

    def measure_growing(self, sizes: Iterable[int], make: Callable[[int], Sequence[Case]]) -> Measured:
        """The rows of ``make(size)`` for growing sizes. Cases of a kind of which one takes torch seconds are left out of larger sizes, and named:
        torch's products of bfloat16, on a CPU that has no instruction for them."""
        measured, slow, left_out = Measured(), dict[str, str](), dict[str, None]()
        for size in sizes:
            made = make(size)
            cases = [case for case in made if case.kind not in slow]
            left_out |= {slow[case.kind]: None for case in made if case.kind in slow}
            rows = self.measure(cases)
            measured.rows += rows
            slow |= {case.kind: case.what for case, row in zip(cases, rows, strict=True) if case.kind and row.torch > _LONG}
        measured.notes += [f"Larger sizes than {what} are left out, for torch takes seconds." for what in left_out]
        return measured

    def measure(self, cases: Sequence[Case]) -> list[Row]:
        """A row per case. All calls take turns; a call that several cases share is measured once."""
        calls = {str(id(call)): call for case in cases for call in (case.torch, case.fusible)}
        times = side_by_side(calls, rounds=self.rounds)
        rows = []
        for case in cases:
            torch, fusible = times[str(id(case.torch))], times[str(id(case.fusible))]
            bound = self.limits.bound(fusible, case.flops, case.nbytes)
            rows.append(Row(case.what, "ms", torch * 1e3, fusible * 1e3, case.target, bound))
        return rows
