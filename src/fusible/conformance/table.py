"""The table of tex functions: sample calls of each, with their expected outputs. It runs on any backend.

The bound on the error of an element is half a unit in the last place of the output's dtype, for the final rounding, plus the error of the fp32
computation before it: ``(reduction length + 16) * eps(fp32) * magnitude``. The magnitude is the largest sum of absolute values that the reduction
adds up. Integers, bytes and values that are no tensors are compared exactly.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from fusible.conformance.special import plant

__all__ = [
    "Arguments",
    "Disagreement",
    "FLOATS",
    "Found",
    "Output",
    "Record",
    "Sample",
    "Sampler",
    "TABLE",
    "bits",
    "check",
    "close",
    "load",
    "measure",
    "measure_special",
    "random",
    "record",
    "strided",
]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Disagreement(AssertionError):
    """A result differs from the expected one; the message says how."""


Arguments = dict[str, Any]
Found = Callable[[Any, Arguments], Any]
"""A function of the ``(result, arguments)`` of a call."""


@dataclass(frozen=True)
class Output:
    """One output of a call: where to find it, and its expected value.

    ``at``: None for the return value; an integer for an item of the returned list; a path of attributes and indices from ``result`` or from an
    argument's name, such as ``"result._data"``, ``"quantizer.amax"``, ``"tensor_lists.1.0"``; or a function of ``(result, arguments)``.

    ``reference``: a float64 tensor, to which the output, of ``dtype``, has to be close: ``length`` and ``magnitude`` are those of the bound in the
    module's docstring. Or a tensor of another dtype, None or any other value, which the output has to equal. Or a function of ``(result,
    arguments)`` that gives one of these, for outputs that depend on random numbers of the backend.
    """

    at: int | str | Found | None
    reference: Any
    dtype: torch.dtype = torch.float32
    length: int = 1
    magnitude: float | None = None

    def find(self, result: Any, arguments: dict[str, Any]) -> Any:
        """The value of this output after the call."""
        if self.at is None:
            return result
        if isinstance(self.at, int):
            return result[self.at]
        if not isinstance(self.at, str):
            return self.at(result, arguments)
        root, *path = self.at.split(".")
        found = result if root == "result" else arguments[root]
        for step in path:
            found = found[int(step)] if step.isdigit() else getattr(found, step)
        return found

    def expect(self, result: Any, arguments: dict[str, Any]) -> Any:
        """The expected value of this output."""
        return self.reference(result, arguments) if self.drawn else self.reference

    @property
    def drawn(self) -> bool:
        """Whether the expected value depends on the result, so that two backends may differ in it."""
        return callable(self.reference)


@dataclass(frozen=True)
class Sample:
    """One call: its arguments by name, and its expected outputs. ``writes``: paths of further arguments that the call may write to."""

    label: str
    arguments: dict[str, Any]
    outputs: tuple[Output, ...]
    writes: tuple[str, ...] = ()

    @property
    def written(self) -> frozenset[str]:
        """The paths of the arguments that the call may write to. It may write to no other memory."""
        paths = (output.at for output in self.outputs if isinstance(output.at, str))
        return frozenset(path for path in (*self.writes, *paths) if not path.startswith("result"))


Sampler = Callable[[torch.Generator, torch.dtype], Iterator[Sample]]


@dataclass(frozen=True)
class Record:
    """The samples of a function in some dtypes. ``quantizes``: it takes a ``quantizer``, which quantizes its first output."""

    function: str
    sampler: Sampler = field(repr=False)
    dtypes: tuple[torch.dtype, ...] = FLOATS
    quantizes: bool = False

    def samples(self, dtype: torch.dtype, most: int | None = None) -> list[Sample]:
        """The samples in ``dtype``, or the first ``most`` of them. Every call gives the same values in new tensors."""
        return list(islice(self.sampler(torch.Generator().manual_seed(len(self.function) * 7919 + 11), dtype), most))


TABLE: dict[str, Record] = {}
"""Every record by the name of its function; ``load`` fills it."""


def record(function: str, *, dtypes: tuple[torch.dtype, ...] = FLOATS, quantizes: bool = False) -> Callable[[Sampler], Sampler]:
    """Enter a sampler into the table."""

    def enter(sampler: Sampler) -> Sampler:
        assert function not in TABLE, f"{function} is in the table already"
        TABLE[function] = Record(function, sampler, dtypes, quantizes)
        return sampler

    return enter


def load() -> dict[str, Record]:
    """The table, with the records of every module of ``fusible.conformance.cases``."""
    cases = importlib.import_module("fusible.conformance.cases")
    for module in pkgutil.iter_modules(cases.__path__):
        importlib.import_module(f"{cases.__name__}.{module.name}")
    return TABLE


def check(output: Output, result: Any, arguments: dict[str, Any]) -> None:
    """Raise ``Disagreement`` unless ``output`` has its expected value."""
    share = measure(output, output.find(result, arguments), output.expect(result, arguments))
    if share > 1:
        raise Disagreement(f"the largest error is {share:.3g} times its bound")


def measure(output: Output, got: Any, wanted: Any) -> float:
    """The largest error of ``got`` as a share of its bound, at most 1 where it agrees. Raises ``Disagreement`` where type, shape or data differ."""
    if not isinstance(wanted, Tensor):
        if isinstance(got, Tensor) or got != wanted:
            raise Disagreement(f"{_show(got)} instead of {wanted}")
        return 0.0
    if not isinstance(got, Tensor):
        raise Disagreement(f"{_show(got)} instead of a tensor {list(wanted.shape)}")
    dtype = output.dtype if wanted.dtype is torch.float64 else wanted.dtype
    if got.dtype is not dtype or got.shape != wanted.shape:
        raise Disagreement(f"{_show(got)} instead of {dtype} {list(wanted.shape)}")
    got = got.detach().cpu()
    if wanted.dtype is torch.float64:
        return _share(got, wanted, dtype, output.length, output.magnitude)
    differs = bits(got) != bits(wanted)
    if wanted.is_floating_point() and wanted.itemsize > 1:
        differs &= ~(got.isnan() & wanted.isnan())  # whose other bits mean nothing
    if differs.any():
        raise Disagreement(f"{differs.sum().item()} of {wanted.numel()} elements differ")
    return 0.0


def measure_special(output: Output, usual: Output, kind: str, got: Any, wanted: Any) -> float:
    """``measure`` where special values of a kind were planted; ``usual`` is the same output without them.

    The magnitude is the largest of three: that of ``output``, that of ``usual``, and four times the largest finite expected number. With subnormal
    numbers it is at least 1, for hardware may flush them to 0. With infinities, any value agrees where float64 has NaN: the difference of two
    infinities is NaN, and a right formula need not form that difference.
    """
    reference = output.reference
    near = isinstance(reference, Tensor) and reference.dtype is torch.float64
    if not isinstance(wanted, Tensor) or (wanted.dtype is not torch.float64 and not near):
        return measure(output, _signed_alike(got, wanted), wanted)
    wanted = wanted.double()
    finite = wanted[wanted.isfinite()].abs()
    sizes = [
        max(4 * finite.max().item() if finite.numel() else 1.0, 1.0 if kind == "finite" else 0.0),
        *(x.magnitude for x in (output, usual) if x.magnitude is not None),
    ]
    if kind == "inf" and isinstance(got, Tensor) and got.shape == wanted.shape:
        wanted = torch.where(wanted.isnan(), got.detach().cpu().double(), wanted)
    return measure(replace(output, magnitude=max(size for size in sizes if math.isfinite(size))), got, wanted)


def _signed_alike(got: Any, wanted: Any) -> Any:
    """``got`` with the signs of ``wanted`` where both are 0x7F or 0xFF, the NaN of FP8: processors give it the one or the other."""
    if not all(isinstance(x, Tensor) and x.dtype is torch.uint8 for x in (got, wanted)) or got.shape != wanted.shape:
        return got
    got = got.detach().cpu()
    return torch.where((got & 0x7F == 0x7F) & (wanted & 0x7F == 0x7F), wanted, got)


def _show(x: Any) -> str:
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else repr(x)


def bits(x: Tensor) -> Tensor:
    """The elements of ``x`` as integers of their size."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(integers[x.element_size()])


