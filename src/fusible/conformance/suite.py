"""Runs the table on one backend: how far each function, in each dtype, is from float64 and from the torch backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from fusible import tex
from fusible.conformance.crossing import Crossing
from fusible.conformance.memory import Snapshot
from fusible.conformance.nothing import check_of_nothing, tex_function
from fusible.conformance.pairs import PAIRS
from fusible.conformance.properties import Properties
from fusible.conformance.quantized import FORMATS, check_quantized, check_scalars, quantizers, scalar_quantizer
from fusible.conformance.special import OPEN, PLANTINGS, TURNS, UNPLANTED, planting
from fusible.conformance.table import Disagreement, Output, Record, Sample, load, measure, measure_special
from fusible.errors import ArgumentError, NotServedError, expected
from fusible.quantized import GroupedTensorStorage
from fusible.tex import DType
from fusible.tex.calls.grouped import is_grouped
from fusible.tex.formats import scheme_of
from fusible.tex.interface.declare import DECLARATIONS
from fusible.tex.interface.prim import COLLECTIVES
from fusible.tex.selection.registry import registry

__all__ = ["Agreement", "Verdict", "check_backend", "check_record", "crossing_for", "of_own_making", "without_cases"]

Call = Callable[..., Any]

_OF_A_GROUP = frozenset(COLLECTIVES)
"""Functions that several processes call together. A sample of the table is a call by one process."""

_COPIES = ("rowwise", "columnwise")


class Verdict:
    """The outcomes of checking a function in one dtype. The last two mean that something is wrong."""

    AGREES = "agrees"
    REFUSED = "refused"
    DISAGREES = "disagrees"
    FAILS = "fails"


@dataclass(frozen=True)
class Agreement:
    """The outcome for one function in one dtype.

    ``samples`` counts those that the backend served. ``float64`` and ``reference`` are the largest distances from float64 and from the torch
    backend, as shares of the allowed ones; None where there was nothing to compare. ``detail`` says why a verdict is not "agrees".
    """

    function: str
    dtype: str
    verdict: str
    samples: int = 0
    float64: float | None = None
    reference: float | None = None
    detail: str = ""

    @property
    def wrong(self) -> bool:
        return self.verdict in (Verdict.DISAGREES, Verdict.FAILS)


def without_cases() -> list[str]:
    """The functions that a backend of this package serves and the table lacks, except those that several processes call together."""
    known = load().keys() | _OF_A_GROUP
    return sorted(name for name, declaration in DECLARATIONS.items() if declaration.unserved is None and name not in known)


def crossing_for(backend: str, device: str | None = None) -> Callable[[], Crossing]:
    """The crossing to a backend: to ``device`` or a device that the backend serves, or to tensors that record where it serves only those."""
    devices = registry.find(backend).DEVICES
    if device is None and devices == frozenset({"lazy"}):
        from fusible.conformance.recording import RecordingCrossing  # noqa: PLC0415 - for what it costs: it brings jaxlib

        return RecordingCrossing
    chosen = device or ("cpu" if devices is None or "cpu" in devices else min(devices))
    return lambda: Crossing(chosen)


def check_backend(
    backend: str, functions: Sequence[str] | None = None, dtypes: Sequence[torch.dtype] | None = None, device: str | None = None
) -> Iterator[Agreement]:
    """Check every function that ``backend`` has and the table knows, or those named, in all their dtypes or those given.

    Raises ``BackendError`` for an unknown or unavailable backend, ``ArgumentError`` for a function that the table does not know.
    """
    table = load()
    unknown = sorted(set(functions or ()) - set(table))
    if unknown:
        raise ArgumentError(expected("functions of the suite", of="check-backend", got=", ".join(unknown), do="see 'fusible info --tex'"))
    call = _Caller(backend, crossing_for(backend, device))
    with tex.set_backend(backend) as found:
        for name, record in sorted(table.items()):
            record = of_own_making(record) if found.OWN_LAYOUTS else record
            lacking = found.lacks(name)
            if (functions is None and lacking is not None) or (functions is not None and name not in functions):
                continue
            # What its method calls in turn is served as ever.
            with tex.set_policy(None, **{name: backend}):
                for dtype in record.dtypes:
                    if dtypes is None or dtype in dtypes or len(record.dtypes) == 1:
                        yield from check_record(call, record, dtype, name in found.OWN_LAYOUTS, memory=found.DEVICES != frozenset({"lazy"}))


def of_own_making(record: Record) -> Record:
    """The record for a backend that lays out grouped tensors in its own way. It lacks the samples with block-scaled grouped tensors, whose buffers
    such a backend cannot read."""

    def sample(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
        for each in record.sampler(generator, dtype):
            if not any(is_grouped(x) and scheme_of(x.quantizer).format.block_scaled for x in each.arguments.values()):
                yield each

    return replace(record, sampler=sample)


class _Caller:
    """Calls a function on a backend. ``last``: the arguments and the result of the latest call, as they were on the backend's side."""

    def __init__(self, backend: str, cross: Callable[[], Crossing]) -> None:
        self._backend, self._cross = backend, cross
        self.last: tuple[Any, Any] | None = None

    def __call__(self, function: str, **arguments: Any) -> Any:
        crossing = self._cross()
        entered = crossing.enter(arguments)
        decision = tex.explain(function, **entered)
        if decision.backend != self._backend:
            raise NotServedError(dict(decision.others).get(self._backend, "not served"))
        result = tex_function(function)(**entered)
        self.last = entered, result
        return crossing.leave(result)


