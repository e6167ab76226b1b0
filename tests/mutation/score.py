"""How many wrong kernels the conformance suite catches: each mutant of a function is checked with that function's record alone."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from behaviour import Mutant, changed, mutants

from fusible.conformance.special import current_planting
from fusible.conformance.suite import check_record
from fusible.conformance.table import Record, Sample, load
from fusible.tex.registry import registry

__all__ = ["REFERENCE", "Kept", "behavioural", "caught", "functions"]

REFERENCE: Any = registry.find("torch")


class _Fresh(list[Sample]):
    """Samples whose arguments are copied when their turn comes."""

    def __iter__(self) -> Iterator[Sample]:
        return (replace(sample, arguments=deepcopy(sample.arguments)) for sample in list.__iter__(self))


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


def caught(function: str, mutant: Mutant, dtypes: int | None = None) -> str | None:
    """What the suite says of the mutant in the first ``dtypes`` of the record, or in all; None where it agrees."""
    record = kept(function)
    wrong = mutant.wrap(getattr(REFERENCE, function))

    def call(name: str, **arguments: Any) -> Any:
        return wrong(**arguments) if name == function else getattr(REFERENCE, name)(**arguments)

    for dtype in record.dtypes[:dtypes]:
        for row in check_record(call, record, dtype):
            if row.wrong:
                return row.detail or row.verdict
    return None


def behavioural(function: str) -> list[Mutant]:
    record = kept(function)
    samples = list(record.samples(record.dtypes[0]))
    came = []
    for sample in samples:
        arguments = deepcopy(sample.arguments)
        result, made = changed(getattr(REFERENCE, function), arguments)
        came.append((arguments, result, made))
    return mutants(record, samples, came)
