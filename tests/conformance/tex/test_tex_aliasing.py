"""An argument that is written and is another argument too: the result is what it is apart, or the call is refused before anything is written.

Generated over the table: of every sample, each tensor that a call writes is exchanged for each one that it reads and that has the same shape and
dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tex_backends import Runner, runners
from torch import Tensor

from fusible.conformance.table import FLOATS, Record, Sample, load
from fusible.errors import FusibleError

TABLE = load()


def plain(x: Any) -> bool:
    return type(x) is Tensor and x.is_floating_point() | (x.dtype in (torch.uint8, torch.int32)) and x.numel() > 1


def drawn(function: str) -> bool:
    """Whether two calls give different numbers."""
    return "dropout" in function


def pairs(sample: Sample) -> Iterator[tuple[str, str]]:
    """``(written, read)``: names of arguments of one shape and dtype, the first of which the sample's outputs name."""
    named = {output.at for output in sample.outputs if isinstance(output.at, str)}
    for written in sorted(name for name in named if plain(sample.arguments.get(name))):
        for read, x in sample.arguments.items():
            target = sample.arguments[written]
            if read != written and plain(x) and x.shape == target.shape and x.dtype is target.dtype:
                yield written, read


def outcome(runner: Runner, function: str, arguments: dict[str, Any], written: str) -> Tensor:
    runner(function, **arguments)
    return arguments[written].clone()


def check(runner: Runner, function: str, make: Callable[[], Sample], written: str, read: str) -> bool:
    """Whether the pair could be tried. What is written must not be read too, so that apart it may begin with the values of the other."""
    apart, other, together = (make().arguments for _ in range(3))
    apart[written].copy_(apart[read])
    wanted = outcome(runner, function, apart, written)
    other[written].copy_(other[read].flip(0))
    if not torch.equal(outcome(runner, function, other, written), wanted):
        return False  # it accumulates
    before = together[read].clone()
    together[written] = together[read]
    try:
        found = outcome(runner, function, together, written)
    except FusibleError:
        assert torch.equal(together[read], before), f"{function} wrote to {read} and then refused it as {written}"
        return True
    assert torch.equal(found, wanted), f"{function} with {written} = {read}: {(found != wanted).sum()} of {found.numel()} elements differ"
    return True


CASES = [
    pytest.param(runner, entry, dtype, id=f"{entry.function}-{str(dtype)[6:]}-{runner.backend}")
    for entry in TABLE.values()
    if not drawn(entry.function)
    for dtype in entry.dtypes
    if dtype not in FLOATS[1:]
    for runner in runners(entry.function)
]


def test_the_table_has_such_pairs() -> None:
    with_pairs = {entry.function for entry in TABLE.values() if any(pairs(entry.samples(entry.dtypes[0], 1)[0]))}
    assert len(with_pairs) >= 8, with_pairs


@pytest.mark.parametrize(("runner", "entry", "dtype"), CASES)
def test_what_is_written_may_be_what_is_read_or_is_refused(runner: Runner, entry: Record, dtype: torch.dtype) -> None:
    seen: set[tuple[str, str]] = set()
    for place, sample in enumerate(entry.samples(dtype)):
        for pair in pairs(sample):
            if pair not in seen:
                seen.add(pair)
                check(runner, entry.function, lambda place=place: entry.samples(dtype)[place], *pair)


def square() -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(16, 16)


MOVEMENTS: dict[str, Callable[[Tensor, Any], dict[str, Any]]] = {
    "fp8_transpose": lambda x, out: {"input": x, "dtype": 7, "out": out},
    "swap_first_dims": lambda x, out: {"tensor": x, "out": out},
}


@pytest.mark.parametrize("function", MOVEMENTS)
def test_a_movement_into_its_own_input_is_refused(function: str) -> None:
    for runner in runners(function):
        x = square()
        for out in (x, x.view(-1).view(16, 16), x.view(-1)[:256].view(16, 16)):
            with pytest.raises(FusibleError, match="memory of its own"):
                runner(function, **MOVEMENTS[function](x, out))
            assert torch.equal(x, square())
        half = torch.zeros(512, dtype=torch.uint8)
        given, out = half[:256].view(16, 16).copy_(square()), half[256:].view(16, 16)
        runner(function, **MOVEMENTS[function](given, out))
        assert torch.equal(out, square().t())
