"""A refused call of tex leaves every tensor as it was: also where one that it writes cannot be written, which torch tells when it is written to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from bad_calls import BadCall, clear, public
from wrong_values import changed, state

from fusible.conformance.table import Record, Sample, load

TABLE = load()
FIRST = 2
"""Of a list, so many are replaced in turn: after a first one that was written, a second one that cannot be."""


def unwritable(x: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors with which a call may begin, but to which torch does not write."""
    if x.ndim and x.shape[-1] > 1:
        yield "expanded", x.detach()[..., :1].clone().expand(x.shape)
    if x.numel() > 1:
        yield "overlapping", torch.empty(x.numel() + 1, dtype=x.dtype).view(torch.uint8).zero_().view(x.dtype).as_strided(x.shape, (1,) * x.ndim)
    if x.ndim and x.dtype.itemsize > 1:
        yield "sparse", x.detach().to_sparse()
    with torch.inference_mode():
        yield "of inference mode", x.detach().clone()
    if x.is_floating_point() and x.dtype.itemsize > 1:
        yield "a leaf", x.detach().clone().requires_grad_()


def _places(value: Any, place: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    if isinstance(value, torch.Tensor) and type(value) in (torch.Tensor, torch.nn.Parameter):
        yield place, value
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value[:FIRST]):
            yield from _places(item, (*place, i))


def _put(value: Any, place: tuple[int, ...], x: torch.Tensor) -> Any:
    return x if not place else [_put(item, place[1:], x) if i == place[0] else item for i, item in enumerate(value)]


def _calls(sample: Sample, function: str) -> Iterator[BadCall]:
    for name, value in sample.arguments.items():
        for place, x in _places(value):
            for what, other in unwritable(x):
                arguments = deepcopy({key: None if key == name else each for key, each in sample.arguments.items()})
                arguments[name] = _put(deepcopy(value), place, other)
                yield BadCall(function, name, f"{what} {list(place)}", arguments, sample, relative=True)


def _scored(record: Record, sample: Sample) -> tuple[Counter[str], list[str]]:
    counts, wrong = Counter[str](), []
    for call in _calls(sample, record.function):
        before = list(state(call.arguments))
        try:
            public(record.function)(**call.arguments)
        except Exception as error:
            found = "half written" if changed(before, list(state(call.arguments))) else clear(error, call) or "clear"
            if found != "clear":
                wrong.append(f"{call}: {found}: {type(error).__name__}: {str(error)[:200]}")
        else:
            found = "accepted"
        counts[found] += 1
    return counts, wrong


def test_a_call_that_cannot_write_writes_nothing() -> None:
    counts, wrong = Counter[str](), []
    for record in TABLE.values():
        found, sentences = _scored(record, record.samples(record.dtypes[0], 1)[0])
        counts += found
        wrong += sentences
    print(dict(counts))
    assert not wrong, "\n".join(wrong)
    assert counts["clear"] > 400, counts


@pytest.mark.slow
@pytest.mark.parametrize("function", TABLE)
def test_no_call_that_cannot_write_writes(function: str) -> None:
    record = TABLE[function]
    for dtype in record.dtypes[:2]:
        samples = record.samples(dtype)
        for sample in (samples[len(samples) // 2], samples[-1]):
            counts, wrong = _scored(record, sample)
            print(function, dict(counts))
            assert not wrong, "\n".join(wrong)