def check_record(call: Call, record: Record, dtype: torch.dtype, own_layout: bool = False, *, memory: bool = True) -> Iterator[Agreement]:
    """Check a function in one dtype, and its quantized outputs where it has some. ``call(function, **arguments)`` runs it.

    ``own_layout``: the backend lays out grouped tensors in its own way, so they are compared by the values that its ``group_dequantize`` reads.
    ``memory``: the backend's tensors have memory, so that arguments may be given with other strides; tensors that record have none.
    """
    label = str(dtype).removeprefix("torch.")
    yield _checked(record, label, lambda row: _plain(row, call, record, dtype, own_layout, memory))
    for fp8 in FORMATS if record.quantizes else ():
        yield _checked(record, f"{label} to {fp8.name.removeprefix('kFloat8')}", lambda row, fp8=fp8: _quantizing(row, call, record, dtype, fp8))


def _checked(record: Record, label: str, run: Callable[[Agreement], Agreement]) -> Agreement:
    """The row that ``run`` returns, given one that agrees. An exception other than a disagreement or a refusal is a failure of the backend."""
    row = Agreement(record.function, label, Verdict.AGREES)
    try:
        return run(row)
    except Exception as error:
        return replace(row, verdict=Verdict.FAILS, detail=f"{type(error).__name__}: {error}".splitlines()[0])


def _plain(row: Agreement, call: Call, record: Record, dtype: torch.dtype, own_layout: bool, memory: bool) -> Agreement:
    reference = registry.find("torch")
    method = getattr(reference, record.function)
    properties = Properties(record.function, call, method, memory=memory and not own_layout)
    refusal = ""
    for sample in record.samples(dtype):
        fresh, again, before = deepcopy(sample.arguments), deepcopy(sample.arguments), Snapshot(sample.arguments)
        random = [torch.get_rng_state()]
        try:
            result = call(record.function, **sample.arguments)
        except NotServedError as error:
            refusal = str(error)
            continue
        random.append(torch.get_rng_state())
        theirs = method(**again)
        random.append(torch.get_rng_state())
        try:
            if not torch.equal(random[0], random[1]) and torch.equal(random[1], random[2]):
                raise Disagreement("the call drew from torch's generator, which it has no need of")
            if own_layout:
                sample = _compared_by_value(sample, call, result, reference, theirs)
            row = _compared(row, sample, result, again, theirs)
            properties.check(sample, fresh, before, result, (again, theirs), partial(_within_bounds, sample.outputs))
        except Disagreement as error:
            return replace(row, verdict=Verdict.DISAGREES, detail=f"{sample.label}: {error}")
    if row.samples and not own_layout:
        try:
            # Each sample is a program where tensors record: fewer of them.
            check_of_nothing(record.function, call, record.samples(dtype, 1)[0], None if memory else 1)
            _planted(call, record, dtype, method, PLANTINGS if memory else PLANTINGS[::TURNS])
            check_scalars(record.function, call, method, record.samples(dtype))
            with suppress(NotServedError):
                PAIRS.get(record.function, lambda *_: None)(call, dtype)
        except Disagreement as error:
            return replace(row, verdict=Verdict.DISAGREES, detail=str(error))
    return row if row.samples or not refusal else replace(row, verdict=Verdict.REFUSED, detail=refusal)


