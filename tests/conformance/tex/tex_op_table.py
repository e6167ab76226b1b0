"""The table of tex functions: for each, samples with a float64 reference and a bound on the error. It runs on any backend.

The bound of an element is half a unit in the last place of the output's dtype (the one rounding), plus the fp32 error of what came before:
``(reduction length + 16) * eps(fp32) * magnitude``, where the magnitude is the largest sum of absolute values that was added up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Output:
    """One expected output: ``at`` is its place in the returned list (None: the return value itself), ``reference`` its float64 value or None."""

    at: int | None
    reference: Tensor | None
    dtype: torch.dtype = torch.float32
    length: int = 1
    magnitude: float | None = None


@dataclass(frozen=True)
class Sample:
    label: str
    arguments: dict[str, Any]
    outputs: tuple[Output, ...]


Sampler = Callable[[torch.Generator, torch.dtype], Iterator[Sample]]


@dataclass(frozen=True)
class Record:
    function: str
    sampler: Sampler = field(repr=False)
    dtypes: tuple[torch.dtype, ...] = FLOATS
    quantizes: bool = False

    def samples(self, dtype: torch.dtype) -> list[Sample]:
        return list(self.sampler(torch.Generator().manual_seed(len(self.function) * 7919 + 11), dtype))


TABLE: dict[str, Record] = {}


def record(function: str, *, dtypes: tuple[torch.dtype, ...] = FLOATS, quantizes: bool = False) -> Callable[[Sampler], Sampler]:
    """Enter a sampler into the table."""

    def enter(sampler: Sampler) -> Sampler:
        assert function not in TABLE
        TABLE[function] = Record(function, sampler, dtypes, quantizes)
        return sampler

    return enter


def check(output: Output, got: Any) -> None:
    """Compare one output with its reference."""
    if output.reference is None:
        assert got is None
        return
    assert got.dtype is output.dtype, f"{got.dtype} instead of {output.dtype}"
    assert tuple(got.shape) == tuple(output.reference.shape)
    close(got, output.reference, output.dtype, output.length, output.magnitude)


def close(got: Tensor, reference: Tensor, dtype: torch.dtype, length: int = 1, magnitude: float | None = None) -> None:
    """Assert that ``got`` is within the bound that the module's docstring derives."""
    if not reference.numel():
        return
    info = torch.finfo(dtype)
    finite = reference.isfinite()
    assert torch.equal(got.double()[~finite].nan_to_num(5), reference[~finite].nan_to_num(5))
    largest = reference[finite].abs().max().item() if finite.any() else 0.0
    work = (length + 16) * torch.finfo(torch.float32).eps * (largest if magnitude is None else magnitude)
    bound = 0.5001 * info.eps * reference.abs() + info.smallest_normal * info.eps + work
    excess = ((got.double() - reference).abs() - bound)[finite]
    assert not excess.numel() or excess.max().item() <= 0, f"exceeds its bound by {excess.max().item():.3e} (largest value {largest:.3e})"


def random(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype, spread: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=generator) * spread).to(dtype)


def strided(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor whose memory order is not its dimension order."""
    return random(generator, shape[::-1], dtype).permute(*reversed(range(len(shape))))