def _share(got: Tensor, reference: Tensor, dtype: torch.dtype, length: int, magnitude: float | None) -> float:
    if not reference.numel():
        return 0.0
    info = torch.finfo(dtype)
    # A number that rounds to more than the largest finite one becomes infinite.
    reference = torch.where(reference.abs() < info.max * (1 + info.eps / 4), reference, reference * torch.inf)
    finite = reference.isfinite()
    if not torch.equal(got.double()[~finite].nan_to_num(5), reference[~finite].nan_to_num(5)):
        raise Disagreement("values that are not finite differ")
    largest = reference[finite].abs().max().item() if finite.any() else 0.0
    work = (length + 16) * torch.finfo(torch.float32).eps * (largest if magnitude is None else magnitude)
    bound = 0.5001 * info.eps * reference.abs() + info.smallest_normal * info.eps + work
    shares = ((got.double() - reference).abs() / bound)[finite]
    return shares.max().nan_to_num(torch.inf, torch.inf).item() if shares.numel() else 0.0


def close(got: Tensor, reference: Tensor, dtype: torch.dtype, length: int = 1, magnitude: float | None = None) -> None:
    """Raise ``Disagreement`` unless ``got`` is within the bound of the module's docstring."""
    share = _share(got, reference, dtype, length, magnitude)
    if share > 1:
        raise Disagreement(f"the largest error is {share:.3g} times its bound")


def random(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype, spread: float = 1.0) -> Tensor:
    """Normally distributed values."""
    return plant((torch.randn(shape, generator=generator) * spread).to(dtype))


def strided(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor whose memory order is not its dimension order."""
    return random(generator, shape[::-1], dtype).permute(*reversed(range(len(shape))))