def _planted(call: Call, record: Record, dtype: torch.dtype, method: Call, plantings: Sequence[tuple[str, int]]) -> None:
    """Raise ``Disagreement`` unless the samples also agree with NaN, infinities and extreme numbers among their random values."""
    plain = record.samples(dtype)
    for kind, turn in plantings:
        if kind in UNPLANTED.get(record.function, ()):
            continue
        with planting(kind, turn) as chosen:
            samples = record.samples(dtype)
        for usual, sample in zip(plain, samples, strict=True) if chosen.drawn > turn else ():
            again = deepcopy(sample.arguments)
            try:
                result = call(record.function, **sample.arguments)
            except NotServedError:
                continue
            of_reference = record.function in OPEN[kind]
            theirs = method(**again) if of_reference else None
            for output, former in zip(sample.outputs, usual.outputs, strict=True):
                got = output.find(result, sample.arguments)
                own = output.expect(result, sample.arguments)
                try:
                    share = measure_special(output, former, kind, got, output.find(theirs, again) if of_reference else own)
                except Disagreement as error:
                    if of_reference and output.drawn and _agrees(output, former, kind, got, own):
                        continue
                    raise Disagreement(f"{sample.label} with special values ({kind}): output {output.at or 0}: {error}") from None
                if share > (2 if of_reference else 1):
                    raise Disagreement(f"{sample.label} with special values ({kind}): output {output.at or 0} is {share:.3g} times its bound")


def _agrees(output: Output, usual: Output, kind: str, got: Any, wanted: Any) -> bool:
    """Whether an output is what its own result says that it has to be: of what is left as it was, say, where the reference rounds otherwise."""
    try:
        return measure_special(output, usual, kind, got, wanted) <= 1
    except Disagreement:
        return False


def _within_bounds(outputs: tuple[Output, ...], result: Any, arguments: dict[str, Any]) -> float:
    """The largest distance from float64; raises ``Disagreement`` where it is beyond its bound."""
    largest = 0.0
    for output in outputs:
        share = measure(output, output.find(result, arguments), output.expect(result, arguments))
        if share > 1:
            raise Disagreement(f"output {output.at or 0} is {share:.3g} times its bound from float64")
        largest = max(largest, share)
    return largest


def _compared_by_value(sample: Sample, call: Call, result: Any, reference: Any, theirs: Any) -> Sample:
    """The sample without the bytes of its quantized grouped tensor, both copies of which are compared by value instead."""
    mine, theirs = (next(x for x in (found if isinstance(found, list) else [found]) if is_grouped(x)) for found in (result, theirs))
    if mine.quantizer is None:
        return sample
    for way in _COPIES:
        present = getattr(theirs, f"{way}_data") is not None
        if (getattr(mine, f"{way}_data") is not None) != present:
            raise Disagreement(f"a {way} copy where there is none, or none where there is one")
        if present:
            got = call("group_dequantize", input=_only(mine, way), otype=torch.float32)
            wanted = reference.group_dequantize(_only(theirs, way), torch.float32)
            measure(Output(None, wanted.rowwise_data), got.rowwise_data, wanted.rowwise_data)
    hidden = ("wise_data", "scale_inv") if scheme_of(mine.quantizer).format.block_scaled else ("wise_data",)
    return replace(sample, outputs=tuple(output for output in sample.outputs if not str(output.at).endswith(hidden)))


def _only(x: GroupedTensorStorage, way: str) -> GroupedTensorStorage:
    """The grouped tensor ``x`` with one of its copies."""
    twin = copy(x)
    for other in _COPIES:
        if other != way:
            setattr(twin, f"{other}_data", None)
    return twin


def _compared(row: Agreement, sample: Sample, result: Any, again: dict[str, Any], other: Any) -> Agreement:
    float64, difference = max(row.float64 or 0.0, _within_bounds(sample.outputs, result, sample.arguments)), row.reference or 0.0
    for output in sample.outputs:
        theirs = output.find(other, again)
        if isinstance(theirs, torch.Tensor) and not output.drawn:
            # Each may be a bound away from float64.
            exact = output.reference.dtype is not torch.float64
            got = output.find(result, sample.arguments)
            difference = max(difference, measure(output, got, theirs if exact else theirs.double()) / 2)
    return replace(row, samples=row.samples + 1, float64=float64, reference=difference)


def _quantizing(row: Agreement, call: Call, record: Record, dtype: torch.dtype, fp8: DType) -> Agreement:
    refusal = ""
    for i, sample in enumerate(record.samples(dtype)):
        for quantizer in (*quantizers(fp8), *([scalar_quantizer(fp8)] if not i else [])):
            try:
                check_quantized(call, record.function, sample, quantizer)
                row = replace(row, samples=row.samples + 1)
            except NotServedError as error:
                refusal = str(error)
            except Disagreement as error:
                return replace(row, verdict=Verdict.DISAGREES, detail=f"{sample.label}, {type(quantizer).__name__}: {error}")
    return row if row.samples or not refusal else replace(row, verdict=Verdict.REFUSED, detail=refusal)
