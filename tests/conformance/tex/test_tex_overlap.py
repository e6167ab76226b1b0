"""Tensors of a call that lie in one another's memory: the result is what it is apart, or the call is refused before anything is written.

Generated over the table: each plain tensor that a sample says is written shares a buffer with each other one of the call, from the same place on or
one element before or after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from fusible import cpp_extensions, tex
from fusible.conformance.table import Record, Sample, load
from fusible.errors import FusibleError
from fusible.tex.calls.memory_checks import surely_disjoint
from fusible.tex.interface.declare import DECLARATIONS

TABLE = load()
BACKENDS = ("torch", *(("cpu",) if cpp_extensions.available else ()))
SAMPLES, WRITTEN, OTHERS = 2, 3, 6
"""How many of each are tried; the slow test tries all."""

Place = tuple[str | int, ...]


def plain(value: Any, place: Place) -> Iterator[tuple[Place, Tensor]]:
    """The tensors of an argument that can be laid elsewhere, each with its path."""
    if type(value) is Tensor:
        if value.is_cpu and value.layout is torch.strided and value.is_contiguous() and value.numel():
            yield place, value
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from plain(item, (*place, i))


def tensors(arguments: dict[str, Any]) -> dict[Place, Tensor]:
    return dict(found for name, value in arguments.items() for found in plain(value, (name,)))


def put(x: Any, place: Place, value: Tensor) -> Any:
    if not place:
        return value
    first, rest = place[0], place[1:]
    if isinstance(x, dict):
        return {**x, first: put(x[first], rest, value)}
    return type(x)(put(item, rest, value) if i == first else item for i, item in enumerate(x))


def raw(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


def written(sample: Sample) -> set[Place]:
    """The plain tensors that the sample says may be written."""
    paths = {tuple(int(part) if part.isdigit() else part for part in path.split(".")) for path in sample.written}
    return {place for place in tensors(sample.arguments) if any(place[: len(path)] == path for path in paths)}


def pairs(sample: Sample, most: tuple[int, int]) -> Iterator[tuple[Place, Place]]:
    """A written tensor, and another one of the call."""
    found, out = sorted(tensors(sample.arguments), key=str), written(sample)
    for place in sorted(out, key=str)[: most[0]]:
        others = [other for other in found if other != place and not (other in out and str(other) < str(place))]
        yield from ((place, other) for other in others[: most[1]])


def outcome(function: str, backend: str, sample: Sample, places: tuple[Place, Place], shift: int) -> str:
    call = getattr(tex.prim if function.startswith("prim_") else tex, function.removeprefix("prim_"))
    found = tensors(sample.arguments)
    x, y = (found[place] for place in places)
    step = max(x.element_size(), y.element_size())
    first = 8 * step
    buffer = torch.zeros(max(x.nbytes, y.nbytes) + 2 * first, dtype=torch.uint8)
    offsets = first + shift * step, first

    def lay(like: Tensor, at: int, memory: Tensor) -> Tensor:
        return memory[at : at + like.nbytes].view(like.dtype).view(like.shape)

    laid = [lay(like, at, buffer) for like, at in zip((x, y), offsets, strict=True)]
    laid[0].copy_(x)
    laid[1].copy_(y)
    # Apart, each lies as many bytes behind the start of its memory: on some processors the order of a product's sums hangs on it.
    apart, contents = ([lay(like, at, buffer.clone()) for like, at in zip((x, y), offsets, strict=True)] for _ in range(2))
    with tex.set_backend(backend):
        try:
            call(**put(put(deepcopy(sample.arguments), places[0], apart[0]), places[1], apart[1]))
        except FusibleError:
            return "no call"  # the values of one are none for the other
        before = buffer.clone()
        try:
            call(**put(put(deepcopy(sample.arguments), places[0], laid[0]), places[1], laid[1]))
        except FusibleError as error:
            assert "memory of its own" in str(error) and function.removeprefix("prim_") in str(error), error
            assert torch.equal(buffer, before), f"{function} wrote before it refused {places}"
            return "refused"
    # What a call might write it may have left alone: then it was read, and holds what lies there now.
    changed = [not torch.equal(raw(each), raw(of_before)) for each, of_before in zip(apart, contents, strict=True)]
    same = all(torch.equal(raw(each), raw(alone)) for each, alone, is_so in zip(laid, apart, changed, strict=True) if is_so)
    assert same, f"{backend}'s {function} with {places[0]} {shift} elements from {places[1]} is wrong"
    return "right"


def tried(entry: Record, samples: int, most: tuple[int, int]) -> Counter[str]:
    found: Counter[str] = Counter()
    for sample in entry.samples(entry.dtypes[0], samples):
        for place, other in pairs(sample, most):
            for backend in BACKENDS:
                for shift in (0, 1, -1):
                    found[outcome(entry.function, backend, sample, (place, other), shift)] += 1
    return found


SHARED_BYTES = ("nvfp4_multi_tensor_2d_partial_cast",)
"""Functions whose results may share a byte, of which each writes its half."""

WRITING = [
    pytest.param(entry, id=entry.function)
    for entry in TABLE.values()
    if "dropout" not in entry.function  # two calls give different numbers
    and entry.function not in SHARED_BYTES
    and any(True for sample in entry.samples(entry.dtypes[0], SAMPLES) for _ in pairs(sample, (1, 1)))
]


def test_the_table_has_such_functions() -> None:
    assert len(WRITING) >= 35


@pytest.mark.parametrize("entry", WRITING)
def test_tensors_in_one_place_are_right_or_refused(entry: Record) -> None:
    assert tried(entry, SAMPLES, (WRITTEN, OTHERS))


@pytest.mark.slow
@pytest.mark.parametrize("entry", WRITING)
def test_tensors_in_one_place_are_right_or_refused_in_every_sample(entry: Record) -> None:
    assert tried(entry, 8, (8, 16))


def test_several_results_of_a_call_never_share_memory() -> None:
    """Of every function that says which tensors it writes: each of these in the place of each other."""
    declared = {name for name, declaration in DECLARATIONS.items() if declaration.disjoint or declaration.alone}
    assert len(declared) >= 23 and declared - set(TABLE) <= {"multi_tensor_adam_capturable_master"}


def test_parts_of_a_packed_tensor_lie_apart() -> None:
    """Interleaved, so that the extents of each meet those of the others."""
    packed, pages = torch.zeros(6, 2, 2, 4), torch.zeros(3, 2, 2, 2, 4)
    k_cache, v_cache = pages.unbind(2)
    ints = [torch.tensor(values, dtype=torch.int32) for values in ([0, 2], [0, 2], [1])]
    new = torch.randn(2, 2, 4)
    for backend in BACKENDS:
        with tex.set_backend(backend):
            options = (tex.NVTE_QKV_Format.NVTE_THD, 1, 2, 2, 1, False)
            tex.copy_to_kv_cache(new, 2 * new, k_cache, v_cache, ints[2], ints[0], ints[1], *options)
            assert torch.equal(k_cache[1], new) and torch.equal(v_cache[1], 2 * new)
            with pytest.raises(FusibleError, match="[kv]_cache of copy_to_kv_cache: expected memory of its own"):
                tex.copy_to_kv_cache(new, new, k_cache, k_cache, ints[2], ints[0], ints[1], *options)
    assert not surely_disjoint([packed.unbind(1)]) and surely_disjoint([list(packed)])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_product_is_not_written_over_its_operands(backend: str) -> None:
    """Of a size at which operands are read more than once."""
    a, b = (torch.randn(96, 96, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    wanted = b @ a.t()
    for out in (a, b):
        before = out.clone()
        try:
            with tex.set_backend(backend):
                tex.generic_gemm(a, True, b, False, out, None, torch.float32, None, None, False, None, False, torch.empty(0), 0, False, False)
        except FusibleError as error:
            assert "memory of its own" in str(error) and torch.equal(out, before)
        else:
            torch.testing.assert_close(out, wanted)
            out.copy_(before)
