"""Every record of the table on every backend that is here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tex_backends import Runner, runners

from fusible.conformance.quantized import FORMATS, check_quantized, quantizers
from fusible.conformance.table import Record, check, load
from fusible.errors import NotServedError
from fusible.tex import DType

TABLE = load()


def cases(*, quantizing: bool) -> list[Any]:
    """Every record, dtype and backend that implements the function."""
    return [
        pytest.param(runner, entry, dtype, id=f"{entry.function}-{str(dtype)[6:]}-{runner.backend}")
        for entry in TABLE.values()
        if entry.quantizes or not quantizing
        for dtype in entry.dtypes
        for runner in runners(entry.function)
    ]


@pytest.mark.parametrize(("runner", "entry", "dtype"), cases(quantizing=False))
def test_matches_the_float64_reference(runner: Runner, entry: Record, dtype: torch.dtype) -> None:
    served = 0
    for sample in entry.samples(dtype):
        try:
            result = runner(entry.function, **sample.arguments)
        except NotServedError:  # of options that its kernels do not have
            continue
        served += 1
        for output in sample.outputs:
            try:
                check(output, result, sample.arguments)
            except AssertionError as error:
                raise AssertionError(f"{entry.function} {sample.label}, output {output.at}: {error}") from None
    assert served


@pytest.mark.parametrize("fp8", FORMATS)
@pytest.mark.parametrize(("runner", "entry", "dtype"), cases(quantizing=True))
def test_quantized_outputs_are_within_half_a_step_of_the_reference(runner: Runner, entry: Record, dtype: torch.dtype, fp8: DType) -> None:
    for sample in entry.samples(dtype):
        for quantizer in quantizers(fp8):
            check_quantized(runner, entry.function, sample, quantizer)
