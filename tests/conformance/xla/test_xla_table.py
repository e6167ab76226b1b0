"""The table of tex functions on lazy tensors: a few samples of each record, each being a program of its own; all of them in the slow test."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

import pytest
import test_tex_table as reference
import torch
from xla_runner import RUNNER

from fusible import tex
from fusible.conformance.suite import Verdict, check_record, of_own_making
from fusible.conformance.table import Record, Sample
from fusible.tex import DType
from fusible.tex.backends.xla import XlaBackend
from fusible.tex.backends.xla.unserved import REASONS
from fusible.tex.formats import is_quantized

pytest.importorskip("jaxlib")


def served(function: str) -> bool:
    """Whether the backend has it: of those that it leaves to others, ``test_what_is_left_to_others_is_said_why`` reads the reasons."""
    return XlaBackend().lacks(function) is None


MANY = {"bgrad_group_quantize": 5, "generic_gemm": 11, "group_quantize": 9, "te_general_grouped_gemm": 3}
"""Of these, every n-th sample."""

OF_MEMBERS = XlaBackend.OWN_LAYOUTS
"""Members of grouped tensors lie otherwise in a program, which does not know their sizes: their values are compared, not their bytes."""

CASES = [
    pytest.param(of_own_making(entry), dtype, id=f"{entry.function}-{str(dtype)[6:]}")
    for entry in reference.TABLE.values()
    for dtype in entry.dtypes
    if entry.function not in OF_MEMBERS and served(entry.function)
]
QUANTIZING = [pytest.param(entry, id=entry.function) for entry in reference.TABLE.values() if entry.quantizes and served(entry.function)]


def few(entry: Record, count: int) -> Record:
    """The record with at most ``count`` samples, of those named in ``MANY`` more, spread over all."""

    def sampler(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
        samples = entry.sampler(generator, dtype)
        return islice(samples, 0, None, MANY[entry.function]) if entry.function in MANY else islice(samples, count)

    return replace(entry, sampler=sampler)


@pytest.mark.parametrize(("entry", "dtype"), CASES)
def test_matches_the_float64_reference(entry: Record, dtype: torch.dtype) -> None:
    reference.test_matches_the_float64_reference(RUNNER, few(entry, 4 if dtype is torch.float32 else 2), dtype)


@pytest.mark.parametrize("fp8", [DType.kFloat8E4M3, DType.kFloat8E5M2])
@pytest.mark.parametrize("entry", QUANTIZING)
def test_quantized_outputs_are_within_half_a_step_of_the_reference(entry: Record, fp8: DType) -> None:
    dtype = torch.bfloat16 if fp8 == DType.kFloat8E4M3 else torch.float32
    reference.test_quantized_outputs_are_within_half_a_step_of_the_reference(RUNNER, few(entry, 1), dtype, fp8)


def is_served(function: str, values: Iterable[object]) -> bool:
    """Whether a program serves a call: none, and it says so, of grouped tensors whose members differ in width, of a generator of torch that dropout
    draws from, and of attention of FP8 tensors."""
    for value in values:
        if isinstance(value, torch.Generator) or getattr(value, "last_dims", None) is not None:
            return False
        if function.startswith("fused_attn") and is_quantized(value):
            return False
    return True


def of_programs(entry: Record) -> Record:
    """The record without samples that a program does not serve."""

    def sampler(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
        return (sample for sample in entry.sampler(generator, dtype) if is_served(entry.function, sample.arguments.values()))

    return replace(entry, sampler=sampler)


@pytest.mark.slow
@pytest.mark.parametrize(("entry", "dtype"), CASES)
def test_every_sample_matches_the_float64_reference(entry: Record, dtype: torch.dtype) -> None:
    reference.test_matches_the_float64_reference(RUNNER, of_programs(entry), dtype)


@pytest.mark.parametrize("function", sorted(OF_MEMBERS))
def test_members_have_the_reference_values_wherever_they_lie(function: str) -> None:
    (row,) = check_record(RUNNER, few(reference.TABLE[function], 0), torch.float32, own_layout=True)
    assert row.verdict == Verdict.AGREES and row.samples >= 4, row.detail


def test_what_is_left_to_others_is_said_why() -> None:
    found = tex.coverage()
    lacking = {name for name, row in found.items() if row["torch"] is None and row["xla"] is not None}
    assert lacking == set(REASONS)
    assert not any("not implemented" in (row["xla"] or "") for row in found.values())
