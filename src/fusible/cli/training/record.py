"""The record of a run so far: the figures of the reports, which checkpoints carry along."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from fusible.errors import CheckpointError, expected

__all__ = ["Record"]


@dataclass
class Record:
    """``loss``: of each finished step, in nats per byte. ``observation``: the calls in the first step of the latest process (``summarize_calls``).

    ``seconds``: the time of all steps. ``steady_seconds``: the time of the ``steady_steps``, which are all but the first of each process, as that one
    plans and compiles.
    """

    loss: list[float] = field(default_factory=list)
    seconds: float = 0.0
    steady_seconds: float = 0.0
    steady_steps: int = 0
    peak_memory_bytes: int = 0
    observation: dict[str, Any] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """How many steps are done."""
        return len(self.loss)

    @property
    def steps_per_second(self) -> float:
        """Over the steady steps, where there are any."""
        return self.steady_steps / self.steady_seconds if self.steady_steps else self.step / self.seconds

    def add(self, loss: float, seconds: float, *, steady: bool) -> None:
        """Take in one more step."""
        self.loss.append(loss)
        self.seconds += seconds
        if steady:
            self.steady_seconds += seconds
            self.steady_steps += 1

    def to_json(self) -> dict[str, Any]:
        """As an object of JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Self:
        """The record of which ``to_json`` gave ``saved``. Raises ``CheckpointError`` for anything else."""
        names = [field.name for field in fields(cls)]
        if set(saved) == set(names) and isinstance(saved["loss"], list) and _is_observation(saved["observation"]):
            numbers = [*saved["loss"], saved["seconds"], saved["steady_seconds"]]
            counts = [saved["steady_steps"], saved["peak_memory_bytes"]]
            if all(type(number) is float and math.isfinite(number) and number >= 0 for number in numbers) and all(map(_is_count, counts)):
                return cls(**saved)
        raise CheckpointError(expected("losses and figures", of="a checkpoint's record", got="others", do="use an intact checkpoint"))


def _is_observation(saved: Any) -> bool:
    """Whether ``saved`` has the form of ``summarize_calls``, or is empty. The reports read all of it."""
    if not isinstance(saved, dict) or not saved:
        return saved == {}
    if set(saved) != {"backend", "calls", "matrix_products", "gemms"} or not isinstance(saved["backend"], str):
        return False
    gemms: Any = saved["gemms"]
    if not isinstance(gemms, dict) or set(gemms) != {"fp8", "fp4", "other"}:
        return False
    tables = [saved["calls"], *gemms.values()]
    if not all(isinstance(table, dict) and all(map(_is_count, table.values())) for table in tables):
        return False
    return _is_count(saved["matrix_products"]) and all(set(table) == {"fprop", "dgrad", "wgrad"} for table in gemms.values())


def _is_count(saved: Any) -> bool:
    return type(saved) is int and saved >= 0
