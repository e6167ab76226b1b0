"""Tables: cases that are measured in turn, and the rows that come of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fusible.cli.bench.machine import Bound, Limits
from fusible.cli.bench.timing import side_by_side

__all__ = ["Case", "Measured", "Row", "Settings"]


@dataclass(frozen=True)
class Case:
    """A call of torch and the call of Fusible that does the same, with what Fusible's computes and moves.

    ``nbytes``: each tensor counted as often as it must be read or written, in memory that caches do not hold.
    """

    what: str
    torch: Callable[[], object]
    fusible: Callable[[], object]
    target: float | None = None
    flops: float = 0.0
    nbytes: float = 0.0


@dataclass(frozen=True)
class Row:
    """Two figures of one ``unit``, "ms", "tokens/s" or "MB", and their ratio.

    ``ratio``: how many times as fast Fusible is, and ``target`` the least that it should be; of "MB" which part of torch's Fusible needs, and the
    most that it should need.
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
    """A table that is filled: rows, and sentences about them (what was left out and why, what a figure leaves open)."""

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """As an object of JSON."""
        return {"rows": [row.to_json() for row in self.rows], "notes": self.notes}


@dataclass(frozen=True)
class Settings:
    """How is measured. ``quick`` asks for sizes that take no time."""

    rounds: int
    quick: bool
    threads: int
    limits: Limits

    def measure_apart(self, cases: Iterable[Case]) -> Measured:
        """A row of each case, measured by itself."""
        return Measured([row for case in cases for row in self.measure([case])])

    def measure(self, cases: Sequence[Case]) -> list[Row]:
        """A row of each case. All their calls take turns; one that several cases share is one contestant."""
        calls = {str(id(call)): call for case in cases for call in (case.torch, case.fusible)}
        times = side_by_side(calls, rounds=self.rounds)
        rows = []
        for case in cases:
            torch, fusible = times[str(id(case.torch))], times[str(id(case.fusible))]
            bound = self.limits.bound(fusible, case.flops, case.nbytes)
            rows.append(Row(case.what, "ms", torch * 1e3, fusible * 1e3, case.target, bound))
        return rows
