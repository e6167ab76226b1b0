"""How many wrong kernels the conformance suite catches: each mutant of a function is checked with that function's record alone."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from behaviour import Mutant, changed, mutants

from fusible.conformance.memory import tensors
from fusible.conformance.special import current_planting
from fusible.conformance.suite import check_record
from fusible.conformance.table import Record, Sample, load
from fusible.tex.registry import registry

__all__ = ["REFERENCE", "Kept", "behavioural", "caught", "functions"]

REFERENCE: Any = registry.find("torch")


class _Fresh(list[Sample]):
    """Samples whose arguments are copied when their turn comes."""

    def __iter__(self) -> Iterator[Sample]:
        return (replace(sample, arguments=deepcopy(sample.arguments)) for sample in super(_Fresh, self).__iter__())


class Kept(Record):
    """A record that makes its samples once."""

    def samples(self, dtype: torch.dtype) -> list[Sample]:
        planting = current_planting()
        key = self.function, dtype, planting and (planting.kind, planting.turn)
        if key not in _SAMPLES:
            made = super().samples(dtype)
            _SAMPLES[key] = made, planting.drawn if planting else 0
        made, drawn = _SAMPLES[key]
        if planting:
            planting.drawn = drawn
        return _Fresh(made)


FEW: int | None = None
_SAMPLES: dict[Any, tuple[list[Sample], int]] = {}


def forget() -> None:
    """Frees the samples kept of the functions before."""
    _SAMPLES.clear()


@cache
def kept(function: str) -> Kept:
    record = load()[function]
    return Kept(record.function, record.sampler, record.dtypes, record.quantizes)


def functions() -> list[str]:
    """Those that the reference serves and the table has a record of."""
    return sorted(name for name in load() if REFERENCE.lacks(name) is None)


@dataclass(frozen=True)
class Outcome:
    function: str
    mutant: str
    detail: str | None
    """What told of it; None of one that no sample tells from the true kernel."""


def caught(function: str, mutant: Mutant) -> str | None:
    """What the suite says of the mutant, or None where it agrees."""
    record = kept(function)
    wrong = mutant.wrap(getattr(REFERENCE, function))

    def call(name: str, **arguments: Any) -> Any:
        return wrong(**arguments) if name == function else getattr(REFERENCE, name)(**arguments)

    for dtype in record.dtypes[:FEW]:
        for row in check_record(call, record, dtype):
            if row.wrong:
                return row.detail or row.verdict
    return None


def behavioural(function: str) -> list[Mutant]:
    record = kept(function)
    samples = [sample for dtype in record.dtypes for sample in record.samples(dtype)]
    came = []
    for sample in samples:
        arguments = deepcopy(sample.arguments)
        result, made = changed(getattr(REFERENCE, function), arguments)
        came.append((sample.arguments, result, made))
    return mutants(record, samples, came)


def run(names: list[str] | None = None) -> Iterator[Outcome]:
    for function in names or functions():
        if wrong := caught(function, Mutant("none", lambda method: method)):
            raise AssertionError(f"{function} itself is told to be wrong: {wrong}")
        for mutant in behavioural(function):
            yield Outcome(function, mutant.name, caught(function, mutant))
        forget()


if __name__ == "__main__":
    import collections
    import sys
    import time
    import warnings

    FEW = 1 if '-1' in sys.argv else None
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    start, alive, total = time.time(), collections.defaultdict(list), 0
    for outcome in run(None if sys.argv[1:2] in ([], ['-1']) else sys.argv[1].split(',')):
        total += 1
        if outcome.detail is None:
            alive[outcome.mutant].append(outcome.function)
            print(outcome.function, "|", outcome.mutant, flush=True)
    for name, where in sorted(alive.items(), key=lambda item: -len(item[1])):
        print(f"{len(where):4} {name}: {' '.join(where)}")
    print(total, "mutants", sum(map(len, alive.values())), "survive", round(time.time() - start), "s", tensors.__name__)
