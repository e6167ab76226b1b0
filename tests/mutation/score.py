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
from fusible.conformance.suite import Agreement, check_record
from fusible.conformance.table import Record, Sample, check, load
from fusible.tex.selection.registry import registry

__all__ = ["REFERENCE", "Kept", "behavioural", "caught", "functions", "unread"]

REFERENCE: Any = registry.find("torch")


class _Fresh(list[Sample]):
    """Samples whose arguments are copied when their turn comes."""

    def __iter__(self) -> Iterator[Sample]:
        return (replace(sample, arguments=deepcopy(sample.arguments)) for sample in list.__iter__(self))


class Kept(Record):
    """A record that makes its samples once."""

    def samples(self, dtype: torch.dtype, most: int | None = None) -> list[Sample]:
        planting = current_planting()
        key = self.function, dtype, planting and (planting.kind, planting.turn)
        if key not in _SAMPLES:
            made = super().samples(dtype)
            _SAMPLES[key] = made, planting.drawn if planting else 0
        made, drawn = _SAMPLES[key]
        if planting:
            planting.drawn = drawn
        return _Fresh(made[:most])


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


def _rows(function: str, method: Any, dtype: torch.dtype) -> Iterator[Agreement]:
    def call(name: str, **arguments: Any) -> Any:
        return method(**arguments) if name == function else getattr(REFERENCE, name)(**arguments)

    return check_record(call, kept(function), dtype)


@cache
def _served(function: str, dtype: torch.dtype) -> tuple[int, ...]:
    """How many samples the true kernel serves, row by row."""
    return tuple(row.samples for row in _rows(function, getattr(REFERENCE, function), dtype))


def caught(function: str, mutant: Mutant, dtypes: int | None = None) -> str | None:
    """What the suite says of the mutant in the first ``dtypes`` of the record, or in all; None where it serves what the true kernel does, and
    agrees."""
    for dtype in kept(function).dtypes[:dtypes]:
        served = []
        for row in _rows(function, mutant.wrap(getattr(REFERENCE, function)), dtype):
            if row.wrong:
                return row.detail or row.verdict
            served.append(row.samples)
        if tuple(served) != _served(function, dtype):
            return "refuses a sample"
    return None


class _Untouchable:
    """Stands for an argument of which at most the device may be asked."""

    def __init__(self, device: Any) -> None:
        object.__setattr__(self, "device", device)

    def __getattribute__(self, name: str) -> Any:
        if name != "device":
            raise AssertionError(f"{name} is read")
        return object.__getattribute__(self, name)

    def _read(self, *_: Any) -> Any:
        raise AssertionError("it is read")

    __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __int__ = __index__ = __float__ = __len__ = __iter__ = _read
    __getitem__ = __call__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = __invert__ = _read


@cache
def unread(function: str, parameter: str) -> bool:
    """Whether the reference answers every sample, rightly, without a look at an argument (but for the device of a tensor): whatever it is, the result
    is the same."""
    for sample in kept(function).samples(kept(function).dtypes[0]):
        given = sample.arguments.get(parameter)
        arguments = {**sample.arguments, parameter: _Untouchable(given.device if isinstance(given, torch.Tensor) else None)}
        try:
            result = getattr(REFERENCE, function)(**arguments)
            for output in sample.outputs:
                check(output, result, arguments)
        except Exception:  # it is read
            return False
    return True


def behavioural(function: str) -> list[Mutant]:
    record = kept(function)
    samples = list(record.samples(record.dtypes[0]))
    came = []
    for sample in samples:
        arguments = deepcopy(sample.arguments)
        result, made = changed(getattr(REFERENCE, function), arguments)
        came.append((arguments, result, made))
    return mutants(record, samples, came)
